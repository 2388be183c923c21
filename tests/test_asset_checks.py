"""Every check passes on a clean home and fails on one that is poisoned in exactly one place; failing has consequences.

A poison changes one value of one file and seals the artifact anew, so that only the law can notice. For the law about
hashes it does not seal.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import dagster as dg
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq
import pytest
import small_corpus
import torch
from small_corpus import CHECK_NAMES, HELD_OUT, Built, doc_id, judged

from pipeline_assets.clusters import EVIDENCE_NAME, slice_name
from pipeline_assets.floors import FLOORS_NAME
from pipeline_assets.packs import plan_split
from pipeline_assets.schemas import MixtureLedger, arrow_schema
from pipeline_assets.scurve import BINS_NAME, PAIRS_NAME, curve_of, write_curve
from pipeline_assets.stripes import UNITS_NAME, units_in
from pipeline_assets.tokenizer_report import REPORT_NAME
from pipeline_assets.tokens import LENGTHS, TOKENS
from pipeline_assets.transforms.minhash import MinHashParams
from pipeline_assets.transforms.scurve import measure_scurve, plant_pairs
from pipeline_assets.transforms.shingles import unique_shingles
from resources.artifact_store import ArtifactRef
from resources.tables import write_table
from resources.tokenizer import load_tokenizer
from training_io.errors import FormatError
from training_io.hashing import sha256_file
from training_io.manifest import MANIFEST_NAME, RUN_NAME, load_manifest, quarantine_reasons
from training_io.mixture import MixtureStage
from training_io.plan import load_plan, write_plan

EOS_ID = 0


def whole(built: Built, asset: str) -> Path:
    return built.folder(asset)


def units(built: Built, asset: str) -> list[tuple[str, Path]]:
    """Names and folders of an asset's units."""
    refs = units_in(built.stage, built.refs[asset])
    return [(ref.unit, built.stage.store.folder(ref)) for ref in refs]


def seal_again(built: Built, folder: Path) -> None:
    """Make the manifests and references above a changed folder agree with it, as if it had been written like that."""
    before = load_manifest(folder)
    files = {
        path.relative_to(folder).as_posix(): {"bytes": path.stat().st_size, "sha256": sha256_file(path)}
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name not in (MANIFEST_NAME, RUN_NAME)
    }
    after = replace(before, files=files)
    assert after.digest != before.digest, "the poison changed nothing"
    (folder / MANIFEST_NAME).write_text(json.dumps(after.to_json(), indent=1), encoding="utf-8")
    asset = built.home / before.asset
    naming = [built.home / "_references"] if before.unit == "-" else []
    listing = [asset / "-"] if before.unit != "-" else []
    plans = [built.home / "packing_plan" / "-"] if before.asset == "token_shards" and before.unit == "-" else []
    for place in (*naming, *listing, *plans):
        for path in sorted(place.rglob("*.json")):
            text = path.read_text(encoding="utf-8")
            if path.name not in (MANIFEST_NAME, RUN_NAME) and before.digest in text:
                path.write_text(text.replace(before.digest, after.digest), encoding="utf-8")
    for place in (*listing, *plans):
        for path in sorted(place.glob(f"*/{MANIFEST_NAME}")):
            if any(
                sha256_file(path.parent / name) != entry["sha256"]
                for name, entry in load_manifest(path.parent).files.items()
            ):
                seal_again(built, path.parent)


def change_table(path: Path, change: Callable[[list[dict]], list[dict]]) -> None:
    """Rewrite a table with other rows."""
    table = pq.read_table(path)
    write_table(pa.Table.from_pylist(change(table.to_pylist()), schema=table.schema), path)


def set_cell(path: Path, row: int, column: str, value: object) -> None:
    def change(rows: list[dict]) -> list[dict]:
        assert rows[row][column] != value
        rows[row][column] = value
        return rows

    change_table(path, change)


def set_value(path: Path, at: int | tuple[int, ...], value: object) -> object:
    """Put one value into a stored array; returns what was there."""
    array = np.load(path)
    before = array[at]
    assert np.any(before != value)
    array[at] = value
    np.save(path, array)
    return before


def row_where(path: Path, column: str, value: object) -> int:
    return pq.read_table(path, columns=[column]).column(column).to_pylist().index(value)


def lose_a_row(built: Built) -> str:
    unit, folder = units(built, "raw_row_groups")[0]
    change_table(folder / "rows.parquet", lambda rows: rows[1:])
    seal_again(built, folder)
    return unit


def alter_a_text(built: Built) -> str:
    _, folder = units(built, "raw_row_groups")[0]
    row = pq.read_table(folder / "rows.parquet").slice(3, 1).to_pylist()[0]
    set_cell(folder / "rows.parquet", 3, "text", row["text"] + ".")
    seal_again(built, folder)
    return row["doc_id"].hex()[:16]


def alter_a_signature(built: Built) -> str:
    unit, folder = units(built, "minhash_signatures")[1]
    set_value(folder / "signatures.npy", (2, 5), 7)
    seal_again(built, folder)
    return f"{unit}: band_keys.npy and band_rows.npy are not those of the signatures"


def curve_folder(built: Built) -> Path:
    return built.stage.store.folder(curve_of(built.stage, built.refs["minhash_signatures"]))


def seal_curve_again(built: Built, counts: Mapping[str, Any] | None = None) -> None:
    """Seal the measured curve anew, with other counts where there are some, and list it so in its asset."""
    folder, asset = curve_folder(built), whole(built, "minhash_signatures")
    if counts is not None:
        other = replace(load_manifest(folder), counts={**load_manifest(folder).counts, **counts})
        (folder / MANIFEST_NAME).write_text(json.dumps(other.to_json()), encoding="utf-8")
    else:
        seal_again(built, folder)
    manifest = load_manifest(asset)
    (listed,) = manifest.inputs["plans"]
    plans = [{**listed, "digest": load_manifest(folder).digest}]
    changed = replace(manifest, inputs={**manifest.inputs, "plans": plans})
    (asset / MANIFEST_NAME).write_text(json.dumps(changed.to_json()), encoding="utf-8")


def misstate_a_bin(built: Built) -> str:
    path = curve_folder(built) / BINS_NAME
    bins = json.loads(path.read_bytes())
    bins[3]["num_flagged"] += 1
    path.write_text(json.dumps(bins))
    seal_curve_again(built)
    return f"the bin from {bins[3]['start']:.2f} says num_flagged = {bins[3]['num_flagged']}"


def first_slice(built: Built) -> tuple[str, Path]:
    unit, _ = units(built, "raw_row_groups")[0]
    return unit, whole(built, "lsh_clusters") / slice_name(unit)


def lose_a_decision(built: Built) -> str:
    unit, path = first_slice(built)
    change_table(path, lambda rows: rows[:-1])
    seal_again(built, whole(built, "lsh_clusters"))
    return unit


def drop_a_kept_document(built: Built) -> str:
    _, path = first_slice(built)
    row = row_where(path, "cluster_size", 1)
    set_cell(path, row, "kept", False)
    seal_again(built, whole(built, "lsh_clusters"))
    return pq.read_table(path).column("cluster_id")[row].as_py().hex()[:16]


def join_two_clusters(built: Built) -> str:
    _, path = first_slice(built)
    singles = pq.read_table(path).filter(pc.field("cluster_size") == 1).column("cluster_id").to_pylist()
    set_cell(path, row_where(path, "cluster_id", singles[0]), "cluster_id", singles[1])
    seal_again(built, whole(built, "lsh_clusters"))
    return singles[0].hex()[:16]


def lose_evidence(built: Built) -> str:
    path = whole(built, "lsh_clusters") / EVIDENCE_NAME
    lost = pq.read_table(path).column("removed_doc_id")[0].as_py()
    change_table(path, lambda rows: rows[1:])
    seal_again(built, whole(built, "lsh_clusters"))
    return lost.hex()[:16]


def find_row(paths: list[Path], wanted: bytes) -> tuple[Path, int]:
    """The table among several that holds a doc_id, and its row."""
    for path in paths:
        ids = pq.read_table(path, columns=["doc_id"]).column("doc_id").to_pylist()
        if wanted in ids:
            return path, ids.index(wanted)
    raise AssertionError(wanted.hex())


def let_a_reference_go(built: Built) -> str:
    slices = sorted((whole(built, "lsh_clusters") / "clusters").glob("*.parquet"))
    path, row = find_row(slices, doc_id(HELD_OUT))
    set_cell(path, row, "barred", False)
    seal_again(built, whole(built, "lsh_clusters"))
    return doc_id(HELD_OUT).hex()[:16]


def remove_most_of_a_pool(built: Built) -> str:
    name = next(unit for unit, _ in units(built, "raw_row_groups") if unit.startswith("beta"))
    change_table(whole(built, "lsh_clusters") / slice_name(name), lambda rows: [{**row, "kept": False} for row in rows])
    seal_again(built, whole(built, "lsh_clusters"))
    return "beta"


def tokenize_another_document(built: Built) -> str:
    _, folder = units(built, "document_tokens")[0]
    lost = set_value(folder / "doc_id.npy", 4, np.frombuffer(doc_id("another"), np.uint8))
    seal_again(built, folder)
    return lost.tobytes().hex()[:16]


def lose_an_end(built: Built) -> str:
    unit, folder = units(built, "document_tokens")[0]
    end = int(np.load(folder / "length.npy")[0]) - 1
    assert set_value(folder / "tokens.npy", end, 9) == EOS_ID
    seal_again(built, folder)
    return f"{unit}: token {end:,}"


def alter_a_token(built: Built) -> str:
    _, folder = units(built, "document_tokens")[0]
    first = int(np.load(folder / "tokens.npy")[0])
    set_value(folder / "tokens.npy", 0, first + 1)
    seal_again(built, folder)
    return np.load(folder / "doc_id.npy")[0].tobytes().hex()[:16]


def split_table(built: Built, *needed: str) -> tuple[Path, list[dict]]:
    """A unit's split table that has documents of all the needed splits."""
    for _, folder in units(built, "split_documents"):
        rows = pq.read_table(folder / "documents.parquet").to_pylist()
        if {*needed} <= {row["split"] for row in rows}:
            return folder / "documents.parquet", rows
    raise AssertionError(needed)


def use_a_near_copy_in_another_split(built: Built) -> str:
    tables = [folder / "documents.parquet" for _, folder in units(built, "split_documents")]
    original, copied = doc_id(small_corpus.NEAR_ORIGINAL), doc_id(small_corpus.NEAR_COPY)
    path, row = find_row(tables, original)
    split = pq.read_table(path).column("split")[row].as_py()
    path, rows = split_table(built, "validation" if split == "train" else "train")
    other = next(number for number, row in enumerate(rows) if row["split"] not in (split, "unused"))
    set_cell(path, other, "doc_id", copied)
    seal_again(built, path.parent)
    return min(original, copied).hex()[:16]


def validate_on_no_document_of_a_pool(built: Built) -> str:
    for name, folder in units(built, "split_documents"):
        if name.startswith("beta"):
            change_table(folder / "documents.parquet", lambda rows: [{**row, "split": "train"} for row in rows])
            seal_again(built, folder)
    return "pool beta"


def repeat_in_validation(built: Built) -> str:
    path, rows = split_table(built, "train", "validation")
    trained = next(row for row in rows if row["split"] == "train")
    validated = next(number for number, row in enumerate(rows) if row["split"] == "validation")
    set_cell(path, validated, "doc_id", trained["doc_id"])
    seal_again(built, path.parent)
    return trained["doc_id"].hex()[:16]


def validate_on(built: Built, text: str) -> str:
    tables = [folder / "documents.parquet" for _, folder in units(built, "split_documents")]
    path, row = find_row(tables, doc_id(text))
    set_cell(path, row, "split", "validation")
    seal_again(built, path.parent)
    return doc_id(text).hex()[:16]


def lose_a_split_row(built: Built) -> str:
    path, rows = split_table(built, "train")
    change_table(path, lambda kept: kept[1:])
    seal_again(built, path.parent)
    return rows[0]["doc_id"].hex()[:16]


def assign_to_another_split(built: Built) -> str:
    path, rows = split_table(built, "train")
    row = next(number for number, row in enumerate(rows) if row["split"] == "train")
    set_cell(path, row, "split", "validation")
    seal_again(built, path.parent)
    return rows[row]["doc_id"].hex()[:16]


def lose_a_reference_text(built: Built) -> str:
    folder = whole(built, "reference_sets")
    change_table(folder / "held_out.parquet", lambda rows: rows[1:])
    seal_again(built, folder)
    return "held_out: expected the texts it was made of"


def poke_shard(built: Built, token: int, value: int) -> None:
    path = whole(built, "token_shards") / "train_000000.bin"
    content = bytearray(path.read_bytes())
    content[1024 + 2 * token : 1026 + 2 * token] = value.to_bytes(2, "little")
    assert bytes(content) != path.read_bytes()
    path.write_bytes(content)


def flip_a_byte(built: Built) -> str:
    poke_shard(built, 3, 0xFFFF)
    return "train_000000.bin"


def index_column(built: Built, name: str) -> np.ndarray:
    return np.load(whole(built, "token_shards") / "train_index" / f"{name}.npy")


def lose_an_end_in_a_shard(built: Built) -> str:
    end = int(index_column(built, "length")[0]) - 1
    poke_shard(built, end, 9)
    seal_again(built, whole(built, "token_shards"))
    return f"train_000000.bin: token {end:,}"


def alter_a_token_in_a_shard(built: Built) -> str:
    path = whole(built, "token_shards") / "train_000000.bin"
    first = int.from_bytes(path.read_bytes()[1024:1026], "little")
    poke_shard(built, 0, first + 1)
    seal_again(built, whole(built, "token_shards"))
    return "the first difference is at document 0"


def repeat_a_segment(built: Built) -> str:
    plan = whole(built, "packing_plan")
    order = np.load(plan / "train" / "order.npy")
    lost = set_value(plan / "train" / "order.npy", 0, order[1])
    seal_again(built, plan)
    return f"segment {int(lost):,}: expected once in the plan, found 0"


def overfill_a_pack(built: Built) -> str:
    plan = whole(built, "packing_plan")
    targets = np.load(plan / "train" / "pack_targets.npy")
    full = int(np.flatnonzero(targets == 64)[0])
    offsets = np.load(plan / "train" / "pack_offsets.npy")
    set_value(plan / "train" / "pack_offsets.npy", full + 1, offsets[full + 1] + 1)
    seal_again(built, plan)
    return f"pack {full:,}"


def misstate_the_denominator(built: Built) -> str:
    path = whole(built, "packing_plan") / "train" / "pack_targets.npy"
    targets = np.load(path)
    targets[0] += 1
    targets[-1] -= 1  # the sum stays, or loading would refuse it
    np.save(path, targets)
    seal_again(built, whole(built, "packing_plan"))
    return "epoch 0, step 0"


def take_more_packs_a_step(built: Built) -> str:
    path = whole(built, "packing_plan") / "train" / "plan.json"
    plan = json.loads(path.read_bytes())
    plan |= {"packs_per_microbatch": plan["num_packs"] - 1, "num_steps": 2}  # the recipe trains for 3
    path.write_text(json.dumps(plan), encoding="utf-8")
    seal_again(built, whole(built, "packing_plan"))
    return "3 steps of packs read: a pass has"


def misstate_ids(built: Built) -> str:
    folder = whole(built, "handoff_package")
    package = json.loads((folder / "package.json").read_bytes())
    package["self_test"]["documents"][0]["ids"][0] += 1
    (folder / "package.json").write_text(json.dumps(package))
    seal_again(built, folder)
    return "tokenizer: 'def double"


def spoiling_weights(needle: str, spoil: Callable[[dict[str, torch.Tensor]], object]) -> Callable[[Built], str]:
    """A poison that changes the run's weights; what is found says the needle."""

    def poison(built: Built) -> str:
        change_checkpoint(built, lambda payload: spoil(payload["model"]))
        return needle

    return poison


def empty_the_table(weights: dict[str, torch.Tensor]) -> None:
    """All inputs look alike, all outputs are as likely, and nothing has a gradient."""
    weights["tokens.weight"].zero_()


def attend_to_nothing(weights: dict[str, torch.Tensor]) -> None:
    for name, values in weights.items():
        if name.endswith("attention.out.weight"):
            values.zero_()


def lose_a_number(weights: dict[str, torch.Tensor]) -> None:
    """Two ways to compute one thing agree for all weights that are numbers: only broken code parts them.

    tests/test_preflight.py breaks it.
    """
    weights["tokens.weight"][0, 0] = float("nan")


def change_checkpoint(built: Built, change: Callable[[dict[str, Any]], None]) -> None:
    """Change what the run's checkpoint holds and let its record agree."""
    folder = whole(built, "varlen_training_run")
    state = folder / "checkpoint" / "state.pt"
    payload = torch.load(state, weights_only=True)
    change(payload)
    torch.save(payload, state)
    record = json.loads((folder / "checkpoint" / "checkpoint.json").read_bytes())
    record |= {"bytes": state.stat().st_size, "sha256": sha256_file(state)}
    (folder / "checkpoint" / "checkpoint.json").write_text(json.dumps(record))
    seal_again(built, folder)


def skip_a_step(built: Built) -> str:
    def advance(payload: dict[str, Any]) -> None:
        payload["stream"]["next_step"] += 1

    change_checkpoint(built, advance)
    return "other inputs than its packs or windows hold"


def raise_the_first_loss(built: Built) -> str:
    path = whole(built, "varlen_training_run") / "curves.json"
    curves = json.loads(path.read_bytes())
    curves["train"][0] = 99.5
    path.write_text(json.dumps(curves))
    seal_again(built, path.parent)
    return "99.50"


def raise_the_last_loss(built: Built) -> str:
    folder = whole(built, "varlen_training_run")
    curves = json.loads((folder / "curves.json").read_bytes())
    curves["validation"][-1][1] = 99.5
    (folder / "curves.json").write_text(json.dumps(curves))
    seal_again(built, folder)
    return "99.5"


def misstate_the_inventory(built: Built) -> str:
    path = whole(built, "tokenizer_report") / REPORT_NAME
    report = json.loads(path.read_bytes())
    report["inventory"][1]["tokens"] += 1
    path.write_text(json.dumps(report), encoding="utf-8")
    seal_again(built, path.parent)
    return f"{report['inventory'][1]['pool']}: the report says"


def misstate_a_quota(built: Built) -> str:
    """A plan of a mixture in the place of the plan without one, one quota of which is another number."""
    folder = whole(built, "packing_plan")
    plan = load_plan(folder, "train")
    base = MixtureStage(name="base", tokens=plan.num_targets, shares={"alpha": "1", "beta": "1"})
    mixed = plan_split(built.stage, built.refs["token_shards"], "train", (base,))
    (stage,) = mixed.stages
    quotas = {**stage.quotas, "beta": stage.quotas["beta"] // 2}
    write_plan(folder / "train", replace(mixed, stages=(replace(stage, quotas=quotas),)), built.folder("token_shards"))
    seal_again(built, folder)
    return "stage base, pack"


def misstate_the_ledger(built: Built) -> str:
    path = whole(built, "mixture_ledger") / "ledger.parquet"
    rows = pq.read_table(path).to_pylist()
    rows[1]["eos_tokens"] += 1
    pq.write_table(pa.Table.from_pylist(rows, schema=arrow_schema(MixtureLedger)), path)
    seal_again(built, path.parent)
    return f"pool {rows[1]['pool']}: expected eos_tokens"


def fetch_a_picture(built: Built) -> str:
    path = whole(built, "quality_report") / "report.html"
    html = path.read_text(encoding="utf-8")
    path.write_text(html.replace("</main>", '<img src="https://example/x.png" alt=""></main>'), encoding="utf-8")
    seal_again(built, path.parent)
    return "expected src within the page, found 'https://example/x.png'"


POISONS: dict[str, Callable[[Built], str]] = {
    "every_source_row_is_used_or_counted": lose_a_row,
    "doc_ids_are_hashes_of_texts": alter_a_text,
    "s_curve_matches_formula": misstate_a_bin,
    "signatures_are_those_of_the_texts": alter_a_signature,
    "every_row_has_one_decision": lose_a_decision,
    "one_document_is_kept_per_cluster": drop_a_kept_document,
    "clusters_are_connected_components": join_two_clusters,
    "every_removal_has_evidence": lose_evidence,
    "reference_texts_are_found": let_a_reference_go,
    "removal_is_plausible": remove_most_of_a_pool,
    "every_kept_document_is_tokenized_once": tokenize_another_document,
    "end_of_document_comes_once_at_the_end": lose_an_end,
    "tokens_decode_to_the_text": alter_a_token,
    "bytes_a_token_is_in_the_recipe_range": misstate_the_inventory,
    "no_document_is_in_two_splits": repeat_in_validation,
    "every_pool_is_in_every_split": validate_on_no_document_of_a_pool,
    "no_cluster_is_in_two_splits": use_a_near_copy_in_another_split,
    "no_reference_text_is_in_validation": lambda built: validate_on(built, HELD_OUT),
    "reference_texts_are_as_they_were_read": lose_a_reference_text,
    "documents_are_in_the_split_of_the_rule": assign_to_another_split,
    "every_kept_document_has_a_split_or_a_reason": lose_a_split_row,
    "shards_match_their_headers_and_hashes": flip_a_byte,
    "shards_end_every_document_once": lose_an_end_in_a_shard,
    "shards_hold_every_document_once": alter_a_token_in_a_shard,
    "every_pair_comes_exactly_once": repeat_a_segment,
    "no_pack_is_over_capacity": overfill_a_pack,
    "batches_are_well_formed": misstate_the_denominator,
    "every_window_keeps_its_quotas": misstate_a_quota,
    "ledger_is_what_the_plan_reads": misstate_the_ledger,
    "tokens_suffice_for_the_training_steps": take_more_packs_a_step,
    "handoff_self_test_passes": misstate_ids,
    "no_token_sees_another_document": spoiling_weights("found 0 of them and 0 of others", empty_the_table),
    "packed_equals_separate": spoiling_weights("logits: expected equal", lose_a_number),
    "padding_changes_nothing": spoiling_weights("loss: expected equal", lose_a_number),
    "positions_restart_with_each_document": spoiling_weights("attention without the mask", attend_to_nothing),
    "loss_knows_no_microbatches": spoiling_weights("a mean of means: expected another result", empty_the_table),
    "attention_backends_agree": spoiling_weights("sdpa: gradients: expected equal", lose_a_number),
    "resumed_sampler_gives_the_next_step": skip_a_step,
    "first_loss_is_that_of_guessing": raise_the_first_loss,
    "one_pack_can_be_overfitted": spoiling_weights("expected a loss below half of", empty_the_table),
    "validation_loss_falls": raise_the_last_loss,
    "report_is_self_contained": fetch_a_picture,
}


def test_every_check_has_a_poison() -> None:
    assert sorted(POISONS) == sorted(CHECK_NAMES)


@pytest.mark.parametrize("name", CHECK_NAMES)
def test_check_passes_on_a_clean_home_and_fails_on_a_poisoned_one(name: str, clean: Built, copy: Built) -> None:
    assert judged(name, clean).num_violations == 0
    needle = POISONS[name](copy)
    verdict = judged(name, copy)
    assert verdict.num_violations >= 1
    assert needle in str([dict(example) for example in verdict.examples]), verdict.examples
    assert verdict.expected
    assert verdict.found


def test_a_pool_of_which_nothing_is_trained_on_is_told(copy: Built) -> None:
    num_documents = 0
    for name, folder in units(copy, "split_documents"):
        if name.startswith("beta"):
            num_documents += pq.read_table(folder / "documents.parquet").num_rows
            change_table(folder / "documents.parquet", lambda rows: [{**row, "split": "unused"} for row in rows])
            seal_again(copy, folder)
    verdict = judged("every_pool_is_in_every_split", copy)
    assert verdict.num_violations == 1
    assert f"pool beta: none of its {num_documents:,} kept documents is in train" in str(verdict.examples)


@pytest.mark.parametrize("name", ["start", "end", "similarity", "num_pairs", "predicted", "low", "high", "z", "chance"])
def test_each_number_of_the_curves_table_is_recounted(copy: Built, name: str) -> None:
    path = curve_folder(copy) / BINS_NAME
    bins = json.loads(path.read_bytes())
    bins[-4][name] *= 0.999
    path.write_text(json.dumps(bins))
    seal_curve_again(copy)
    verdict = judged("s_curve_matches_formula", copy)
    assert verdict.num_violations == 1
    assert f"says {name} = " in str(verdict.examples)


@pytest.mark.parametrize(
    "name",
    ["texts", "pairs", "flagged", "max_abs_z", "chance", "signature_error", "expected_error", "error_z", "mean_bias"],
)
def test_each_number_of_the_curves_manifest_is_recounted(copy: Built, name: str) -> None:
    before = load_manifest(curve_folder(copy)).counts[name]
    seal_curve_again(copy, {name: before + 1 if isinstance(before, int) else before * 1.001})
    verdict = judged("s_curve_matches_formula", copy)
    assert verdict.num_violations == 1
    assert f"says {name} = " in str(verdict.examples)


@pytest.mark.parametrize(
    ("column", "change"),
    [
        ("similarity", lambda value: value - 0.001),
        ("num_equal", lambda value: value + 1),
        ("flagged", lambda value: not value),
    ],
)
def test_each_column_of_the_measured_pairs_is_what_the_rest_was_counted_from(
    copy: Built, column: str, change: Callable[[Any], Any]
) -> None:
    path = curve_folder(copy) / PAIRS_NAME
    rows = pq.read_table(path).to_pylist()
    row = next(number for number, row in enumerate(rows) if 0.41 < row["similarity"] < 0.44)
    set_cell(path, row, column, change(rows[row][column]))
    seal_curve_again(copy)
    assert judged("s_curve_matches_formula", copy).num_violations >= 1


def test_a_bin_that_was_left_out_is_noticed(copy: Built) -> None:
    path = curve_folder(copy) / BINS_NAME
    path.write_text(json.dumps(json.loads(path.read_bytes())[1:]))
    seal_curve_again(copy)
    assert "expected" in str(judged("s_curve_matches_formula", copy).examples)


def test_a_measurement_of_a_correlated_hash_family_fails(copy: Built) -> None:
    """h(x) = (a x + b) mod (2^61 - 1) with all three below 2^32, measured and stored as ours would be."""
    a, b = np.random.default_rng(1).integers(0, 2**32, (2, 112), dtype=np.uint64)

    def sign(texts: pa.Array, params: MinHashParams) -> tuple[np.ndarray, None]:
        sets = [unique_shingles(text, params.ngram).astype(np.uint64)[:, None] for text in texts.to_pylist()]
        return np.array([((one * a + b) % np.uint64((1 << 61) - 1)).min(axis=0) for one in sets]), None

    texts = [small_corpus.sentences(number, 120) for number in range(120)]
    planted = plant_pairs(texts, copies_per_text=10, max_replaced_share=0.12, seed=3)
    measured, curve = measure_scurve(planted.texts, planted.pairs, MinHashParams(), sign=sign)
    counts = {"texts": 60, **write_curve(curve_folder(copy), measured, curve, MinHashParams())}
    seal_again(copy, curve_folder(copy))
    seal_curve_again(copy, counts)
    verdict = judged("s_curve_matches_formula", copy)
    assert verdict.num_violations >= 2
    assert "the measurement says" not in str(verdict.examples)
    assert "signatures miss the similarity" in str(verdict.examples)
    assert "off by +" in str(verdict.examples)


def test_a_near_copy_of_a_reference_may_not_be_validated_on(copy: Built) -> None:
    needle = validate_on(copy, small_corpus.LIKE_A_REFERENCE)
    verdict = judged("no_reference_text_is_in_validation", copy)
    assert verdict.num_violations == 1
    assert needle in str(verdict.examples)


def test_other_ids_that_decode_to_the_same_text_are_noticed(copy: Built) -> None:
    _, folder = units(copy, "document_tokens")[0]
    tokens, lengths = np.load(folder / TOKENS), np.load(folder / LENGTHS)
    tokenizer = load_tokenizer(whole(copy, "tokenizer") / "tokenizer.json", small_corpus.EOS)
    text = tokenizer.decode_batch([tokens[: lengths[0] - 1].tolist()])[0]
    words = [word for word, _ in tokenizer.library.pre_tokenizer.pre_tokenize_str(text)]
    spelled = [tokenizer.library.token_to_id(character) for word in words for character in word]
    assert len(spelled) > lengths[0]
    assert tokenizer.decode_batch([spelled])[0] == text
    np.save(folder / TOKENS, np.concatenate([np.array(spelled, tokens.dtype), tokens[lengths[0] - 1 :]]))
    lengths[0] = len(spelled) + 1
    np.save(folder / LENGTHS, lengths)
    seal_again(copy, folder)
    verdict = judged("tokens_decode_to_the_text", copy)
    assert verdict.num_violations == 1
    assert "other ids than the tokenizer's" in verdict.examples[0]["violation"]


@pytest.mark.parametrize(
    ("column", "value"), [("text", "another text"), ("num_tokens", 7), ("pool", "elsewhere"), ("cluster_id", bytes(32))]
)
def test_each_column_of_the_split_tables_is_recounted(copy: Built, column: str, value: object) -> None:
    path, rows = split_table(copy, "train")
    set_cell(path, 0, column, value)
    seal_again(copy, path.parent)
    verdict = judged("every_kept_document_has_a_split_or_a_reason", copy)
    assert verdict.num_violations == 1
    assert f"row 0: {column} is not that of {rows[0]['doc_id'].hex()[:16]}" in str(verdict.examples)


def test_the_pools_of_the_shard_index_are_recounted(copy: Built) -> None:
    folder = whole(copy, "token_shards")
    pools = np.load(folder / "train_index" / "pool.npy")
    set_value(folder / "train_index" / "pool.npy", 0, 1 - pools[0])
    seal_again(copy, folder)
    assert judged("shards_hold_every_document_once", copy).num_violations == 1


def misstate(path: Path, *keys: str) -> str:
    """Change one number of a manifest, a JSON file or a list in one; what is counted from the data stays."""
    content = json.loads(path.read_bytes())
    inner = content["counts"] if path.name == MANIFEST_NAME else content[0]["counts"]
    for key in keys[:-1]:
        inner = inner[key]
    inner[keys[-1]] += 1
    if path.name == MANIFEST_NAME:
        manifest = replace(load_manifest(path.parent), counts=content["counts"])
        path.write_text(json.dumps(manifest.to_json()), encoding="utf-8")
    else:
        path.write_text(json.dumps(content), encoding="utf-8")
    return str(inner[keys[-1]])


@pytest.mark.parametrize(
    "keys", [("documents",), ("tokens",), ("shards",), ("vocab_size",), ("splits", "train", "tokens")], ids="/".join
)
def test_each_count_of_the_shards_is_recounted(copy: Built, keys: tuple[str, ...]) -> None:
    stated = misstate(whole(copy, "token_shards") / MANIFEST_NAME, *keys)
    verdict = judged("shards_match_their_headers_and_hashes", copy)
    assert verdict.num_violations == 1
    assert stated in verdict.examples[0]["violation"].replace(",", "")


@pytest.mark.parametrize("name", ["documents", "tokens"])
def test_the_counts_of_the_tokens_are_recounted(copy: Built, name: str) -> None:
    misstate(whole(copy, "document_tokens") / MANIFEST_NAME, name)
    verdict = judged("end_of_document_comes_once_at_the_end", copy)
    assert verdict.num_violations == 1
    assert verdict.examples[0]["violation"].startswith(f"{name}: counted ")


def test_the_tokens_that_a_unit_lists_are_recounted(copy: Built) -> None:
    folder = whole(copy, "document_tokens")
    misstate(folder / UNITS_NAME, "tokens")
    seal_again(copy, folder)
    verdict = judged("end_of_document_comes_once_at_the_end", copy)
    assert verdict.num_violations == 1
    assert "are listed" in verdict.examples[0]["violation"]


@pytest.mark.parametrize(
    "name",
    [
        "train_documents",
        "validation_tokens",
        "unused_documents",
        "unused_below_min_tokens",
        "unused_below_min_tokens_bytes",
    ],
)
def test_the_counts_of_the_splits_are_recounted(copy: Built, name: str) -> None:
    stated = misstate(whole(copy, "split_documents") / MANIFEST_NAME, name)
    verdict = judged("every_kept_document_has_a_split_or_a_reason", copy)
    assert verdict.num_violations == 1
    assert f"found {stated} in the manifest" in verdict.examples[0]["violation"].replace(",", "")


@pytest.mark.parametrize(
    ("column", "value"),
    [
        ("documents", 7_777),
        ("tokens", 7_777),
        ("share_of_documents", 0.777),
        ("share_of_tokens", 0.777),
        ("mean_score", 7.5),
        ("mean_score_of_all", 7.5),
        ("is_chosen", True),
    ],
)
def test_each_number_of_the_floors_is_recounted(copy: Built, column: str, value: object) -> None:
    folder = whole(copy, "split_documents")
    (plan,) = load_manifest(folder).inputs["plans"]
    path = copy.home / "split_documents" / plan["unit"] / plan["identity"] / FLOORS_NAME
    set_cell(path, -1, column, value)
    verdict = judged("every_kept_document_has_a_split_or_a_reason", copy)
    assert verdict.num_violations == 1
    assert verdict.examples[0]["violation"].startswith("floor")


def test_a_document_under_the_floor_may_not_be_used(copy: Built) -> None:
    path, rows = split_table(copy, "unused")
    row = next(number for number, row in enumerate(rows) if row["split"] == "unused")
    change_table(
        path,
        lambda rows: [{**r, **({"split": "train", "reason": "used"} if n == row else {})} for n, r in enumerate(rows)],
    )
    seal_again(copy, path.parent)
    examples = str(judged("every_kept_document_has_a_split_or_a_reason", copy).examples)
    assert f"{rows[row]['doc_id'].hex()[:16]} of {rows[row]['num_tokens']} tokens has reason used" in examples


def test_an_end_inside_a_document_is_noticed(copy: Built) -> None:
    unit, folder = units(copy, "document_tokens")[0]
    assert int(np.load(folder / LENGTHS)[0]) > 3
    set_value(folder / TOKENS, 2, EOS_ID)
    seal_again(copy, folder)
    verdict = judged("end_of_document_comes_once_at_the_end", copy)
    assert verdict.num_violations == 1
    assert f"{unit}: token 2 is an EOS inside a document" in verdict.examples[0]["violation"]


def test_a_document_without_tokens_is_noticed(copy: Built) -> None:
    _, folder = units(copy, "document_tokens")[0]
    tokens, lengths = np.load(folder / TOKENS), np.load(folder / LENGTHS)
    np.save(folder / TOKENS, tokens[lengths[0] :])
    set_value(folder / LENGTHS, 0, 0)
    seal_again(copy, folder)
    examples = str(judged("end_of_document_comes_once_at_the_end", copy).examples)
    assert f"lengths sum to {len(tokens) - lengths[0]:,}" in examples
    misstated = whole(copy, "document_tokens") / UNITS_NAME
    content = json.loads(misstated.read_bytes())
    content[0]["counts"]["tokens"] -= int(lengths[0])
    misstated.write_text(json.dumps(content), encoding="utf-8")
    seal_again(copy, whole(copy, "document_tokens"))
    assert "document 0 has no token" in str(judged("end_of_document_comes_once_at_the_end", copy).examples)


def test_an_id_of_no_vocabulary_is_noticed(copy: Built) -> None:
    unit, folder = units(copy, "document_tokens")[0]
    set_value(folder / TOKENS, 1, 60_000)
    seal_again(copy, folder)
    assert f"{unit}: token 1: expected an id up to" in str(judged("tokens_decode_to_the_text", copy).examples)
    poke_shard(copy, 1, 60_000)
    seal_again(copy, whole(copy, "token_shards"))
    verdict = judged("shards_match_their_headers_and_hashes", copy)
    assert verdict.num_violations == 1
    assert "train_000000.bin: token 1: expected an id up to" in verdict.examples[0]["violation"]


def test_ids_of_more_bytes_than_they_need_are_noticed(copy: Built) -> None:
    unit, folder = units(copy, "document_tokens")[0]
    np.save(folder / TOKENS, np.load(folder / TOKENS).astype(np.uint32))
    seal_again(copy, folder)
    verdict = judged("tokens_decode_to_the_text", copy)
    assert verdict.num_violations == 1
    assert f"{unit}: expected uint16 ids" in verdict.examples[0]["violation"]


@pytest.mark.parametrize(("name", "value"), [("eos_id", 5), ("tokenizer_fingerprint", "f" * 64)])
def test_an_index_of_another_tokenizer_is_noticed(copy: Built, name: str, value: object) -> None:
    path = whole(copy, "token_shards") / "train_index" / "index.json"
    path.write_text(json.dumps({**json.loads(path.read_bytes()), name: value}), encoding="utf-8")
    seal_again(copy, whole(copy, "token_shards"))
    verdict = judged("shards_match_their_headers_and_hashes", copy)
    assert verdict.num_violations == 1
    assert verdict.examples[0]["violation"].startswith("train: expected tokenizer, EOS and dtype")


def test_an_end_within_a_document_breaks_the_positions(copy: Built) -> None:
    plan = load_plan(whole(copy, "packing_plan"), "train")
    doc, start, end = plan.locate(plan.segments_of(plan.step_packs(0, 0)))
    longest = int((end - start).argmax())
    assert plan.index.shards[doc[longest]] == 0
    poke_shard(copy, int(plan.index.offsets[doc[longest]] + start[longest]), EOS_ID)
    seal_again(copy, whole(copy, "token_shards"))
    verdict = judged("positions_restart_with_each_document", copy)
    assert "expected a new segment behind an EOS" in str(verdict.examples)


def test_a_checkpoint_of_other_data_is_noticed_whatever_its_state_says(copy: Built) -> None:
    def rename(payload: dict[str, Any]) -> None:
        payload["stream"]["plan"] = "f" * 64

    change_checkpoint(copy, rename)
    verdict = judged("resumed_sampler_gives_the_next_step", copy)
    assert "what the recipe reads, found one of ffffffffffff" in str(verdict.examples)
    recipe = small_corpus.write_recipe(copy.recipe.parent, small_corpus.WINDOWS, "windows.yaml")
    refs = small_corpus.recorded(copy.recipe, copy.home)
    judge = small_corpus.judge_of("resumed_sampler_gives_the_next_step")
    verdict = judge(replace(copy, recipe=recipe).stage, refs["varlen_training_run"], refs["packing_plan"])
    assert "what the recipe reads, found one of ffffffffffff" in str(verdict.examples)


def held_back(built: Built, ref: ArtifactRef) -> dict[str, str]:
    return quarantine_reasons(built.stage.store.folder(ref))


def test_a_failing_blocking_check_quarantines_and_a_passing_one_lifts(clean: Built, copy: Built) -> None:
    folder = whole(copy, "packing_plan")
    pristine = {path: path.read_bytes() for path in sorted((copy.home / "_references" / "packing_plan").iterdir())}
    repeat_a_segment(copy)
    name = "every_pair_comes_exactly_once"
    result = small_corpus.run_checks(copy.recipe, copy.home, name)
    evaluation = small_corpus.evaluations(result)[name]
    assert not evaluation.passed
    assert evaluation.severity == dg.AssetCheckSeverity.ERROR
    assert {"expected", "found", "num_violations", "examples"} <= set(evaluation.metadata)
    ref = small_corpus.recorded(copy.recipe, copy.home)["packing_plan"]
    assert list(held_back(copy, ref)) == [name]

    (refusal,) = small_corpus.failures(small_corpus.materialize(copy.recipe, copy.home, "packing_stats")).values()
    assert refusal.startswith("FormatError: ")
    assert "quarantined" in refusal
    assert name in refusal
    assert "Materialize packing_plan again" in refusal

    for source in (whole(clean, "packing_plan") / "train" / "order.npy", whole(clean, "packing_plan") / MANIFEST_NAME):
        (folder / source.relative_to(whole(clean, "packing_plan"))).write_bytes(source.read_bytes())
    for path, content in pristine.items():
        path.write_bytes(content)
    assert small_corpus.evaluations(small_corpus.run_checks(copy.recipe, copy.home, name))[name].passed
    assert not held_back(copy, ref)
    assert not small_corpus.failures(small_corpus.materialize(copy.recipe, copy.home, "packing_stats"))


def test_materializing_a_quarantined_asset_again_rebuilds_it(clean: Built, copy: Built) -> None:
    repeat_a_segment(copy)
    small_corpus.run_checks(copy.recipe, copy.home, "every_pair_comes_exactly_once")
    assert held_back(copy, copy.refs["packing_plan"])
    result = small_corpus.materialize(copy.recipe, copy.home, "packing_plan")
    assert result.success
    metadata = small_corpus.materialized_metadata(result)["packing_plan"]
    assert metadata["artifacts_rebuilt"] == 1
    assert metadata["data_version"] == clean.refs["packing_plan"].identity
    assert not held_back(copy, copy.refs["packing_plan"])
    assert load_manifest(whole(copy, "packing_plan")).digest == clean.refs["packing_plan"].digest


def test_a_check_that_crashes_quarantines_and_its_run_fails(copy: Built) -> None:
    _, path = first_slice(copy)
    path.write_bytes(b"PAR1 this is no table PAR1")
    seal_again(copy, whole(copy, "lsh_clusters"))
    name = "every_row_has_one_decision"
    result = small_corpus.run_checks(copy.recipe, copy.home, name)
    assert not result.success
    reasons = held_back(copy, small_corpus.recorded(copy.recipe, copy.home)["lsh_clusters"])
    assert reasons[name].startswith("the check crashed: ")


def test_units_are_held_back_with_their_asset(copy: Built) -> None:
    alter_a_token(copy)
    small_corpus.run_checks(copy.recipe, copy.home, "tokens_decode_to_the_text")
    ref = small_corpus.recorded(copy.recipe, copy.home)["document_tokens"]
    for unit in units_in(copy.stage, ref):
        with pytest.raises(FormatError, match="quarantined"):
            small_corpus.open_stage(copy.recipe, copy.home).open(unit)


def leak_in_the_split_plan(built: Built) -> None:
    """Let the stored decision of one held-out document say validation, as a faulty planner would have."""
    (plan,) = (built.home / "split_documents" / "plan").iterdir()
    held_out = doc_id(HELD_OUT)
    for unit, folder in units(built, "document_tokens"):
        rows = [row.tobytes() for row in np.load(folder / "doc_id.npy")]
        if held_out in rows:
            set_value(plan / f"{unit}.npy", (rows.index(held_out), 0), 1)
    seal_again(built, plan)


def test_a_leak_stops_everything_downstream_in_the_same_run_and_in_later_ones(clean: Built, copy: Built) -> None:
    leak_in_the_split_plan(copy)
    before = small_corpus.artifact_files(copy.home)
    flow = ("split_documents", "token_shards", "packing_plan")
    result = small_corpus.materialize(copy.recipe, copy.home, *flow)
    assert not result.success
    assert not small_corpus.evaluations(result)["no_reference_text_is_in_validation"].passed
    assert list(small_corpus.materialized_metadata(result)) == ["split_documents"]
    changed = set(small_corpus.artifact_files(copy.home).items()) - set(before.items())
    assert {path.split("/")[0] for path, _ in changed} == {"split_documents"}

    (refusal,) = small_corpus.failures(small_corpus.materialize(copy.recipe, copy.home, "token_shards")).values()
    assert "no_reference_text_is_in_validation" in refusal
    assert "Materialize split_documents again" in refusal

    again = small_corpus.materialize(copy.recipe, copy.home, *flow)
    assert again.success, small_corpus.failures(again)
    versions = {name: values["data_version"] for name, values in small_corpus.materialized_metadata(again).items()}
    assert versions == {name: clean.refs[name].identity for name in flow}
