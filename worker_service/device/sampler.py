"""Chooses what samples on a device."""

import logging
from collections.abc import Callable
from dataclasses import dataclass

from torch import Tensor

from pagewire.kernels import sampling
from pagewire.kernels.sampling import SampledTokens, SamplingColumns

logger = logging.getLogger(__name__)

Sample = Callable[[Tensor, SamplingColumns, Tensor | None, int | None], SampledTokens]
CountTokens = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]


@dataclass(frozen=True, slots=True)
class Sampler:
    """The functions of `pagewire.kernels.sampling`, or faster ones that do the same."""

    sample: Sample
    count_tokens: CountTokens
    is_capturable: bool  # whether a graph can hold `sample`


REFERENCE = Sampler(sampling.sample, sampling.count_tokens, is_capturable=False)


def create_sampler(vocab_size: int) -> Sampler:
    """The Triton kernels where they can, else their specification, which computes row by row."""
    try:
        # Only where it computes: the first import takes long.
        from pagewire.kernels.triton import sampler
    except ImportError as error:
        logger.warning("sampling is computed row by row, which is slow: triton cannot be imported (%s)", error)
        return REFERENCE
    if vocab_size > sampler.MAX_VOCAB_SIZE:
        logger.warning(
            "sampling is computed row by row, which is slow: the vocabulary has %d tokens, the Triton kernels take %d",
            vocab_size,
            sampler.MAX_VOCAB_SIZE,
        )
        return REFERENCE
    return Sampler(sampler.sample, sampler.count_tokens, is_capturable=True)
