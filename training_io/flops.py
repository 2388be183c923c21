"""Arithmetic of a training step, and how much of it a device could do: what model FLOPs utilisation divides.

In: a model's shape, the tokens of a step, the sum of its squared segment lengths. Out: floating-point operations of
forward and backward pass. A multiplication and an addition are two operations; of attention the causal half is
counted, since the kernels skip the other. Norms, softmax, rotary positions and the embedding look-up are left out, as
usual (Chowdhery et al., PaLM, appendix B).
"""

from training_io.model import ModelConfig

# Dense bfloat16 operations a second on tensor cores (data sheets that quote sparsity: half), longer names first.
# NVIDIA's data sheets: nvidia.com/en-us/data-center/h200, /h100, /a100, /l40s, /l4.
PEAK_BFLOAT16_FLOPS = {
    "H200 NVL": 835e12,
    "H200": 989e12,
    "H100 PCIe": 756e12,
    "H100 NVL": 835e12,
    "H100": 989e12,
    "A100": 312e12,
    "L40S": 362e12,
    "L4": 121e12,
}


def step_flops(config: ModelConfig, num_tokens: int, sum_squares: int) -> int:
    """Operations of forward and backward pass over segments of num_tokens in all, sum_squares = Σ length².

    6 · matrix weights · tokens + 6 · layers · d_model · Σ length²: the backward pass costs twice the forward one, and
    queries times keys and weights times values are each 2 · d_model · length² a layer, of which causality leaves half.

    >>> tiny = ModelConfig(vocab_size=8, d_model=4, num_layers=1, num_heads=2, num_kv_heads=2, d_ff=8, max_positions=8)
    >>> step_flops(tiny, num_tokens=10, sum_squares=0), step_flops(tiny, num_tokens=0, sum_squares=50)
    (11520, 1200)
    """
    return 6 * num_matrix_weights(config) * num_tokens + 6 * config.num_layers * config.d_model * sum_squares


def num_matrix_weights(config: ModelConfig) -> int:
    """Weights that every token is multiplied by: projections, feed-forward and head; not the embedding look-up."""
    width = config.d_model
    attention = width * (2 * width + 2 * config.num_kv_heads * config.head_width)
    return config.num_layers * (attention + 3 * width * config.d_ff) + config.vocab_size * width


def peak_flops(device_name: str, dtype: str) -> float | None:
    """Dense operations a second that a device's data sheet states; None for a device or dtype that is not known here.

    >>> peak_flops("NVIDIA H200", "bfloat16"), peak_flops("NVIDIA H200", "float32")
    (989000000000000.0, None)
    """
    words = set(device_name.replace("-", " ").split())
    if dtype != "bfloat16" or "MIG" in words:  # a part of a device has a part of its speed
        return None
    return next((peak for name, peak in PEAK_BFLOAT16_FLOPS.items() if words >= set(name.split())), None)
