"""What all tests share: oracles on the import path, one Hypothesis profile, the data that only some machines have."""

import os
import sys
from pathlib import Path

import pytest
from hypothesis import settings

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
