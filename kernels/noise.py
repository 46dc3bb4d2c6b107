"""The noise of sampling: a pure function of (seed, sample index, position, token id), fixed forever.

Adding Gumbel noise to log-probabilities and choosing the highest sum draws from the distribution (Gumbel, 1954;
Maddison et al., "A* Sampling", 2014, https://arxiv.org/abs/1411.0030). Because the noise depends on nothing else, a row
draws the same tokens alone, in a batch, after preemption and on another machine. The hash is integer arithmetic modulo
2**32, computed in int64 so that every device produces the same bits. `fmix32` is the finalizer of MurmurHash3
(Appleby). tests/worker/test_noise.py compares stored values: a change here changes the output of every seeded request.
"""

from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

GOLDEN = 0x9E3779B9  # 2**32 / golden ratio
TOKEN_MULTIPLIER = 0x9E3779B1  # a prime near GOLDEN
FMIX_FIRST = 0x85EBCA6B
FMIX_SECOND = 0xC2B2AE35
_MASK = 0xFFFFFFFF

# Arrays of int64. On a CPU, numpy is faster than torch for a few numbers.
Numbers = TypeVar("Numbers", Tensor, NDArray[np.int64])


def fmix32(value: Numbers) -> Numbers:
    """Hash each number with the finalizer of MurmurHash3, which is a bijection of 32-bit numbers, and return the
    hashes.

    `value` must be in [0, 2**32) and is overwritten.
    """
    value ^= value >> 16
    value *= FMIX_FIRST
    value &= _MASK
    value ^= value >> 13
    value *= FMIX_SECOND
    value &= _MASK
    value ^= value >> 16
    return value


def noise_keys(seeds: Numbers, sample_indexes: Numbers, positions: Numbers) -> Numbers:
    """Return one number per row from which the row's random noise is computed (its noise key), [R] in [0, 2**32). It is
    a hash of the row's seed, sample index and position, so equal inputs give equal noise.

    Args:
        seeds: [R], the 64 bits of each seed.
        sample_indexes: [R]; only the lower 32 bits are used.
        positions: [R], the number of tokens that precede the sampled token.
    """
    key = fmix32(positions ^ GOLDEN)
    key = fmix32(key ^ (sample_indexes & _MASK))
    key = fmix32(key ^ (seeds >> 32 & _MASK))
    return fmix32(key ^ (seeds & _MASK))


def gumbel_noise(keys: Tensor, vocab_size: int) -> Tensor:
    """Return random noise with the standard Gumbel distribution for every token of the vocabulary, [R, vocab_size]
    float32. `keys` [R] contains one noise key per row.

    The noise is computed from a uniform random number (k + 0.5) / 2**23, where k has 23 random bits. This number is
    exact in float32 and never 0 or 1.
    """
    token_hashes = (torch.arange(vocab_size, device=keys.device) * TOKEN_MULTIPLIER).bitwise_and_(_MASK)
    hashes = fmix32(keys.unsqueeze(1) ^ token_hashes)
    uniform = hashes.bitwise_right_shift_(9).to(torch.float32).add_(0.5).mul_(2.0**-23)
    return uniform.log_().neg_().log_().neg_()
