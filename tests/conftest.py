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
def varlen_on_cpu() -> None:
    """CPU kernels for PyTorch's variable-length operator, by the dense oracle; they stay for the life of the process.

    What calls them is PyTorch's own entry point, autograd and torch.compile included. Other devices keep their kernels.
    """
    import naive_training  # they load torch, which most tests do without
    import torch
    from torch.nn.attention import varlen

    def forward(q, k, v, cu_q, cu_k, max_q, max_k, is_causal=False, scale=None, window=(), gqa=False, *unused):
        lengths = torch.diff(cu_q).tolist()
        assert cu_q.dtype == torch.int32
        assert cu_k.tolist() == cu_q.tolist()
        assert (is_causal, list(window), scale) == (True, [-1, 0], None)
        assert type(max_q) is type(max_k) is int
        assert max_q == max_k >= max(lengths)
        assert gqa == (q.shape[1] != k.shape[1])
        lse = naive_training.dense_attention_lse(q, k, lengths)
        return naive_training.dense_attention(q, k, v, lengths), lse, torch.zeros(2, dtype=torch.uint64)

    def backward(grad, q, k, v, out, lse, cu_q, *unused):
        return naive_training.dense_attention_backward(grad, q, k, v, torch.diff(cu_q).tolist())

    varlen._varlen_attn.register_kernel("cpu", forward)
    varlen._varlen_attn_backward.register_kernel("cpu", backward)


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
