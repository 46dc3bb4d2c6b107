"""Chooses what reads and writes the rows' tables on a device, and what samples."""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

from torch import Tensor

from pagewire.kernels import gathering, sampling
from pagewire.kernels.gathering import GatheredTokens, RowTables
from pagewire.kernels.sampling import SampledTokens, SamplingColumns, TokenTarget

logger = logging.getLogger(__name__)

Sample = Callable[[Tensor, SamplingColumns, Tensor | None, int | None, TokenTarget | None], SampledTokens]
CountTokens = Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
GatherTokens = Callable[[RowTables, Tensor, Tensor, Tensor, int], GatheredTokens]
GatherColumns = Callable[[Tensor, Tensor, Tensor, Tensor], SamplingColumns]


@dataclass(frozen=True, slots=True)
class Sampler:
    """The functions of `pagewire.kernels.sampling` and `pagewire.kernels.gathering`, or faster ones that do the
    same."""

    sample: Sample
    count_tokens: CountTokens
    gather_tokens: GatherTokens
    gather_columns: GatherColumns
    is_capturable: bool  # whether a graph can hold `sample`


REFERENCE = Sampler(
    sampling.sample,
    sampling.count_tokens,
    gathering.gather_tokens,
    gathering.gather_columns,
    is_capturable=False,
)


def create_sampler(vocab_size: int) -> Sampler:
    """The Triton kernels where they can, else their specification, which computes row by row."""
    try:
        # Only where it computes: the first import takes long.
        from pagewire.kernels.triton import gathering as triton_gathering
        from pagewire.kernels.triton import sampler
    except ImportError as error:
        logger.warning("sampling is computed row by row, which is slow: triton cannot be imported (%s)", error)
        return REFERENCE
    gather_tokens, gather_columns = triton_gathering.gather_tokens, triton_gathering.gather_columns
    if vocab_size > sampler.MAX_VOCAB_SIZE:
        logger.warning(
            "sampling is computed row by row, which is slow: the vocabulary has %d tokens, the Triton kernels take %d",
            vocab_size,
            sampler.MAX_VOCAB_SIZE,
        )
        return replace(REFERENCE, gather_tokens=gather_tokens, gather_columns=gather_columns)
    return Sampler(sampler.sample, sampler.count_tokens, gather_tokens, gather_columns, is_capturable=True)
