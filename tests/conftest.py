"""What all tests share: oracles on the import path, one Hypothesis profile, the data that only some machines have."""

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
from hypothesis import settings

if TYPE_CHECKING:
    from small_corpus import Built

sys.path.insert(0, str(Path(__file__).parent))

# Times say nothing about correctness, and a busy machine would fail them.
settings.register_profile("corpusmill", deadline=None)
settings.load_profile("corpusmill")


@pytest.fixture(scope="session")
def sample_data() -> Path:
    """Real text in four pools and two tokenizer files; the variable is set where they exist."""
    folder = os.environ.get("CORPUSMILL_TEST_DATA")
    if not folder:
        pytest.skip("CORPUSMILL_TEST_DATA names no folder of sample data")
    return Path(folder)


@pytest.fixture(scope="session")
def clean(tmp_path_factory: pytest.TempPathFactory) -> "Built":
    """The small corpus, materialized by Dagster once a session: to read, not to change."""
    import small_corpus  # it loads Dagster and torch, which most tests of single functions do without

    return small_corpus.clean(tmp_path_factory.getbasetemp())


@pytest.fixture
def copy(clean: "Built", tmp_path: Path) -> "Built":
    """The same home under another folder, free to be damaged."""
    import small_corpus

    return small_corpus.copy_home(clean, tmp_path / "home")
