"""Every example in a docstring of the packages, run by module name."""

import doctest
import importlib
from pathlib import Path

import pytest

REPOSITORY = Path(__file__).resolve().parents[1]
PACKAGES = ("training_io", "pipeline_assets", "resources", "asset_checks")


def module_names():
    names = []
    for package in PACKAGES:
        for path in sorted((REPOSITORY / package).rglob("*.py")):
            parts = path.relative_to(REPOSITORY).with_suffix("").parts
            names.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return names


def examples_of(name):
    return [test for test in doctest.DocTestFinder().find(importlib.import_module(name)) if test.examples]


@pytest.mark.parametrize("name", module_names())
def test_the_examples_of_a_module_are_true(name):
    for example in examples_of(name):
        runner = doctest.DocTestRunner(verbose=False)
        report = []
        runner.run(example, out=report.append)
        assert not runner.failures, "".join(report)


def test_there_are_examples():
    assert len(examples_of("training_io.hashing")) >= 1
    assert (
        sum(
            ">>>" in path.read_text(encoding="utf-8")
            for package in PACKAGES
            for path in (REPOSITORY / package).rglob("*.py")
        )
        > 10
    )
