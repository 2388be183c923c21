"""The pipeline over the network: the same artifacts as from local files, each byte fetched once, no secret anywhere."""

import json
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import file_server
import pytest
import small_corpus
from file_server import BUCKET, COMMIT, REPOSITORY, SIGNATURE, Answer, Fault, FileServer, serving_files

import resources.web
from pipeline_assets.pools import revision_of
from pipeline_assets.stripes import units_in

TOKEN, KEY, SECRET = "hf_sentineltoken", "SENTINELKEY", "sentinelsecret"
UPTO = "minhash_signatures"


@pytest.fixture
def corpus(tmp_path: Path) -> Path:
    """The pools of the small corpus, to be served."""
    return small_corpus.write_corpus(tmp_path / "corpus")


@pytest.fixture
def server(corpus: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FileServer]:
    monkeypatch.setattr(resources.web, "FIRST_WAIT_SECONDS", 0.001)
    with serving_files(corpus) as one:
        one.secrets, one.is_private = {KEY: SECRET}, True
        for name, value in environment(one).items():
            monkeypatch.setenv(name, value)
        yield one


def environment(server: FileServer) -> dict[str, str]:
    return {
        "HF_ENDPOINT": server.url,
        "HF_TOKEN": TOKEN,
        "AWS_ACCESS_KEY_ID": KEY,
        "AWS_SECRET_ACCESS_KEY": SECRET,
        "AWS_SESSION_TOKEN": "",
    }


def hub_pool(pool: str, **more: Any) -> dict[str, Any]:
    return {"kind": "hub", "repository": REPOSITORY, "revision": "main", "path": pool, "pool": pool, **more}


def elsewhere(server: FileServer) -> dict[str, dict[str, Any]]:
    """The pool `beta`, in each place that is not a folder."""
    return {
        "hub": hub_pool("beta"),
        "s3": {"kind": "s3", "pool": "beta", "bucket": BUCKET, "prefix": "beta", "endpoint": server.url},
        "https": {"kind": "https", "pool": "beta", "urls": [f"{server.url}/files/beta/b_000.parquet"]},
    }


def recipe_over(folder: Path, *pools: dict[str, Any], **changes: Any) -> Path:
    """The small recipe over pools in their places, beside its reference file."""
    return small_corpus.write_recipe(folder, {"source": {"kind": "pools", "pools": list(pools)}, **changes})


def sent(server: FileServer) -> dict[str, int]:
    """Bytes of files that were sent since the log was cleared, by the file's name."""
    found: dict[str, int] = {}
    for one in server.data():
        name = one.path.partition("?")[0].rpartition("/")[2]
        found[name] = found.get(name, 0) + one.sent
    return {name: number for name, number in found.items() if number}


def run_facts(built: small_corpus.Built) -> list[dict[str, Any]]:
    """What the units of the raw rows say of how they were read."""
    units = units_in(built.stage, built.refs["raw_row_groups"])
    return [json.loads((built.stage.store.folder(unit) / "run.json").read_text())["source"] for unit in units]


@pytest.mark.parametrize("place", ["hub", "s3", "https"])
def test_rows_from_elsewhere_and_all_after_them_are_those_of_local_files(
    place: str, server: FileServer, corpus: Path, tmp_path: Path
) -> None:
    local = small_corpus.build(small_corpus.write_recipe(corpus), tmp_path / "local", upto=UPTO)
    alpha = {"kind": "folder", "pool": "alpha", "path": "alpha"}
    recipe = recipe_over(corpus, alpha, elsewhere(server)[place])
    remote = small_corpus.build(recipe, tmp_path / "remote", upto=UPTO)
    assert sent(server).keys() == {"b_000.parquet"}
    units = [units_in(built.stage, built.refs["raw_row_groups"]) for built in (local, remote)]
    assert [(unit.unit, unit.digest, unit.counts) for unit in units[0]] == [
        (unit.unit, unit.digest, unit.counts) for unit in units[1]
    ]
    assert (remote.refs[UPTO].identity, remote.refs[UPTO].digest) == (
        local.refs[UPTO].identity,
        local.refs[UPTO].digest,
    )


def test_what_was_fetched_is_recorded_by_unit_and_summed_on_the_page(
    server: FileServer, corpus: Path, tmp_path: Path
) -> None:
    recipe = recipe_over(corpus, hub_pool("alpha"), hub_pool("beta"))
    result = small_corpus.materialize(recipe, tmp_path / "home", "raw_row_groups")
    assert result.success, small_corpus.failures(result)
    metadata = small_corpus.materialized_metadata(result)["raw_row_groups"]
    stage = small_corpus.open_stage(recipe, tmp_path / "home")
    built = small_corpus.Built(
        recipe=recipe, home=tmp_path / "home", refs=small_corpus.recorded(recipe, tmp_path / "home")
    )
    facts = run_facts(built)
    assert {one["commit"] for one in facts} == {COMMIT}
    assert all(one["content"].startswith("sha256:") for one in facts)
    assert all(one["place"].startswith(f"hub:{REPOSITORY}/") for one in facts)
    for one in facts:
        ranges = [tuple(ends) for group in one["row_groups"] for ends in group["ranges"]]
        for group in one["row_groups"]:
            assert group["bytes_fetched"] == sum(end - start for start, end in group["ranges"])
            assert group["tries"] == len(group["ranges"])
            assert group["requests"] == 2 * len(group["ranges"])  # each is sent on to the store
        asked = {(start, end - 1) for start, end in ranges}
        assert asked <= {tuple(map(int, data.range.removeprefix("bytes=").split("-"))) for data in server.data()}
    groups = [group for one in facts for group in one["row_groups"]]
    assert metadata["bytes_fetched"] == sum(group["bytes_fetched"] for group in groups)
    assert metadata["requests"] == sum(group["requests"] for group in groups)
    assert metadata["retries"] == 0
    by_row_group = [record.data for record in metadata["fetched_by_row_group"].records]
    assert [(row["row group"], row["ranges"], row["requests"], row["bytes fetched"]) for row in by_row_group] == [
        (group["row_group"], len(group["ranges"]), group["requests"], group["bytes_fetched"]) for group in groups
    ]
    assert {row["commit"] for row in by_row_group} == {COMMIT}
    assert {row["content"] for row in by_row_group} == {one["content"] for one in facts}
    rows = [record.data for record in metadata["fetched"].records]
    assert [(row["pool"], row["file"], row["commit"]) for row in rows] == [
        ("alpha", "a_000.parquet", COMMIT),
        ("alpha", "deep/a_001.parquet", COMMIT),
        ("beta", "b_000.parquet", COMMIT),
    ]
    assert sum(row["bytes fetched"] for row in rows) == metadata["bytes_fetched"]
    for unit in units_in(stage, built.refs["raw_row_groups"]):
        manifest = (stage.store.folder(unit) / "manifest.json").read_text()
        assert COMMIT not in manifest  # where the bytes were found is not what they are
        assert "run.json" not in manifest


def test_a_record_of_reading_that_is_lost_or_damaged_costs_no_rows(
    server: FileServer, corpus: Path, tmp_path: Path
) -> None:
    recipe = recipe_over(corpus, hub_pool("alpha"), hub_pool("beta"))
    built = small_corpus.build(recipe, tmp_path / "home", upto="raw_row_groups")
    first, second, third, *others = units_in(built.stage, built.refs["raw_row_groups"])
    (built.stage.folder(first) / "run.json").unlink()
    (built.stage.folder(second) / "run.json").write_bytes(b"")
    (built.stage.folder(third) / "run.json").write_text('{"source": {"row_groups": [{"row_group": 0}]}}')
    result = small_corpus.materialize(recipe, built.home, "raw_row_groups")
    assert result.success, small_corpus.failures(result)
    metadata = small_corpus.materialized_metadata(result)["raw_row_groups"]
    assert metadata["artifacts_reused"] == 4 + len(others)
    told = [(row.data["file"], row.data["row group"]) for row in metadata["fetched_by_row_group"].records]
    groups = [(unit, json.loads((built.stage.folder(unit) / "run.json").read_text())["source"]) for unit in others]
    assert told == [(unit.counts["file"], group["row_group"]) for unit, one in groups for group in one["row_groups"]]
    assert told


def test_a_retry_goes_on_from_the_units_that_are_done(server: FileServer, corpus: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    recipe = recipe_over(corpus, hub_pool("alpha"), hub_pool("beta"))
    assert revision_of(small_corpus.open_stage(recipe, home).pipeline)  # the footers are there
    server.lasting = {"b_000.parquet": file_server.status(503)}
    failed = small_corpus.materialize(recipe, home, "raw_row_groups")
    assert not failed.success
    refusals = small_corpus.failures(failed)
    assert refusals
    for refusal in refusals.values():
        assert refusal.startswith("SourceError: beta/b_000.parquet of someone/corpus at 0123456789ab: expected bytes ")
        assert "found HTTP 503 Service Unavailable in 5 tries. Check the network and HF_ENDPOINT" in refusal
    assert small_corpus.unfinished(home) == []
    done = {path.parent.name for path in home.glob("raw_row_groups/*/*")}
    assert done
    assert all(name.startswith("alpha-") for name in done)
    server.lasting = {}
    server.log.clear()
    again = small_corpus.materialize(recipe, home, "raw_row_groups")
    assert again.success, small_corpus.failures(again)
    assert sent(server).keys() == {"b_000.parquet"}
    whole = small_corpus.build(recipe, tmp_path / "whole", upto="raw_row_groups")
    assert small_corpus.recorded(recipe, home)["raw_row_groups"].digest == whole.refs["raw_row_groups"].digest


def test_the_bytes_of_one_unit_come_while_another_is_under_way(
    server: FileServer, corpus: Path, tmp_path: Path
) -> None:
    recipe = recipe_over(corpus, hub_pool("alpha"), **{"reading.stripes": 1, "reading.stripes_read": 1})
    one_by_one = small_corpus.build(recipe, tmp_path / "one", upto="raw_row_groups")
    assert revision_of(small_corpus.open_stage(recipe, tmp_path / "two").pipeline)  # the footers are there
    asked = {name: threading.Event() for name in ("a_000.parquet", "a_001.parquet")}

    def once_asked(own: str, other: str) -> Fault:
        """The answer, once the other file's bytes are asked for too; else none."""

        def wait(handler: file_server.Handler, answer: Answer) -> Answer | None:
            if not handler.path.startswith("/store/"):
                return answer
            asked[own].set()
            return answer if asked[other].wait(20) else None

        return wait

    first, second = asked
    server.lasting = {first: once_asked(first, second), second: once_asked(second, first)}
    together = small_corpus.build(recipe, tmp_path / "two", upto="raw_row_groups")
    assert together.refs["raw_row_groups"].identity == one_by_one.refs["raw_row_groups"].identity
    assert small_corpus.artifact_files(together.home) == small_corpus.artifact_files(one_by_one.home)


def test_what_is_whole_on_disk_is_not_fetched(server: FileServer, corpus: Path, tmp_path: Path) -> None:
    shutil.copytree(corpus / "alpha", tmp_path / "copy")
    (tmp_path / "copy" / "deep" / "a_001.parquet").unlink()
    pool = {"local_path": str(tmp_path / "copy"), "local_copy": "partial"}
    fetched = small_corpus.build(recipe_over(corpus, hub_pool("alpha")), tmp_path / "fetched", upto="raw_row_groups")
    server.log.clear()
    partly = small_corpus.build(
        recipe_over(corpus, hub_pool("alpha", **pool)), tmp_path / "part", upto="raw_row_groups"
    )
    assert sent(server).keys() == {"a_001.parquet"}
    assert partly.refs["raw_row_groups"].identity == fetched.refs["raw_row_groups"].identity
    assert [facts["place"] == "local" for facts in run_facts(partly)] == [True, False] * 2


FAULTS = [  # of four at a time, one request may meet them all and be answered at its fifth try
    [file_server.cut_short, file_server.reset, file_server.shorter, file_server.another_range],
    [file_server.status(429), file_server.without_content_range, file_server.status(500), file_server.status(503)],
]


@pytest.mark.parametrize("place", ["hub", "s3", "https"])
def test_a_bad_network_costs_tries_and_no_rows(place: str, server: FileServer, corpus: Path, tmp_path: Path) -> None:
    recipe = recipe_over(corpus, elsewhere(server)[place])
    good = small_corpus.build(recipe, tmp_path / "good", upto="raw_row_groups")
    for number, faults in enumerate(FAULTS):
        assert revision_of(
            small_corpus.open_stage(recipe, tmp_path / f"bad_{number}").pipeline
        )  # the footers are there
        server.faults = [file_server.none] * (place == "https") + faults  # a listing of URLs asks for bytes
        bad = small_corpus.build(recipe, tmp_path / f"bad_{number}", upto="raw_row_groups")
        assert not server.faults
        assert bad.refs["raw_row_groups"].digest == good.refs["raw_row_groups"].digest
        assert small_corpus.artifact_files(bad.home) == small_corpus.artifact_files(good.home)
        groups = [[group for facts in run_facts(built) for group in facts["row_groups"]] for built in (good, bad)]
        ledgers = [[(group["row_group"], group["ranges"]) for group in one] for one in groups]
        assert ledgers[0] == ledgers[1]  # what was planned is the same, what it took is not
        retries = [sum(group["tries"] - len(group["ranges"]) for group in one) for one in groups]
        assert retries == [0, len(faults)]


def test_no_secret_is_in_a_home_a_log_or_an_error(
    server: FileServer, corpus: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    home = tmp_path / "home"
    server.faults = [file_server.status(503), file_server.cut_short]
    good = recipe_over(corpus, hub_pool("alpha"), elsewhere(server)["s3"])
    results = [small_corpus.materialize(good, home, "raw_row_groups")]
    server.lasting = {".parquet": file_server.status(403, X_Error_Code="GatedRepo", X_Error_Message=SIGNATURE)}
    for pools in ((hub_pool("beta"),), (elsewhere(server)["s3"],), (elsewhere(server)["https"],)):
        shutil.rmtree(home / "source_footers", ignore_errors=True)
        results.append(small_corpus.materialize(recipe_over(corpus, *pools), home, "raw_row_groups"))
    assert [result.success for result in results] == [True, False, False, False]
    done = small_corpus.run_command(
        recipe_over(corpus, hub_pool("beta")), home, "run", "--without-training", **environment(server)
    )
    assert done.returncode == 1
    assert "HF_TOKEN to a token that may read it" in done.stderr
    said = capfd.readouterr()
    texts = [done.stdout, done.stderr, said.out, said.err]
    texts += [str(event) for result in results for event in result.all_events]
    texts += [path.read_bytes().decode("latin-1") for path in home.rglob("*") if path.is_file()]
    assert sum("HTTP 403" in text for text in texts) >= 4
    assert sum("trying again" in text for text in texts) >= 1
    for secret in (TOKEN, KEY, SECRET, SIGNATURE):
        assert not any(secret in text for text in texts), secret
