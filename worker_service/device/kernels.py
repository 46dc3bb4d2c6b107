"""Chooses the kernels of a GPU: what a model computes with, what reads and writes the rows' tables, and what samples.

Triton is imported only where it computes: the first import takes long.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagewire.kernels import gathering, sampling
from pagewire.kernels.gathering import GatheredTokens, RowTables
from pagewire.kernels.sampling import SampledTokens, SamplingColumns, TokenTarget
from pagewire.network.operations import Listing
from worker_service.models.torch_operations import Operations

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sampler:
    """The functions of `pagewire.kernels.sampling` and `pagewire.kernels.gathering`, or faster ones that do the
    same."""

    sample: Callable[[Tensor, SamplingColumns, Tensor | None, int | None, TokenTarget | None], SampledTokens]
    count_tokens: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    gather_tokens: Callable[[RowTables, Tensor, Tensor, Tensor, int], GatheredTokens]
    gather_columns: Callable[[Tensor, Tensor, Tensor, Tensor], SamplingColumns]
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


def create_device_operations(listed: Listing, device: torch.device) -> Operations:
    """The Triton kernels where there are any and they can compute the model, else plain torch, which is told."""
    try:
        from worker_service.device.triton_operations import TritonOperations
    except ImportError as error:
        logger.warning("the model is computed in plain torch, which is slower: triton cannot be imported (%s)", error)
        return Operations()
    reason = TritonOperations.refusal(listed)
    if reason is None:
        return TritonOperations(device)
    logger.warning("the model is computed in plain torch, which is slower: the Triton kernels %s", reason)
    return Operations()
