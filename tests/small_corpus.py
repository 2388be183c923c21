"""A small corpus with every kind of document that a rule speaks of, a recipe over it, and two ways to build it.

Two pools of Parquet files with row groups of 12 rows, about 150 documents of made-up sentences, and planted: exact
copies within and across pools, a near copy, a unique text, empty, null and wordless texts, literal EOS text, CRLF, a
byte-order mark, a CJK text, a long text, and a reference text. `materialize` goes through Dagster; `build` calls the
stages' functions in the graph's order, which costs a tenth of it.
"""

import contextlib
import hashlib
import inspect
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import dagster as dg
import pyarrow as pa
import pyarrow.parquet as pq
import yaml

import asset_checks.clusters
import asset_checks.handoff
import asset_checks.headroom
import asset_checks.hits
import asset_checks.kept
import asset_checks.leaks
import asset_checks.ledger
import asset_checks.packs
import asset_checks.quality_report
import asset_checks.references
import asset_checks.removals
import asset_checks.shards
import asset_checks.signatures
import asset_checks.source
import asset_checks.splits
import asset_checks.tokenizer_report
import asset_checks.tokens
import asset_checks.training
from asset_checks.verdicts import Verdict
from pipeline_assets import (
    buckets,
    clusters,
    handoff,
    ledger,
    packs,
    reference_sets,
    shards,
    signatures,
    source,
    splits,
    tokenizer,
    tokenizer_report,
    tokens,
)
from pipeline_assets.definitions import CHECKS, build_definitions
from pipeline_assets.flow import STAGES
from pipeline_assets.recipe_file import load_recipe
from pipeline_assets.references import Pipeline, PipelineResource
from pipeline_assets.stripes import Sealed, Stage
from resources.artifact_store import ArtifactRef, ArtifactStore
from training_io.errors import CorpusmillError
from training_io.hashing import identity_of

ROOT = Path(__file__).resolve().parents[1]
ROWS_PER_GROUP = 12
EOS = "<|endoftext|>"
TRAINING, REPORT = LAST = ("varlen_training_run", "quality_report")
CHECK_MODULES = (
    asset_checks.source,
    asset_checks.references,
    asset_checks.signatures,
    asset_checks.kept,
    asset_checks.clusters,
    asset_checks.removals,
    asset_checks.hits,
    asset_checks.tokens,
    asset_checks.tokenizer_report,
    asset_checks.leaks,
    asset_checks.splits,
    asset_checks.shards,
    asset_checks.packs,
    asset_checks.ledger,
    asset_checks.headroom,
    asset_checks.handoff,
    asset_checks.training,
    asset_checks.quality_report,
)
CHECK_NAMES = tuple(key.name for check in CHECKS for key in check.check_keys)


def sentences(number: int, num_words: int = 60) -> str:
    """Made-up prose that depends on its number alone; two numbers share next to no five words in a row."""
    generator = random.Random(f"document {number}")
    syllables = ["ba", "ne", "ti", "ro", "lu", "sha", "mek", "or", "vin", "dal", "pu", "gre"]
    words = ["".join(generator.choices(syllables, k=generator.randint(1, 4))) for _ in range(num_words)]
    for at in range(9, num_words, 10):
        words[at] += "."
    return " ".join(words)


EXACT = sentences(1_000)
CROSS_POOL = sentences(1_001)
NEAR_ORIGINAL = sentences(1_002, 150)
NEAR_COPY = NEAR_ORIGINAL.rsplit(" ", 2)[0] + " altered ending"
UNIQUE = "A text that nothing else resembles: " + sentences(1_003)
WORDLESS = "!!! ???"
CANARY = f"The literal text {EOS} is spelled out here, {EOS}{EOS} again. " + sentences(1_004, 20)
CRLF = "First line\r\nsecond line\r\n" + sentences(1_005, 20)
BYTE_ORDER_MARK = "\ufeffhi there, " + sentences(1_006, 20)
CJK = "中文文本也要完整地保留下来。每个汉字都算一个词。" * 3 + "结尾。"
LONG = sentences(1_007, 900)
HELD_OUT = sentences(1_008, 150)
HELD_OUT_NEAR_COPY = HELD_OUT.rsplit(" ", 2)[0] + " other ending"
LIKE_A_REFERENCE = sentences(1_009, 150)

PLANTED = {
    "alpha": [EXACT, EXACT, CROSS_POOL, NEAR_ORIGINAL, "", None, CANARY, CRLF, LONG, HELD_OUT],
    "beta": [CROSS_POOL, NEAR_COPY, UNIQUE, WORDLESS, BYTE_ORDER_MARK, CJK, HELD_OUT_NEAR_COPY, LIKE_A_REFERENCE],
}
FILES = {"alpha": ("a_000", "deep/a_001"), "beta": ("b_000",)}
PLAIN_PER_FILE = 45
NUM_ROWS = 3 * PLAIN_PER_FILE + sum(len(texts) for texts in PLANTED.values())


def corpus_rows() -> dict[str, dict[str, list[dict[str, Any]]]]:
    """Rows by pool and file; planted texts are dealt out over the pool's files."""
    rows: dict[str, dict[str, list[dict[str, Any]]]] = {}
    number = 0
    for pool, files in FILES.items():
        rows[pool] = {}
        for position, file in enumerate(files):
            plain = [sentences(number + row, 30 + 2 * row) for row in range(PLAIN_PER_FILE)]
            number += PLAIN_PER_FILE
            planted = PLANTED[pool][position :: len(files)]
            texts = [*plain[:5], *planted, *plain[5:]]
            rows[pool][file] = [
                {
                    "text": text,
                    "id": f"{pool}-{file}-{row}",
                    "dump": f"crawl-{row % 2}",
                    "url": f"https://example/{row}",
                }
                for row, text in enumerate(texts)
            ]
    return rows


def write_rows(path: Path, rows: Sequence[Mapping[str, Any]], rows_per_group: int = ROWS_PER_GROUP) -> Path:
    """Write rows as a Parquet file; all values are strings or null."""
    path.parent.mkdir(parents=True, exist_ok=True)
    names = list(rows[0]) if rows else ["text"]
    table = pa.table({name: pa.array([row[name] for row in rows], pa.string()) for name in names})
    pq.write_table(table, path, row_group_size=rows_per_group, write_page_checksum=True)
    return path


def write_corpus(folder: Path) -> Path:
    """Write the pools below a folder, and the reference file beside them."""
    for pool, files in corpus_rows().items():
        for file, rows in files.items():
            write_rows(folder / pool / f"{file}.parquet", rows)
    references = [HELD_OUT, sentences(2_000), LIKE_A_REFERENCE.rsplit(" ", 2)[0] + " some ending"]
    (folder / "held_out.txt").write_text("\n".join(references), encoding="utf-8")
    return folder


RECIPE: dict[str, Any] = {
    "name": "small",
    "seed": 11,
    "source": {"kind": "local", "pools": [{"name": "alpha", "path": "alpha"}, {"name": "beta", "path": "beta"}]},
    "reading": {"stripes": 2, "stripes_read": 2, "unit_megabytes": 1},
    "references": [
        {"name": "sample", "kind": "tokenizer_sample", "documents_per_pool": 12},
        {"name": "held_out", "kind": "file", "path": "held_out.txt", "action": "train_only"},
    ],
    "dedup": {"mode": "near"},
    "tokenizer": {"kind": "trained", "sample": "sample", "vocab_size": 384, "eos": EOS},
    "splits": {
        "order": "shuffled",
        "min_tokens": 12,
        "assignment": {"policy": "fraction", "seed": 5, "validation_fraction": 0.2},
    },
    "shards": {"max_shard_tokens": 12_000},
    "packs": {
        "max_seq_len": 32,
        "capacity": 64,
        "strategy": "oldest_first",
        "buffer": 16,
        "batch_size": 4,
        "eval_microbatch_tokens": 256,
    },
    "training": {
        "layout": "packs",
        "model": {"d_model": 16, "num_layers": 1, "num_heads": 2, "num_kv_heads": 1, "d_ff": 32},
        "steps": 3,
        "learning_rate": 0.01,
        "warmup_steps": 1,
        "seed": 7,
        "eval_every": 3,
        "eval_microbatches": 2,
        "checkpoint_every": 1,
        "num_threads": 1,
    },
}
WINDOWS = {
    "training.layout": "windows",
    "training.windows": {"length": 32, "batch_size": 2},
}


def write_recipe(folder: Path, changes: Mapping[str, Any] | None = None, name: str = "recipe.yaml") -> Path:
    """The small recipe with dotted keys set to other values (None takes a key out), written beside the pools."""
    recipe = json.loads(json.dumps(RECIPE))
    for dotted, value in (changes or {}).items():
        *sections, key = dotted.split(".")
        section = recipe
        for part in sections:
            section = section[part]
        if value is None:
            del section[key]
        else:
            section[key] = value
    path = folder / name
    path.write_text(yaml.safe_dump(recipe, allow_unicode=True), encoding="utf-8")
    return path


def doc_id(text: str) -> bytes:
    """The document's id."""
    return hashlib.sha256(text.encode()).digest()


@dataclass(frozen=True, kw_only=True)
class Built:
    """A home with everything materialized, and what it was built from."""

    recipe: Path
    home: Path
    refs: Mapping[str, ArtifactRef]
    result: dg.ExecuteInProcessResult | None = None
    pages: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)  # what `build` would have shown

    @property
    def stage(self) -> Stage:
        """A stage that may read what is quarantined, as checks do."""
        return open_stage(self.recipe, self.home, is_judging=True)

    def folder(self, asset: str) -> Path:
        """Folder of an asset's artifact."""
        return self.stage.store.folder(self.refs[asset])


def silence(_: str) -> None:
    """Say nothing."""


def open_stage(recipe: Path, home: Path, *, is_judging: bool = False) -> Stage:
    """What a stage function is given."""
    pipeline = Pipeline(store=ArtifactStore(home.resolve()), recipe=load_recipe(str(recipe)))
    return Stage(pipeline=pipeline, say=silence, warn=silence, observe=lambda *seen: None, is_judging=is_judging)


def materialize(
    recipe: Path,
    home: Path,
    *assets: str,
    instance: dg.DagsterInstance | None = None,
) -> dg.ExecuteInProcessResult:
    """Materialize assets (all of them when none is named) with their checks, in one run that does not raise."""
    definitions = build_definitions(PipelineResource(recipe=str(recipe), home=str(home)))
    return execute(definitions.resolve_implicit_global_asset_job_def(), instance, assets or tuple(STAGES))


def execute(
    job: dg.JobDefinition, instance: dg.DagsterInstance | None, assets: Sequence[str] | None = None, **tags: str
) -> dg.ExecuteInProcessResult:
    """One run that does not raise, in the given instance or in one that lasts as long as the run."""
    with contextlib.ExitStack() as stack:
        if instance is None:
            instance = stack.enter_context(short_instance())
        return job.execute_in_process(
            instance=instance,
            asset_selection=[dg.AssetKey(name) for name in assets] if assets is not None else None,
            raise_on_error=False,
            run_config={"loggers": {"progress": {"config": {}}}},
            tags=tags,
        )


@contextlib.contextmanager
def short_instance() -> Iterator[dg.DagsterInstance]:
    """A Dagster instance in memory."""
    with tempfile.TemporaryDirectory() as folder, dg.DagsterInstance.ephemeral(tempdir=folder) as instance:
        yield instance


def run_checks(
    recipe: Path, home: Path, *names: str, instance: dg.DagsterInstance | None = None
) -> dg.ExecuteInProcessResult:
    """Execute some checks and no asset, as the UI's button does."""
    keys = [key for check in CHECKS for key in check.check_keys if key.name in names]
    assert sorted(key.name for key in keys) == sorted(names), names
    definitions = dg.Definitions.merge(
        build_definitions(PipelineResource(recipe=str(recipe), home=str(home))),
        dg.Definitions(jobs=[dg.define_asset_job("checks_alone", selection=dg.AssetSelection.checks(*keys))]),
    )
    return execute(definitions.resolve_job_def("checks_alone"), instance)


def materialized_metadata(result: dg.ExecuteInProcessResult) -> dict[str, dict[str, Any]]:
    """Metadata values of each materialized asset, and its data version under `data_version`."""
    found = {}
    for event in result.all_events:
        if event.event_type == dg.DagsterEventType.ASSET_MATERIALIZATION:
            materialization = event.step_materialization_data.materialization
            values = {name: value.value for name, value in materialization.metadata.items()}
            found[materialization.asset_key.path[-1]] = {
                **values,
                "data_version": materialization.tags["dagster/data_version"],
            }
    return found


def evaluations(result: dg.ExecuteInProcessResult) -> dict[str, dg.AssetCheckEvaluation]:
    """Check evaluations by name."""
    return {evaluation.check_name: evaluation for evaluation in result.get_asset_check_evaluations()}


def judge_of(name: str) -> Callable[..., Verdict]:
    """The law that a check is named after."""
    (judge,) = [getattr(module, name) for module in CHECK_MODULES if hasattr(module, name)]
    return judge


def assets_read_by(name: str) -> list[str]:
    """The assets that a check reads; the first one is judged."""
    return list(inspect.signature(judge_of(name)).parameters)[1:]


def judged(name: str, built: Built) -> Verdict:
    """The verdict of one check on what the home's references name."""
    refs = recorded(built.recipe, built.home)
    return judge_of(name)(built.stage, *[refs[asset] for asset in assets_read_by(name)])


def failures(result: dg.ExecuteInProcessResult) -> dict[str, str]:
    """What the run's log says of each failed step: the description that a person reads, else the error's message."""
    found = {}
    for event in result.all_events:
        if event.event_type == dg.DagsterEventType.STEP_FAILURE:
            data = event.step_failure_data
            described = data.user_failure_data.description if data.user_failure_data else None
            found[event.step_key] = described or f"UNDESCRIBED {data.error.message if data.error else ''}"
    return found


def recorded(recipe: Path, home: Path) -> dict[str, ArtifactRef]:
    """What each asset's latest artifact is under the recipe; assets without one are left out."""
    pipeline = open_stage(recipe, home).pipeline
    found = {}
    for asset in STAGES:
        try:
            found[asset] = pipeline.resolve(asset)
        except CorpusmillError:
            continue
    return found


def build(recipe: Path, home: Path, upto: str = "handoff_package") -> Built:
    """Every data asset by its stage's own functions, without Dagster."""
    stage = open_stage(recipe, home)
    refs: dict[str, ArtifactRef] = {}
    pages: dict[str, Mapping[str, Any]] = {}

    def finish(sealed: Sealed) -> bool:
        refs[sealed.ref.asset], pages[sealed.ref.asset] = sealed.ref, sealed.metadata
        stage.pipeline.record(sealed.ref, "built")
        return sealed.ref.asset == upto

    def fan_out(
        plan: Callable[..., Any], work: Callable[..., Any], seal: Callable[..., Sealed], read: str, sealing: str
    ) -> bool:
        tasks = plan(stage, **{name: refs[name] for name in read.split()})
        parts = [ref for task in tasks for ref in work(stage, task)]
        return finish(seal(stage, parts, **{name: refs[name] for name in sealing.split()}))

    def whole(work: Callable[..., Sealed], read: str) -> bool:
        return finish(work(stage, **{name: refs[name] for name in read.split()}))

    raw, sets, marks = "raw_row_groups", "reference_sets", "minhash_signatures"
    signing = (signatures.plan_signatures, signatures.build_signatures, signatures.seal_signatures)
    clustering = (buckets.plan_buckets, buckets.build_buckets, clusters.seal_clusters)
    encoding = (tokens.plan_tokens, tokens.build_tokens, tokens.seal_tokens)
    splitting = (splits.plan_split_documents, splits.build_split_documents, splits.seal_split_documents)
    cutting = (shards.plan_shards, shards.build_shards, shards.seal_shards)
    report_inputs = f"{raw} tokenizer document_tokens"
    steps: list[Callable[[], bool]] = [
        lambda: fan_out(source.plan_rows, source.build_rows, source.seal_rows, "", ""),
        lambda: whole(reference_sets.build_references, raw),
        lambda: fan_out(*signing, f"{raw} {sets}", raw),
        lambda: fan_out(*clustering, *[f"{raw} {sets} {marks}"] * 2),
        lambda: whole(tokenizer.build_tokenizer, sets),
        lambda: fan_out(*encoding, f"{raw} lsh_clusters tokenizer", "tokenizer"),
        lambda: whole(tokenizer_report.build_report, report_inputs),
        lambda: fan_out(*splitting, *[f"{raw} lsh_clusters document_tokens"] * 2),
        lambda: fan_out(*cutting, *["document_tokens split_documents tokenizer"] * 2),
        lambda: whole(packs.build_plan, "token_shards"),
        lambda: whole(packs.build_stats, "token_shards packing_plan"),
        lambda: whole(ledger.build_ledger, "token_shards packing_plan"),
        lambda: whole(handoff.build_package, f"{raw} split_documents tokenizer token_shards packing_plan"),
    ]
    any(step() for step in steps)
    return Built(recipe=recipe, home=home, refs=refs, pages=pages)


def build_beside(corpus: Path, changes: Mapping[str, Any], upto: str) -> Built:
    """Built in `home` beside the pools, by a recipe file of its own: what is there already is taken as it is.

    Builds that differ in their recipes alone may share that home; what is to be damaged is copied first.
    """
    recipe = write_recipe(corpus, changes, f"{identity_of(changes)[:16]}.yaml")
    return build(recipe, corpus / "home", upto)


@cache
def clean(session_folder: Path) -> Built:
    """One home a test session in which Dagster materialized everything: to read, not to change."""
    folder = write_corpus(session_folder / "small")
    recipe, home = write_recipe(folder), folder / "home"
    result = materialize(recipe, home)
    return Built(recipe=recipe, home=home, refs=recorded(recipe, home), result=result)


def copy_home(built: Built, target: Path) -> Built:
    """The same home under another folder, free to be damaged."""
    shutil.copytree(built.home, target)
    return Built(recipe=built.recipe, home=target, refs=built.refs)


def artifact_files(home: Path, *, leave_out: Sequence[str] = ()) -> dict[str, str]:
    """SHA-256 of every file of every artifact below a home, run.json aside, by path."""
    return {
        path.relative_to(home).as_posix(): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(home.rglob("*"))
        if path.is_file()
        and path.name != "run.json"
        and path.relative_to(home).parts[0]
        not in ("_references", "_training", "_verdicts", "_pages", "dagster", *leave_out)
    }


def unfinished(home: Path) -> list[str]:
    """Folders that look like artifacts and are not sealed, and temporary ones."""
    names = [
        path
        for path in home.glob("*/*/*")
        if path.is_dir() and path.parts[-3][0] not in "_." and path.parts[-3] != "dagster"
    ]
    return sorted(
        path.relative_to(home).as_posix()
        for path in names
        if path.name.startswith(".") or not (path / "manifest.json").is_file()
    )


def command_environment(recipe: Path, home: Path, **more: str) -> dict[str, str]:
    """The environment of a process of its own that works on a recipe and a home."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith(("CORPUSMILL_", "DAGSTER_"))}
    return {
        **inherited,
        "PYTHONPATH": str(ROOT),
        "CORPUSMILL_RECIPE": str(recipe),
        "CORPUSMILL_HOME": str(home),
        **more,
    }


def command(*arguments: str) -> list[str]:
    """`python -m pipeline_assets …`."""
    return [sys.executable, "-m", "pipeline_assets", *arguments]


def run_command(
    recipe: Path, home: Path, *arguments: str, cwd: Path | None = None, **more: str
) -> subprocess.CompletedProcess[str]:
    """Run the command line to its end."""
    return subprocess.run(
        command(*arguments),
        env=command_environment(recipe, home, **more),
        cwd=cwd or ROOT,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
