"""An emulation on the CPU of the matrix multiplication with float32 outputs, which torch has for CUDA only."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor

from worker_service.models import torch_operations


@contextmanager
def float32_products(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[tuple[Any, ...]]]:
    """Yield a list of the multiplications' arguments as they are called: x, the other factor, the requested dtype, and
    `out`.

    Models that are loaded inside the block use these multiplications. Sums are in float32.
    """
    calls: list[tuple[Any, ...]] = []

    def multiply(x: Tensor, other: Tensor, out_dtype: torch.dtype, *, out: Tensor) -> Tensor:
        assert (x.dtype, out.dtype) == (other.dtype, out_dtype), "refused on a GPU"
        assert out.shape == (len(x), other.shape[1]), "a GPU would not allocate"
        calls.append((x, other, out_dtype, out))
        return torch.mm(x.float(), other.float(), out=out)

    monkeypatch.setattr(torch_operations, "FLOAT32_PRODUCT_DEVICES", ("cuda", "cpu"))
    monkeypatch.setattr(torch_operations.Operations, "packs", lambda *_: False)  # as on a GPU
    library = torch.library.Library("aten", "IMPL")
    try:
        library.impl("mm.dtype_out", multiply, "CPU")
        yield calls
    finally:
        library._destroy()
