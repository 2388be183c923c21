"""source: the recipe's pools and where they are; what reading them costs over the network.

A pool is a local folder, a data set of the Hub at a commit, a bucket, or URLs. What was fetched is recorded by row
group in each unit's `run.json`, outside its identity: the same bytes from another place, or after another try, are the
same rows. What footers cost is in theirs, and what listing cost in the log and on the page of `dataset_revision`.
"""

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipeline_assets.references import Pipeline
from pipeline_assets.report import shown_table
from pipeline_assets.sections.source import FolderSource, HttpsSource, PackagesSource, PoolSource, S3Source
from pipeline_assets.stripes import Stage
from resources.artifact_store import ArtifactRef
from resources.hub import commit_of, is_commit
from resources.listings import Pool, PoolFolder, PoolInBucket, PoolOfUrls, PoolOnHub
from resources.package_corpus import (
    POOLS,
    choose_texts,
    corpus_inputs,
    offered_texts,
    runtime_distributions,
    write_package_corpus,
)
from resources.readers import Network
from resources.row_group_source import (
    Fetched,
    ListingCost,
    SourceFile,
    cost_of,
    list_files,
    list_with_cost,
    listing_fingerprint,
)
from resources.s3 import Bucket
from resources.web import Patience, silent
from training_io.errors import SourceError
from training_io.manifest import RUN_NAME

CORPUS_VERSION = 1


def pools_of(pipeline: Pipeline) -> list[Pool]:
    """The recipe's pools and where they are, in order of priority; a `packages` source is written first."""
    if not isinstance(pipeline.recipe.source, PackagesSource):
        return [_place_of(pool) for pool in pipeline.recipe.pools]
    limits = {
        "prose": pipeline.recipe.source.max_prose_bytes,
        "code": pipeline.recipe.source.max_code_bytes,
    }
    texts = choose_texts(offered_texts(runtime_distributions()), limits)
    corpus = pipeline.store.materialize(
        asset="package_corpus",
        inputs=corpus_inputs(texts),
        parameters=limits,
        version=CORPUS_VERSION,
        write=lambda folder: write_package_corpus(folder, texts),
    )
    folder, _ = pipeline.store.open(corpus)
    return [PoolFolder(name=pool, folder=folder / pool, glob="*.parquet") for pool in POOLS]


def _place_of(pool: PoolSource) -> Pool:
    if isinstance(pool, FolderSource):
        return PoolFolder(name=pool.pool, folder=Path(pool.path), glob=pool.glob)
    if isinstance(pool, HttpsSource):
        return PoolOfUrls(name=pool.pool, urls=pool.urls)
    if isinstance(pool, S3Source):
        is_anonymous = pool.credentials == "anonymous"
        bucket = Bucket(name=pool.bucket, endpoint=pool.endpoint, region=pool.region, is_anonymous=is_anonymous)
        return PoolInBucket(name=pool.pool, bucket=bucket, prefix=pool.prefix, glob=pool.glob)
    local = Path(pool.local_path) if pool.local_path is not None else None
    if local is not None and pool.local_copy == "complete":
        return PoolFolder(name=pool.pool, folder=local, glob=pool.glob)
    return PoolOnHub(
        name=pool.pool,
        repository=pool.repository,
        revision=pool.revision,
        folder=pool.path,
        glob=pool.glob,
        branch=pool.branch,
        local_folder=local,
    )


def network_of(pipeline: Pipeline, warn: Callable[[str], None]) -> Network:
    """How sources that are elsewhere are reached: `warn` is told of tries that fail, and footers go to the store."""
    return Network(store=pipeline.store, patience=Patience(warn=warn))


def revision_of(pipeline: Pipeline) -> str:
    """The data version of the source: a fingerprint of every pool's files by name, size, footer and content hash."""
    return listing_fingerprint(list_files(pools_of(pipeline), network_of(pipeline, silent)))


@dataclass(frozen=True, kw_only=True)
class ObservedSource:
    """The source as it is now: its files, what listing them cost, and what has followed their commits."""

    files: Sequence[SourceFile]
    cost: ListingCost
    newer: tuple[str, ...] | None = None  # sentences, one a pinned repository that has moved on; None: not looked for

    @property
    def revision(self) -> str:
        """The data version of the source."""
        return listing_fingerprint(self.files)

    @property
    def metadata(self) -> dict[str, Any]:
        """What the source's page says of it."""
        groups = [group for file in self.files for group in file.row_groups]
        newer = "not looked for by a run that reads rows" if self.newer is None else "; ".join(self.newer) or "none"
        return {
            "fingerprint": self.revision,
            "pools": ", ".join(dict.fromkeys(file.pool for file in self.files)),
            "files": len(self.files),
            "row_groups": len(groups),
            "rows": sum(group.num_rows for group in groups),
            "bytes": sum(file.size_bytes for file in self.files),
            "commits": ", ".join(_commits(self.files)) or "none",
            "newer_revision": newer,
            "listing_requests": self.cost.names.num_requests,
            "listing_bytes": self.cost.names.num_bytes,
            "footer_requests": self.cost.footers.num_requests,
            "footer_bytes": self.cost.footers.num_bytes,
        }


def observe_source(pipeline: Pipeline) -> ObservedSource:
    """What `revision_of` gives, and whether a commit has followed a pinned one. Cost: one more request a pin."""
    pools, network = pools_of(pipeline), network_of(pipeline, silent)
    files, cost = list_with_cost(pools, network)
    return ObservedSource(files=files, cost=cost, newer=newer_revisions(pools, network))


def newer_revisions(pools: Sequence[Pool], network: Network) -> tuple[str, ...]:
    """A sentence for each pin of the Hub's pools whose branch is at another commit now; a pin itself never moves.

    A branch that cannot be looked up is told of too, and stops nothing: what is pinned can be read without it.
    """
    pins = sorted(
        {
            (pool.repository, pool.revision, pool.branch)
            for pool in pools
            if isinstance(pool, PoolOnHub) and is_commit(pool.revision)
        }
    )
    sentences = []
    for repository, pinned, branch in pins:
        try:
            head = commit_of(network.hub, repository, branch)
        except SourceError as error:
            sentences.append(f"whether {repository} has a newer revision than {pinned} is not known: {error}")
            continue
        if head != pinned:
            sentences.append(f"a newer revision exists: {repository} is pinned at {pinned}, and {branch} is at {head}")
    return tuple(sentences)


def _commits(files: Sequence[SourceFile]) -> tuple[str, ...]:
    return tuple(sorted({f"{file.pool} at {file.commit[:12]}" for file in files if file.commit}))


def cost_in_words(files: list[SourceFile], cost: ListingCost) -> str:
    """What listing cost over the network, and the commits that were found there."""
    parts = {"listing": cost.names, "footers": cost.footers}
    costs = [
        f"{name}: {traffic.num_requests:,} requests and {traffic.num_bytes:,} bytes"
        for name, traffic in parts.items()
        if traffic.num_requests
    ]
    return "".join(f"; {part}" for part in [*_commits(files), *costs])


def write_run_facts(folder: Path, file: SourceFile, fetched: Sequence[Fetched]) -> None:
    """What a unit's reading was, for its `run.json`: place, commit, hash or ETag; each row group's ranges and cost."""
    row_groups = [{"row_group": part.row_group, "ranges": part.ranges, **cost_of(part.traffic)} for part in fetched]
    facts = {
        "place": "local" if isinstance(file.location, Path) else file.location.place,
        "commit": file.commit,
        "content": file.content,
        "row_groups": row_groups,
    }
    (folder / RUN_NAME).write_text(json.dumps({"source": facts}))


def traffic_metadata(stage: Stage, parts: Sequence[ArtifactRef]) -> dict[str, Any]:
    """What this run fetched, and what each file and row group cost when it was read; nothing for local files."""
    found = [(part, _source_facts(stage.folder(part))) for part in parts]
    rows = [_row_group_row(part, facts, group) for part, facts in found for group in facts["row_groups"]]
    if not any(row["requests"] for row in rows):
        return {}
    now = [group for part, facts in found if part.outcome != "reused" for group in facts["row_groups"]]
    files: dict[tuple[str, ...], list[dict[str, Any]]] = {}
    for row in rows:
        files.setdefault(tuple(row[name] for name in ("pool", "file", "commit", "content")), []).append(row)
    return {
        "bytes_fetched": sum(group["bytes_fetched"] for group in now),
        "requests": sum(group["requests"] for group in now),
        "retries": sum(group["tries"] - len(group["ranges"]) for group in now),
        **shown_table("fetched", [_file_row(*key, groups) for key, groups in files.items()]),
        **shown_table("fetched_by_row_group", rows),
    }


def _row_group_row(part: ArtifactRef, facts: Mapping[str, Any], group: Mapping[str, Any]) -> dict[str, Any]:
    return {
        "pool": part.counts["pool"],
        "file": part.counts["file"],
        "row group": group["row_group"],
        "byte ranges": ", ".join(f"{start:,} to {end:,}" for start, end in group["ranges"]),
        "ranges": len(group["ranges"]),
        "requests": group["requests"],
        "retries": group["tries"] - len(group["ranges"]),
        "bytes fetched": group["bytes_fetched"],
        "commit": facts["commit"],
        "content": facts["content"],
    }


def _file_row(pool: str, file: str, commit: str, content: str, groups: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    summed = {name: sum(group[name] for group in groups) for name in ("ranges", "requests", "retries", "bytes fetched")}
    return {"pool": pool, "file": file, "row groups": len(groups), **summed, "commit": commit, "content": content}


def _source_facts(folder: Path) -> dict[str, Any]:
    """What `write_run_facts` wrote; nothing fetched where a unit is from before it was written, or lost its record.

    No hash covers the record, so damage is not found before, and a unit whose rows are whole is not refused for it.
    """
    nothing = {"commit": "", "content": "", "row_groups": []}
    try:
        facts: dict[str, Any] = json.loads((folder / RUN_NAME).read_bytes())["source"]
        is_ours = all("tries" in group for group in facts["row_groups"])
    except (FileNotFoundError, ValueError, KeyError, TypeError):
        return nothing
    return facts if is_ours else nothing
