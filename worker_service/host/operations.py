"""The operations of a decoder on a CPU."""

from collections.abc import Callable

import torch
from torch import Tensor

from pagewire.kernels.arguments import HeadPreparation
from pagewire.kernels.cpu import CpuKernels, PackedLinear
from worker_service.models.model import Attend
from worker_service.models.operations import Operations, Product, TorchOperations


def create_host_operations(kernels: CpuKernels | None) -> Operations:
    """The C kernels where there are any, else plain torch."""
    return TorchOperations() if kernels is None else CpuOperations(kernels)


class CpuOperations:
    """The C kernels. Products are theirs in float32, over weights of any dtype; in bfloat16 they are oneDNN's."""

    def __init__(self, kernels: CpuKernels) -> None:
        self.kernels = kernels
        self.rms_norm = kernels.rms_norm
        self.add_rms_norm = kernels.add_rms_norm
        self.silu_mul = kernels.silu_mul

    def can_hold(self, held: torch.dtype, computed: torch.dtype) -> bool:
        """Every bfloat16 and float16 is a float32, so nothing is lost, and half as much is read."""
        return computed == torch.float32 and held in (torch.float32, torch.bfloat16, torch.float16)

    def prepare_product(self, weight: Tensor, bias: Tensor | None, computed: torch.dtype) -> Product:
        if computed == torch.float32:
            return CpuProduct(self.kernels, weight, bias)
        return TorchOperations().prepare_product(weight, bias, computed)

    def packs(self, computed: torch.dtype, device: torch.device) -> bool:
        return computed == torch.float32 or TorchOperations().packs(computed, device)

    def takes_rows(self, computed: torch.dtype) -> bool:
        return computed == torch.float32

    def attend_heads(self, attend: Attend, layer: int, heads: Tensor, preparation: HeadPreparation) -> Tensor:
        return attend(layer, *self.kernels.norm_rope(heads, preparation))

    def embedding_of(self, product: Product) -> Callable[[Tensor], Tensor] | None:
        return product.take_rows if isinstance(product, CpuProduct) else None


class CpuProduct:
    """A weight in the panels that the C kernels read, in the dtype it has."""

    def __init__(self, kernels: CpuKernels, weight: Tensor, bias: Tensor | None) -> None:
        self._kernels = kernels
        self.packed: PackedLinear = kernels.pack_linear(weight.contiguous(), bias)

    def __call__(self, x: Tensor) -> Tensor:
        return self._kernels.linear(x.contiguous(), self.packed)

    def take_rows(self, indexes: Tensor) -> Tensor:
        return self._kernels.take_rows(self.packed, indexes)
