"""The choice of GPU kernels: for the model's operations, for the row tables, and for sampling.

Triton is imported only when it is needed, because the first import takes long.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from pagewire.kernels import gathering, sampling
from pagewire.kernels.gathering import GatheredTokens, RowTables
from pagewire.kernels.sampling import SampledTokens, SamplingColumns, TokenTarget
from pagewire.network.operations import Convolve, OperationList
from worker_service.models.torch_operations import Operations

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Sampler:
    """The functions that sample tokens and gather a step's inputs: the reference in torch, or faster Triton kernels.

    The modules `pagewire.kernels.sampling` and `pagewire.kernels.gathering` specify the functions.
    """

    sample: Callable[[Tensor, SamplingColumns, Tensor | None, int | None, TokenTarget | None], SampledTokens]
    count_tokens: Callable[[Tensor, Tensor, Tensor, Tensor, Tensor], None]
    gather_tokens: Callable[[RowTables, Tensor, Tensor, Tensor, int], GatheredTokens]
    gather_columns: Callable[[Tensor, Tensor, Tensor, Tensor], SamplingColumns]
    is_capturable: bool  # whether a graph can contain `sample`


REFERENCE = Sampler(
    sampling.sample,
    sampling.count_tokens,
    gathering.gather_tokens,
    gathering.gather_columns,
    is_capturable=False,
)


def create_sampler(vocab_size: int) -> Sampler:
    """Return the Triton kernels for sampling if they can be used, else the reference functions in torch.

    The Triton kernels cannot be used if Triton is missing, or if the vocabulary is too large for them. A warning is
    then logged, because the reference functions sample the sequences one by one, which is slow.
    """
    try:
        from pagewire.kernels.triton import gathering as triton_gathering
        from pagewire.kernels.triton import sampler
    except ImportError as error:
        logger.warning("sampling is computed row by row, which is slow: triton cannot be imported (%s)", error)
        return REFERENCE
    gather_tokens, gather_columns = triton_gathering.gather_tokens, triton_gathering.gather_columns
    if vocab_size > sampler.MAX_VOCAB_SIZE:
        logger.warning(
            "sampling is computed row by row, which is slow: the vocabulary has %d tokens, and the Triton kernels "
            "support at most %d",
            vocab_size,
            sampler.MAX_VOCAB_SIZE,
        )
        return replace(REFERENCE, gather_tokens=gather_tokens, gather_columns=gather_columns)
    return Sampler(sampler.sample, sampler.count_tokens, gather_tokens, gather_columns, is_capturable=True)


def create_device_operations(listed: OperationList, device: torch.device) -> Operations:
    """Return the implementation of the model's operations on a GPU: Triton kernels, or else plain torch.

    Plain torch is used if Triton is not installed or does not support the model. The reason is logged as a warning.
    Raises ValueError if the model then cannot be computed, because plain torch reads the numbers of states on the host.
    """
    try:
        from worker_service.device.triton_operations import TritonOperations
    except ImportError as error:
        reason = f"triton cannot be imported ({error})"
    else:
        refusal = TritonOperations.refusal(listed)
        if refusal is None:
            return TritonOperations(device)
        reason = f"the Triton kernels {refusal}"
    if any(type(each) is Convolve for each in listed):
        raise ValueError(f"a model with states needs Triton kernels on a GPU, but {reason}: use --device cpu")
    logger.warning("the model is computed in plain torch, which is slower: %s", reason)
    return Operations()
