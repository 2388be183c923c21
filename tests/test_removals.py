"""The command `removals`: which rows are not used, told as the rows, the decisions and the evidence say it."""

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import small_corpus
from small_corpus import Built, doc_id
from test_asset_checks import change_table, seal_again

from pipeline_assets import removals as removals_module
from pipeline_assets.__main__ import main
from pipeline_assets.clusters import slice_name
from pipeline_assets.duplicates import EVIDENCE_NAME
from pipeline_assets.lookup import open_lookup
from pipeline_assets.queries import REMOVED
from pipeline_assets.removals import count_removals
from pipeline_assets.stripes import units_in
from pipeline_assets.transforms.clusters import REASONS
from training_io import manifest

PLACE = ("pool", "file", "row_group", "row")
HOSTILE = "b_\x1b[2J.parquet"
TEMPLATE = small_corpus.sentences(4_000, 150)


@pytest.fixture(scope="module")
def excluding(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """A home in which a reference set excludes two clusters, and near copies are removed of several units and pools."""
    folder = small_corpus.write_corpus(tmp_path_factory.mktemp("excluding"))
    rows = [{"text": f"{TEMPLATE} {number}"} for number in range(30)] + [{"text": small_corpus.EXACT}]
    small_corpus.write_rows(folder / "beta" / HOSTILE, rows)
    references = [
        {"name": "sample", "kind": "tokenizer_sample", "documents_per_pool": 12},
        {"name": "benchmark", "kind": "file", "path": "held_out.txt", "action": "exclude"},
    ]
    recipe = small_corpus.write_recipe(folder, {"references": references})
    return small_corpus.build(recipe, folder / "home", upto="lsh_clusters")


@pytest.fixture
def removals(excluding: Built, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    """Run `removals` in this process: status, standard output, standard error."""
    use(excluding, monkeypatch)

    def run(*arguments: str) -> tuple[int, str, str]:
        status = main(["removals", *arguments])
        return status, *capsys.readouterr()

    return run


def use(built: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CORPUSMILL_RECIPE", str(built.recipe))
    monkeypatch.setenv("CORPUSMILL_HOME", str(built.home))


def rows_of(built: Built) -> list[dict[str, Any]]:
    """Every row with its decision, in the order of reading."""
    rows = []
    for unit in units_in(built.stage, built.refs["raw_row_groups"]):
        texts = built.stage.table(unit, "rows.parquet").to_pylist()
        decisions = built.stage.table(built.refs["lsh_clusters"], slice_name(unit.unit)).to_pylist()
        rows += [{**text, **decision} for text, decision in zip(texts, decisions, strict=True)]
    return rows


def evidence_of(built: Built) -> list[dict[str, Any]]:
    return built.stage.table(built.refs["lsh_clusters"], EVIDENCE_NAME).to_pylist()


def expected_of(built: Built) -> list[dict[str, Any]]:
    """Every removed row with what the artifacts say of it, found by going through all of them."""
    rows = rows_of(built)
    evidence = {(row["removed_doc_id"], row["kept_doc_id"]): row for row in evidence_of(built)}
    kept = {row["doc_id"]: row for row in rows if row["kept"]}
    expected = []
    for row in (row for row in rows if not row["kept"]):
        is_excluded = row["reason"] == "reference"
        other = {} if is_excluded else kept[row["kept_doc_id"]]
        told = {} if is_excluded else evidence[row["doc_id"], row["kept_doc_id"]]
        expected.append(
            {name: row[name] for name in PLACE}
            | {
                "reason": row["reason"],
                "doc_id": doc_id(row["text"]).hex(),
                "excluded_by": ["benchmark"] if is_excluded else [],
                "kept_doc_id": other["doc_id"].hex() if other else None,
                "jaccard": told.get("jaccard"),
                "shared_bands": told.get("shared_bands"),
            }
            | {f"kept_{name}": other.get(name) for name in PLACE}
        )
    return expected


def test_the_reasons_are_those_of_the_decisions() -> None:
    assert set(REMOVED) == set(REASONS) - {"kept"}


@pytest.mark.parametrize("batch_rows", [2, 50_000])
def test_every_removed_row_is_a_line_with_its_evidence_and_what_is_kept(
    removals, excluding: Built, monkeypatch: pytest.MonkeyPatch, batch_rows: int
) -> None:
    monkeypatch.setattr(removals_module, "BATCH_ROWS", batch_rows)
    before = sorted(excluding.home.rglob("*"))
    expected = expected_of(excluding)
    assert {row["reason"] for row in expected} == set(REMOVED)
    assert len({row["pool"] for row in expected}) == 2
    assert len({(row["pool"], row["file"]) for row in expected}) > 2, "several units"
    status, out, err = removals("--json", "--limit", "1000")
    assert (status, err) == (0, f"{len(expected)} of {len(expected)} removed rows, in the order of reading.\n")
    assert [json.loads(line) for line in out.splitlines()] == expected
    assert HOSTILE in {row["file"] for row in expected}
    assert out.isascii()
    assert "\x1b" not in out
    assert sorted(excluding.home.rglob("*")) == before


def test_a_batch_is_bounded_and_each_file_is_verified_once(excluding: Built, monkeypatch: pytest.MonkeyPatch) -> None:
    verified: Counter[Path] = Counter()

    def count(path: Path) -> str:
        verified[path] += 1
        return sha256_file(path)

    sha256_file = manifest.sha256_file
    monkeypatch.setattr(manifest, "sha256_file", count)
    monkeypatch.setattr(removals_module, "BATCH_ROWS", 3)
    lookup = open_lookup(excluding.stage.pipeline)
    batches = [len(batch) for batch in count_removals(lookup, None, None).first(1_000)]
    assert sum(batches) == len(expected_of(excluding))
    assert len(batches) > 5
    assert max(batches) == 3
    assert set(verified.values()) == {1}
    assert {path.name for path in verified} >= {Path(EVIDENCE_NAME).name, "rows.parquet"}


def test_what_no_line_rests_on_is_not_read_again(excluding: Built, tmp_path: Path) -> None:
    copy = small_corpus.copy_home(excluding, tmp_path / "home")
    lookup = open_lookup(copy.stage.pipeline)
    counted = count_removals(lookup, None, None)
    ((first,),) = counted.first(1)
    (copy.folder("lsh_clusters") / slice_name(lookup.rows[-1].unit)).unlink()
    assert first.kept_pool == "alpha" != lookup.rows[-1].counts["pool"]
    assert list(counted.first(1)) == [[first]]


def test_within_crawls_a_text_is_kept_once_and_its_place_is_told(
    removals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = TEMPLATE + " and the longer ending"
    rows = [{"text": one, "dump": dump} for dump in ("c1", "c2") for one in (text, f"{TEMPLATE} {dump}")]
    folder = small_corpus.write_corpus(tmp_path / "corpus")
    small_corpus.write_rows(folder / "beta" / "b_001.parquet", rows)
    recipe = small_corpus.write_recipe(folder, {"dedup.scope": "dump", "dedup.keep": "longest"})
    built = small_corpus.build(recipe, folder / "home", upto="lsh_clusters")
    use(built, monkeypatch)
    told = [json.loads(line) for line in removals("--json", "--limit", "1000")[1].splitlines()]
    assert told == expected_of(built)
    dumps = {tuple(row[name] for name in PLACE): row["dump"] or "" for row in rows_of(built)}
    sides = [tuple(dumps[tuple(row[f"{side}{name}"] for name in PLACE)] for side in ("", "kept_")) for row in told]
    assert sides == [(row["removed_dump"], row["kept_dump"]) for row in evidence_of(built)]
    assert Counter(sides)["c2", "c1"] == 2, "the copy and its near copy, of another crawl than what is kept"


@pytest.mark.parametrize("reason", [None, *REMOVED])
@pytest.mark.parametrize("pool", [None, "alpha", "beta"])
def test_a_reason_and_a_pool_choose(removals, excluding: Built, reason: str | None, pool: str | None) -> None:
    chosen = [*(("--reason", reason) if reason else ()), *(("--pool", pool) if pool else ())]
    wanted = [row for row in expected_of(excluding) if reason in (None, row["reason"]) and pool in (None, row["pool"])]
    _, out, err = removals("--json", "--limit", "3", *chosen)
    assert [json.loads(line) for line in out.splitlines()] == wanted[:3]
    assert err.startswith(f"{min(3, len(wanted))} of {len(wanted)} removed rows")
    assert ("raise --limit" in err) == (len(wanted) > 3)


def test_a_person_is_told_the_same_and_no_name_reaches_the_terminal_raw(removals, excluding: Built) -> None:
    status, out, err = removals("--limit", "1000")
    expected = expected_of(excluding)
    assert (status, err) == (0, "")
    first, *blocks = out.rstrip("\n").split("\n\n")
    assert first == f"{len(expected)} of {len(expected)} removed rows, in the order of reading."
    assert r"b_\x1b[2J.parquet" in out
    assert "\x1b" not in out
    assert len(blocks) == len(expected)
    for block, row in zip(blocks, expected, strict=True):
        said = [row["reason"], row["doc_id"], f"row group {row['row_group']} row {row['row']}"]
        if row["kept_doc_id"]:
            said += [f"Jaccard {row['jaccard']:.3f}", f"kept is {row['kept_doc_id']}", f"{row['shared_bands']} bands"]
            said += [f"row group {row['kept_row_group']} row {row['kept_row']}"]
        else:
            said += ["reference sets that exclude, benchmark"]
        assert [part for part in said if part not in block] == []


def test_twenty_are_shown_where_no_limit_is_given(removals, excluding: Built) -> None:
    number = len(expected_of(excluding))
    assert number > 20
    status, out, _ = removals()
    assert (status, out.count("\n\n")) == (0, 20)
    assert out.startswith(f"20 of {number} removed rows, in the order of reading; raise --limit to see more.\n")


def test_a_pool_that_is_not_there_is_refused_with_those_that_are(removals) -> None:
    status, out, err = removals("--pool", "gamma")
    assert (status, out) == (1, "")
    assert (
        err
        == "SourceError: --pool: expected one of the corpus's pools, alpha, beta, found 'gamma'. Correct the name.\n"
    )


def test_no_error_reaches_the_terminal_raw(removals, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (path := tmp_path / "r_\x1b[2J.yaml").write_text("name: [")
    monkeypatch.setenv("CORPUSMILL_RECIPE", str(path))
    status, out, err = removals()
    assert (status, out) == (1, "")
    assert err.startswith("RecipeError: ")
    assert r"r_\x1b[2J.yaml: expected YAML" in err
    assert all(character.isprintable() or character == "\n" for character in err)


@pytest.mark.parametrize("arguments", [["--reason", "kept"], ["--limit", "0"], ["text"]])
def test_a_wrong_call_has_status_2(removals, arguments: list[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        removals(*arguments)
    assert ended.value.code == 2


def test_what_rests_on_damage_is_an_error_and_no_list(
    removals, excluding: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = small_corpus.copy_home(excluding, tmp_path / "home")
    use(copy, monkeypatch)
    clusters, answer, refused = copy.folder("lsh_clusters"), removals("--json", "--limit", "1000"), []
    rows = [copy.stage.folder(unit) / "rows.parquet" for unit in units_in(copy.stage, copy.refs["raw_row_groups"])]
    for path in (clusters / EVIDENCE_NAME, *sorted((clusters / "clusters").rglob("*.parquet")), *rows):
        whole = path.read_bytes()
        path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
        status, out, err = removals("--json", "--limit", "1000")
        if (status, out, err) != answer:  # a unit without a removed or a kept one's row is not read
            assert (status, err.splitlines()[-1].startswith("FormatError: ")) == (1, True), path
            assert str(path) in err
            refused.append(path)
        path.write_bytes(whole)
    assert {path.name == "rows.parquet" for path in refused} == {True, False}
    assert set(refused) >= {clusters / EVIDENCE_NAME, *(clusters / "clusters").rglob("*.parquet")}


def test_evidence_of_another_row_is_not_told(
    removals, excluding: Built, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    copy = small_corpus.copy_home(excluding, tmp_path / "home")
    use(copy, monkeypatch)
    path = copy.folder("lsh_clusters") / EVIDENCE_NAME
    change_table(path, lambda rows: rows[::-1])
    seal_again(copy, path.parent)
    status, _, err = removals("--json")
    assert status == 1
    assert "expected evidence of the removed document" in err
