"""The README is under test: its commands, assets, checks, recipes and paths are those of the repository."""

import re
from pathlib import Path

from pipeline_assets.automation import JOBS
from pipeline_assets.definitions import ASSETS, CHECKS
from pipeline_assets.recipes import BUILT_IN

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def test_every_make_target_that_is_named_exists_and_every_target_is_named():
    targets = set(re.findall(r"^([a-z][a-z-]*):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = set(re.findall(r"`make ([a-z-]+)`", README)) | set(re.findall(r"^make ([a-z-]+)", README, re.MULTILINE))
    assert named <= targets
    assert targets - {"env-prepare", "env-test"} <= named


def test_the_table_names_every_asset_and_every_check_with_its_severity():
    table = README[README.index("| stage | asset |") : README.index("A failed blocking check")]
    assert set(re.findall(r"^\|[^|]*\| `(\w+)`", table, re.MULTILINE)) == {asset.key.path[-1] for asset in ASSETS}
    specs = [spec for check in CHECKS for spec in check.check_specs]
    for spec in specs:
        row = next(line for line in table.splitlines() if f"`{spec.asset_key.path[-1]}`" in line)
        assert (f"**{spec.name}**" in row) == spec.blocking, spec.name
        assert spec.name in row
    named = set(re.findall(r"\b[a-z0-9]+(?:_[a-z0-9]+){2,}\b", table))
    assert {name for name in named if name not in {asset.key.path[-1] for asset in ASSETS}} <= {s.name for s in specs}


def test_every_job_is_named_by_its_name():
    start = README.index("Jobs launch parts of the flow")
    sentence = README[start : README.index("Every run is tagged", start)]
    assert set(re.findall(r"`(\w+)`", sentence)) == {job.name for job in JOBS}


def test_every_built_in_recipe_is_described():
    assert set(re.findall(r"^\| `([a-z-]+)`(?: \(default\))? \|", README, re.MULTILINE)) == set(BUILT_IN)


def test_every_path_that_is_named_exists():
    named = re.findall(r"`((?:pipeline_assets|training_io|resources|asset_checks|tests|benchmarks)/[\w./]*)`", README)
    assert named
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_files_to_change_are_beside_the_one_that_is_named_with_its_folder():
    """A name without a folder is in the folder of the path before it."""
    named = set()
    for row in README.partition("## To change something")[2].splitlines():
        folder = ""
        for path in re.findall(r"`([\w/]+\.py)`", row):
            folder = path.rpartition("/")[0] or folder
            file = ROOT / folder / path.rpartition("/")[2]
            assert file.exists(), row
            named.add(file.name)
    assert {"queries.py", "removals.py", "lookup.py", "shown_columns.py"} <= named
    reports = {path.name for path in (ROOT / "pipeline_assets").glob("quality_*.py")}
    assert reports - named == {"quality_page.py", "quality_report.py"}  # how it looks, and the asset


def test_it_stays_short():
    assert len(README.splitlines()) < 200
