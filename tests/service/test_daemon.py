"""A night without anybody: the source changes, Dagster's own daemon notices, and one run makes everything fresh.

Against the real webserver and daemon, with a data set on a Hub of loopback.
"""

import time
from pathlib import Path
from typing import Any

import pytest
import small_corpus
from dagster_server import (
    DEFINITIONS,
    Server,
    materializations_of,
    running,
    runs_of,
    skipped_since,
    ticks_of,
    wait_until,
)
from file_server import REPOSITORY, serving_files

from pipeline_assets.automation import new_revision_sensor
from pipeline_assets.flow import STAGES
from pipeline_assets.pools import revision_of
from pipeline_assets.references import PipelineResource

TICK_SECONDS = 180
RUN_SECONDS = 420
SENSOR = new_revision_sensor.name


def finished_runs(server: Server, number: int) -> list[dict[str, Any]]:
    """That many runs, all of which have ended; nothing as long as one is under way or to come."""
    found = runs_of(server)
    ended = all(run["status"] in ("SUCCESS", "FAILURE", "CANCELED") for run in found)
    return found if ended and len(found) >= number else []


def badges_of(server: Server) -> dict[str, tuple[str, str]]:
    """Freshness and staleness of each asset that is materialized: they change with the daemon's clock."""
    nodes = server.ask("{assetNodes{assetKey{path} isMaterializable freshnessStatusInfo{freshnessStatus} staleStatus}}")
    return {
        node["assetKey"]["path"][-1]: (node["freshnessStatusInfo"]["freshnessStatus"], node["staleStatus"])
        for node in nodes["assetNodes"]
        if node["isMaterializable"]
    }


def test_the_daemon_makes_one_run_of_a_new_revision_and_none_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus, home = small_corpus.write_corpus(tmp_path / "corpus"), tmp_path / "home"
    pools = [
        {"kind": "hub", "repository": REPOSITORY, "revision": "main", "path": pool, "pool": pool}
        for pool in ("alpha", "beta")
    ]
    recipe = small_corpus.write_recipe(corpus, {"source": {"kind": "pools", "pools": pools}})
    resource = PipelineResource(recipe=str(recipe), home=str(home))
    with serving_files(corpus) as hub:
        monkeypatch.setenv("HF_ENDPOINT", hub.url)
        with running(home, recipe) as server:
            assert runs_of(server) == []
            assert ticks_of(server, SENSOR) == []  # off until somebody turns it on
            server.ask(f'mutation{{startSensor(sensorSelector:{{{DEFINITIONS},sensorName:"{SENSOR}"}}){{__typename}}}}')
            wait_until(lambda: finished_runs(server, 1), TICK_SECONDS + RUN_SECONDS, "the first revision's run")
            (first,) = runs_of(server)
            assert first["status"] == "SUCCESS", server.log.read_text()[-5_000:]
            revision = revision_of(resource.open())

            rows = small_corpus.corpus_rows()["beta"]["b_000"]
            rows[20]["text"] = small_corpus.sentences(5_001)
            small_corpus.write_rows(corpus / "beta" / "b_000.parquet", rows)
            hub.commits = {"main": "f" * 40}
            changed = revision_of(resource.open())
            assert changed != revision
            wait_until(lambda: finished_runs(server, 2), TICK_SECONDS + RUN_SECONDS, "the next revision's run")
            ended = time.time()
            wait_until(lambda: skipped_since(server, SENSOR, ended), TICK_SECONDS, "a tick after the run")
            second, *others = runs_of(server)
            assert others == [first]
            assert second["status"] == "SUCCESS", server.log.read_text()[-5_000:]
            tags = [{tag["key"]: tag["value"] for tag in run["tags"]} for run in (first, second)]
            assert [one["dataset_revision"] for one in tags] == [revision[:12], changed[:12]]
            assert {one["dagster/sensor_name"] for one in tags} == {new_revision_sensor.name}
            assert {one["corpusmill/recipe"] for one in tags} == {"small"}
            wait_until(
                lambda: {freshness for freshness, _ in badges_of(server).values()} == {"HEALTHY"},
                TICK_SECONDS,
                "the badges of freshness",
            )
            fresh, badges = materializations_of(server), badges_of(server)
            assert fresh.keys() == badges.keys() == set(STAGES)
            assert {one["run"] for one in fresh.values()} == {second["runId"]}
            assert {staleness for _, staleness in badges.values()} == {"FRESH"}

        restarted = time.time()
        with running(home, recipe) as server:
            reasons = wait_until(
                lambda: skipped_since(server, SENSOR, restarted), TICK_SECONDS, "a tick after the restart"
            )
            assert reasons == [f"nothing new since revision {changed[:12]}"]
            assert [run["runId"] for run in runs_of(server)] == [second["runId"], first["runId"]]

        clean = small_corpus.build(recipe, tmp_path / "clean")
    assert {name: fresh[name]["data_version"] for name in clean.refs} == {
        name: ref.identity for name, ref in clean.refs.items()
    }
    expected, found = small_corpus.artifact_files(clean.home), small_corpus.artifact_files(home)
    assert {path: found.get(path) for path in expected} == expected
