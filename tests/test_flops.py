"""Operations of a step against PyTorch's own counter, and peaks only of devices that are known."""

import itertools

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from training_io.flops import PEAK_BFLOAT16_FLOPS, num_matrix_weights, peak_flops, step_flops
from training_io.loss import summed_cross_entropy
from training_io.model import Model, ModelConfig, preset

SHAPES = {
    "grouped, tied": {"num_kv_heads": 2, "tied_embeddings": True},
    "full, untied": {"num_kv_heads": 4, "tied_embeddings": False},
    "learned, layernorm": {"num_kv_heads": 1, "positions": "learned", "norm": "layernorm"},
}


def counted(config, lengths):
    """Operations of forward and backward pass as PyTorch counts them, matrix by matrix."""
    model = Model(config, torch.Generator().manual_seed(0), backend="sdpa", exact=True)
    num_tokens = sum(lengths)
    positions = torch.cat([torch.arange(length) for length in lengths])
    cu_seqlens = torch.tensor([0, *itertools.accumulate(lengths)], dtype=torch.int32)
    inputs = torch.zeros(num_tokens, dtype=torch.int64)
    with FlopCounterMode(display=False) as counter:
        summed_cross_entropy(model(inputs, positions, cu_seqlens, max(lengths)), inputs).backward()
    return counter.get_total_flops()


@pytest.mark.parametrize("lengths", [[1], [7, 1, 30, 12], [16, 16]])
@pytest.mark.parametrize("shape", SHAPES)
def test_operations_are_those_of_every_matrix_product_with_half_of_each_attention_square(shape, lengths):
    config = ModelConfig(
        **({"vocab_size": 50, "d_model": 24, "num_layers": 3, "num_heads": 4, "d_ff": 40, "max_positions": 64})
        | SHAPES[shape]
    )
    sum_squares = sum(length**2 for length in lengths)
    causal_half = 6 * config.num_layers * config.d_model * sum_squares  # the plain formula computes both halves
    assert step_flops(config, sum(lengths), sum_squares) + causal_half == counted(config, lengths)


def test_the_124m_model_takes_six_operations_a_weight_and_token_beside_attention():
    config = preset("124m", 50_257, 4_096)
    num_tables = 50_257 * 768
    assert num_matrix_weights(config) == 12 * (4 * 768**2 + 3 * 768 * 2_048) + num_tables
    assert step_flops(config, 1_000, 0) == 6_000 * num_matrix_weights(config)
    assert step_flops(config, 0, 4_096**2) == 6 * 12 * 768 * 4_096**2


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("NVIDIA H200", 989e12),
        ("NVIDIA H200 NVL", 835e12),
        ("NVIDIA H100 80GB HBM3", 989e12),
        ("NVIDIA H100 PCIe", 756e12),
        ("NVIDIA H100 NVL", 835e12),
        ("NVIDIA A100-SXM4-80GB", 312e12),
        ("NVIDIA A100 80GB PCIe", 312e12),
        ("NVIDIA L40S", 362e12),
        ("NVIDIA L4", 121e12),
        ("NVIDIA H100 80GB HBM3 MIG 1g.10gb", None),
        ("NVIDIA GH200 480GB", None),
        ("NVIDIA L40", None),
        ("cpu", None),
    ],
)
def test_peaks_are_of_known_devices_alone(name, expected):
    assert peak_flops(name, "bfloat16") == expected
    assert peak_flops(name, "float32") is None


def test_every_known_device_is_found_by_its_own_name():
    for name, peak in PEAK_BFLOAT16_FLOPS.items():
        assert peak_flops(f"NVIDIA {name}", "bfloat16") == peak
