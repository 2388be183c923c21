"""Whether a table keeps its contract.

In: a contract and a table. Out: the same table. Promise: called before a table is written, so that one which breaks its
contract is never sealed; from several threads too. Cost: a pass over each column; one table at a time.
"""

import sys
import threading
from functools import cache
from importlib.util import find_spec

import pandera.pyarrow as pap
import pyarrow as pa

from pipeline_assets.schemas import Contract
from training_io.errors import InvariantBroken

_ONE_AT_A_TIME = threading.Lock()
"""pandera imports engines while it validates: another thread would see half of one."""

_PACKAGE_OF = {"numpy_engine": "pandas", "pandas_engine": "pandas", "pyspark_engine": "pyspark"}
"""Engines that pandera tries to import with each column, Arrow or not: where they are missing, a fifth of a build."""


@cache
def _forgo_missing_engines() -> None:
    """Let the import system remember the engines whose package is not installed."""
    for engine, package in _PACKAGE_OF.items():
        if find_spec(package) is None:
            sys.modules[f"pandera.engines.{engine}"] = None  # type: ignore[assignment]  # its own sign for "missing"


def validated(contract: type[Contract], table: pa.Table) -> pa.Table:
    """The same table once it keeps its contract; InvariantBroken lists what it breaks."""
    try:
        with _ONE_AT_A_TIME:
            _forgo_missing_engines()
            contract.validate(table, lazy=True)
    except pap.errors.SchemaErrors as error:
        cases = error.failure_cases.slice(0, 5).to_pylist()
        listed = "; ".join(f"{case['column']}: {case['check']}, found {case['failure_case']}" for case in cases)
        raise InvariantBroken(f"table {contract.__name__} of {table.num_rows:,} rows: {listed}") from error
    return table
