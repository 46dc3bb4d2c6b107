"""The noise of sampling: a pure function of (seed, sample index, position, token id), fixed forever.

Adding Gumbel noise to log-probabilities and taking the highest is drawing from the distribution (Gumbel, 1954; Maddison
et al., "A* Sampling", 2014, https://arxiv.org/abs/1411.0030). Because the noise depends on nothing else, a row draws
the same tokens alone, in a batch, after preemption and on another machine. The hash is integer arithmetic modulo 2**32,
done in int64 so that every device gives the same bits; `fmix32` is the finalizer of MurmurHash3 (Appleby).
tests/worker/test_noise.py holds stored values: a change here changes the output of every seeded request.
"""

import torch
from torch import Tensor

GOLDEN = 0x9E3779B9  # 2**32 / golden ratio
TOKEN_MULTIPLIER = 0x9E3779B1  # a prime beside it
FMIX_FIRST = 0x85EBCA6B
FMIX_SECOND = 0xC2B2AE35
_MASK = 0xFFFFFFFF


def fmix32(value: Tensor) -> Tensor:
    """MurmurHash3's finalizer, a bijection of 32-bit numbers. `value` is int64 in [0, 2**32) and is overwritten."""
    value.bitwise_xor_(value >> 16).mul_(FMIX_FIRST).bitwise_and_(_MASK)
    value.bitwise_xor_(value >> 13).mul_(FMIX_SECOND).bitwise_and_(_MASK)
    return value.bitwise_xor_(value >> 16)


def noise_keys(seeds: Tensor, sample_indexes: Tensor, positions: Tensor) -> Tensor:
    """One key per row: [R] int64 in [0, 2**32).

    Args:
        seeds: [R] int64, the 64 bits of each seed.
        sample_indexes: [R] integers, of which the lower 32 bits count.
        positions: [R] integers, how many tokens stand before the drawn one.
    """
    key = fmix32(positions.long() ^ GOLDEN)
    key = fmix32(key ^ (sample_indexes.long() & _MASK))
    key = fmix32(key ^ (seeds >> 32 & _MASK))
    return fmix32(key ^ (seeds & _MASK))


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Standard Gumbel noise of every token: [R, vocab_size] float32 for keys [R].

    The uniform number has 23 random bits and half a step on top: exact in float32, and never 0 or 1.
    """
    token_hashes = (torch.arange(vocab_size, device=keys.device) * TOKEN_MULTIPLIER).bitwise_and_(_MASK)
    hashes = fmix32(keys.unsqueeze(1) ^ token_hashes)
    uniform = hashes.bitwise_right_shift_(9).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()
