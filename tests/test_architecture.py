"""Who may know what: import direction, the rooms' limits, names, and the fixed top level."""

import ast
import fnmatch
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("training_io", "pipeline_assets", "resources", "asset_checks")
ENTRY_POINTS = {"pipeline_assets.definitions", "pipeline_assets.__main__"}

MAY_IMPORT = {
    "training_io": {"training_io"},
    "transforms": {"training_io", "transforms"},
    "resources": {"training_io", "resources"},
    "stages": {"training_io", "transforms", "resources", "stages"},
    "asset_checks": {"training_io", "transforms", "resources", "stages", "asset_checks"},
    "definitions": {"training_io", "transforms", "resources", "stages", "asset_checks"},
}

TORCH_HALF = {
    "attention", "branching", "checkpoint", "evaluation", "experiment", "flops", "loader", "loss", "model", "preflight", "ranks",
    "run", "staging", "stream", "train", "train_command", "train_config", "train_job",
}  # fmt: skip
DAGSTERS_DOOR = {"training_io.gpu_io_manager"}
# Used where it is there, while a function runs: a recipe given to `inspect` is YAML, a package's self-test encodes again,
# a Hugging Face dataset is Arrow, and event files are TensorBoard's.
OPTIONAL = {
    "training_io.inspection": {"yaml"},
    "training_io.handoff": {"tokenizers"},
    "training_io.export_datasets": {"pyarrow"},
    "training_io.event_files": {"tensorboard"},
}
# What takes long to load and is needed by some steps alone: the code location is loaded again by each run and worker.
LOADED_WHEN_USED = {"matplotlib", "numba", "packaging.requirements", "scipy", "tokenizers", "torch"}
# These import torch while they run, never when they are loaded.
RUN_TORCH = {"pipeline_assets.training", "asset_checks.trained_run", "asset_checks.training"}

TRANSFORMS_USE = {"numpy", "numba", "pyarrow", "datasketch"}
NOT_IN_TRANSFORMS = {
    "asyncio", "datetime", "glob", "importlib", "io", "logging", "mmap", "multiprocessing", "os", "pathlib", "random",
    "secrets", "shutil", "socket", "subprocess", "sys", "tempfile", "threading", "time", "urllib", "uuid",
}  # fmt: skip
READS_FILES = {
    "open",
    "load",
    "save",
    "savez",
    "fromfile",
    "tofile",
    "memmap",
    "memory_map",
    "input_stream",
    "read_bytes",
    "read_text",
}
OWN_GENERATORS = {"default_rng", "Generator", "RandomState", "SeedSequence", "PCG64", "Philox"}

TOP_LEVEL = {
    "pyproject.toml", "workspace.yaml", "pipeline_assets", "training_io", "resources", "asset_checks", "tests",
    "README.md", "Makefile", "benchmarks", "LICENSE", ".ci",
}  # fmt: skip


@dataclass(frozen=True)
class Import:
    """One imported module and whether that happens when the file is loaded."""

    module: str
    is_on_load: bool


def modules():
    """Every module of the packages, by its dotted name."""
    found = {}
    for package in PACKAGES:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = ast.parse(
                path.read_text(encoding="utf-8")
            )
    return found


MODULES = modules()


def is_type_checking(node):
    return isinstance(node, ast.If) and isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING"


def imports_in(node, is_on_load=True):
    """All imports below a node; those in functions and under TYPE_CHECKING do not happen on load."""
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.Import):
            yield from (Import(alias.name, is_on_load) for alias in child.names)
        elif isinstance(child, ast.ImportFrom):
            assert child.level == 0, f"line {child.lineno}: import by package name"
            submodules = [f"{child.module}.{alias.name}" for alias in child.names]
            yield from (Import(name if name in MODULES else child.module, is_on_load) for name in submodules)
        elif (
            isinstance(child, ast.Call)
            and getattr(child.func, "attr", getattr(child.func, "id", "")) == "import_module"
        ):
            yield Import(ast.literal_eval(child.args[0]), False)
            yield from imports_in(child, is_on_load)
        else:
            is_later = isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)) or is_type_checking(child)
            yield from imports_in(child, is_on_load and not is_later)


def imports_of(module):
    return list(imports_in(MODULES[module]))


def room_of(module):
    if module in ENTRY_POINTS:
        return "definitions"
    if module.startswith("pipeline_assets.transforms"):
        return "transforms"
    package = module.partition(".")[0]
    return "stages" if package == "pipeline_assets" else package


def is_ours(module):
    return module.partition(".")[0] in PACKAGES


def third_party(module):
    """Top-level names of what a module imports that is neither ours nor the standard library's."""
    names = {imported.module.partition(".")[0] for imported in imports_of(module) if not is_ours(imported.module)}
    return names - set(sys.stdlib_module_names)


def of_room(room):
    return [module for module in MODULES if room_of(module) == room]


def test_the_walk_sees_every_room():
    assert {room_of(module) for module in MODULES} == set(MAY_IMPORT)
    assert {"pipeline_assets.recipe", "training_io.hashing"} <= {
        i.module for i in imports_of("pipeline_assets.references")
    }
    assert Import("torch", False) in list(imports_in(ast.parse("def run():\n    import torch")))
    assert Import("torch", True) in list(imports_in(ast.parse("class A:\n    from torch import nn")))


@pytest.mark.parametrize("module", MODULES)
def test_imports_point_one_way(module):
    for imported in imports_of(module):
        if is_ours(imported.module):
            assert room_of(imported.module) in MAY_IMPORT[room_of(module)] or module == "pipeline_assets.__main__", (
                imported
            )


def test_nobody_imports_the_definitions_but_the_command_line():
    importers = {
        module for module in MODULES if any(imported.module in ENTRY_POINTS for imported in imports_of(module))
    }
    assert importers <= {"pipeline_assets.__main__"}


@pytest.mark.parametrize("module", of_room("training_io"))
def test_training_io_needs_numpy_and_in_its_device_half_torch(module):
    optional = OPTIONAL.get(module, set())
    allowed = {"numpy"} | optional
    allowed |= {"torch"} if module.removeprefix("training_io.") in TORCH_HALF else set()
    allowed |= {"dagster", "pydantic"} if module in DAGSTERS_DOOR else set()  # Dagster's config classes are pydantic's
    assert third_party(module) <= allowed
    assert not [imported for imported in imports_of(module) if imported.module in optional and imported.is_on_load]


def test_the_numpy_half_never_imports_the_device_half_on_load():
    torch_half = {f"training_io.{name}" for name in TORCH_HALF}
    for module in of_room("training_io"):
        if module not in torch_half:
            on_load = {imported.module for imported in imports_of(module) if imported.is_on_load}
            assert not on_load & {*torch_half, "torch"}, module


@pytest.mark.parametrize("module", [module for module in MODULES if room_of(module) != "training_io"])
def test_torch_is_imported_while_training_runs_and_never_on_load(module):
    uses = [imported for imported in imports_of(module) if imported.module.partition(".")[0] == "torch"]
    assert not any(imported.is_on_load for imported in uses)
    assert not uses or module in RUN_TORCH


@pytest.mark.parametrize("module", of_room("transforms"))
def test_transforms_know_no_files_clocks_environment_or_dagster(module):
    assert third_party(module) <= TRANSFORMS_USE
    imported = {imported.module for imported in imports_of(module)}
    assert not {name.partition(".")[0] for name in imported} & NOT_IN_TRANSFORMS
    assert not imported & {"pyarrow.parquet", "pyarrow.fs", "pyarrow.dataset", "pyarrow.csv", "pyarrow.json"}
    for node in ast.walk(MODULES[module]):
        if isinstance(node, ast.Call):
            name = getattr(node.func, "attr", getattr(node.func, "id", ""))
            assert name not in READS_FILES | {"print", "input"}, f"line {node.lineno}: {name}"
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Attribute) and node.value.attr == "random":
            assert node.attr in OWN_GENERATORS, f"line {node.lineno}: {node.attr} of a global generator"


@pytest.mark.parametrize("module", MODULES)
def test_nothing_hangs_on_pythons_own_hash(module):
    calls = [
        node for node in ast.walk(MODULES[module]) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)
    ]
    assert not [call.lineno for call in calls if call.func.id == "hash"]


@pytest.mark.parametrize("module", MODULES)
def test_a_module_says_what_it_is_for(module):
    assert ast.get_docstring(MODULES[module]) or not MODULES[module].body


def test_no_module_is_named_after_nothing():
    nothing = {"utils", "util", "helpers", "helper", "common", "misc"}
    for folder in (*PACKAGES, "tests", "benchmarks"):
        for path in (REPOSITORY / folder).rglob("*"):
            assert path.stem not in nothing, path


def test_the_code_location_loads_without_torch_and_what_only_some_steps_use():
    watched = {"dagster", *LOADED_WHEN_USED}
    code = f"import sys, pipeline_assets.definitions; print(sorted({watched!r} & set(sys.modules)))"
    loaded = subprocess.run(
        [sys.executable, "-c", code],
        cwd=REPOSITORY,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert loaded.stdout.strip() == "['dagster']", loaded.stderr


def test_the_top_level_is_fixed():
    ignored = [line.rstrip("/") for line in (REPOSITORY / ".gitignore").read_text().splitlines() if line.strip()]
    present = {
        path.name
        for path in REPOSITORY.iterdir()
        if not any(fnmatch.fnmatch(path.name, pattern) for pattern in ignored)
    }
    extra = {name for name in present - TOP_LEVEL if not (name.startswith(".") or name.endswith(".lock"))}
    assert not extra
    assert not TOP_LEVEL - present
    assert all((REPOSITORY / name).is_dir() for name in PACKAGES)
