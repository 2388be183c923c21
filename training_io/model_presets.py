"""Shapes of the decoder that go by a name: for recipes, which know no torch, and for the command line.

124m has GPT-2 small's 124 million parameters with GPT-2's vocabulary.
"""

from collections.abc import Mapping

MODEL_PRESETS: Mapping[str, Mapping[str, int]] = {
    "tiny": {"d_model": 128, "num_layers": 2, "num_heads": 4, "num_kv_heads": 2, "d_ff": 384},
    "124m": {"d_model": 768, "num_layers": 12, "num_heads": 12, "num_kv_heads": 12, "d_ff": 2048},
}
