"""The order of an epoch: a permutation that is computed where it is asked for, and never stored.

In: a number of packs, a seed, an epoch. Out: which pack stands at a position. The promise: each epoch's order is a
permutation that depends on seed and epoch alone. Cost: about two rounds of four hashes for each position asked for,
whatever the number of packs: to begin in the middle of epoch 100 costs as much as to begin at the start.
"""

from functools import lru_cache

import numpy as np
import numpy.typing as npt

from training_io.hashing import derive_seed, mix64

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]

NUM_ROUNDS = 4  # a Feistel network of four rounds of a random function is a strong pseudo-random permutation


def epoch_packs(positions: I64, num_packs: int, epoch_seed: int, epoch: int) -> I64:
    """Packs at positions of an epoch's order, int64[k]: the plan's own order in epoch 0, another in each later one.

    A Feistel network over the smallest even number of bits that holds every pack, the halves mixed by
    mix64(half ^ key), key = derive_seed(epoch_seed, "epoch e round r"). It is a permutation of up to 4 x num_packs
    numbers; what falls outside the packs goes through it again until it is one (cycle walking), which keeps it one.
    """
    if epoch == 0:
        return positions
    keys = _round_keys(epoch_seed, epoch)
    half_bits = np.uint64((max(num_packs - 1, 1).bit_length() + 1) // 2)
    packs = _permuted(positions.astype(np.uint64), half_bits, keys)
    while len(outside := np.flatnonzero(packs >= num_packs)):
        packs[outside] = _permuted(packs[outside], half_bits, keys)
    return packs.astype(np.int64)


def _permuted(values: U64, half_bits: np.uint64, keys: tuple[np.uint64, ...]) -> U64:
    mask = (np.uint64(1) << half_bits) - np.uint64(1)
    left, right = values >> half_bits, values & mask
    for key in keys:
        left, right = right, left ^ (mix64(right ^ key) & mask)
    return (left << half_bits) | right


@lru_cache(maxsize=4)
def _round_keys(epoch_seed: int, epoch: int) -> tuple[np.uint64, ...]:
    return tuple(np.uint64(derive_seed(epoch_seed, f"epoch {epoch} round {number}")) for number in range(NUM_ROUNDS))
