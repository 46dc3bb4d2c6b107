"""The torch sampler, with a kernel's requirements on its columns."""

from dataclasses import replace

import torch

from pagewire.kernels.sampling import SampledTokens, SamplingColumns, TokenTarget
from tests.worker.fake_device import as_kernel
from worker_service.device.kernels import REFERENCE


@as_kernel
def sample(
    logits: torch.Tensor,
    columns: SamplingColumns,
    token_counts: torch.Tensor | None,
    max_logprobs: int | None,
    target: TokenTarget | None,
) -> SampledTokens:
    """Sample by the reference, after checking that the columns meet a kernel's requirements."""
    for name, tensor in columns._asdict().items():
        if tensor is not None:
            assert tensor.is_contiguous(), name
            assert len(tensor) == len(logits) or name == "masks", name
            assert tensor.data_ptr() % 16 == 0, f"a kernel would be compiled again for {name}"
            assert tensor.dtype in (torch.float32, torch.int32) or name == "seeds"
    return REFERENCE.sample(logits, columns, token_counts, max_logprobs, target)


SAMPLER = replace(REFERENCE, sample=sample, count_tokens=as_kernel(REFERENCE.count_tokens), is_capturable=True)
