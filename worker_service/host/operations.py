"""The operations of a decoder on a CPU."""

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from pagewire.kernels.arguments import HeadPreparation
from pagewire.kernels.cpu import CpuKernels, PackedExperts, PackedLinear
from pagewire.kernels.expert_choice import ExpertChoice
from pagewire.kernels.float8 import Float8Format, Float8Weight
from pagewire.kernels.quantized import QuantizedFormat, QuantizedWeight
from worker_service.models.model import Attend
from worker_service.models.operations import ExpertProduct, Float32Product, Operations, Product, TorchOperations


def create_host_operations(kernels: CpuKernels | None, *, uses_onednn: bool = False) -> Operations:
    """The C kernels where there are any, else plain torch. `uses_onednn`: products are oneDNN's all the same."""
    return TorchOperations() if kernels is None else CpuOperations(kernels, uses_onednn=uses_onednn)


class CpuOperations:
    """The C kernels. Products in float32 are over weights of any dtype; those in bfloat16, whose inputs are rounded to
    it, over weights of bfloat16. Models compute in no other dtype."""

    def __init__(self, kernels: CpuKernels, *, uses_onednn: bool = False) -> None:
        self.kernels = kernels
        self._uses_onednn = uses_onednn
        self.silu_mul = kernels.silu_mul
        self.quantize = kernels.quantize

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        operations = self.kernels if weight.dtype == x.dtype else TorchOperations()
        return operations.rms_norm(x, weight, eps)

    def add_rms_norm(self, x: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
        operations = self.kernels if weight.dtype == x.dtype else TorchOperations()
        return operations.add_rms_norm(x, update, weight, eps)

    def can_hold(self, held: torch.dtype, computed: torch.dtype) -> bool:
        """Every bfloat16 and float16 is a float32, so nothing is lost, and half as much is read."""
        is_widened = computed == torch.float32 and held in (torch.bfloat16, torch.float16)
        return held == computed or (is_widened and not self._uses_onednn)

    def prepare_product(self, weight: Tensor, bias: Tensor | None, computed: torch.dtype) -> Product:
        if self._uses_onednn:
            return TorchOperations().prepare_product(weight, bias, computed)
        packed = self.kernels.pack_linear(weight.contiguous(), floats(bias), computed)
        return CpuProduct(self.kernels, packed, computed)

    def float32_product_of(self, product: Product) -> Float32Product | None:
        return None

    def holds_quantized(self, stored: QuantizedFormat | Float8Format, computed: torch.dtype) -> bool:
        return not self._uses_onednn

    def quantized_bytes(self, stored: QuantizedFormat | Float8Format, out_size: int, in_size: int) -> int:
        return stored.num_bytes(out_size, in_size)

    def prepare_quantized(
        self,
        weight: QuantizedWeight | Float8Weight,
        bias: Tensor | None,
        computed: torch.dtype,
        *,
        rounds_inputs: bool = False,
    ) -> Product:
        """Inputs are rounded as little as the kernels do with any, whatever the weight was made for."""
        if isinstance(weight, Float8Weight):
            return CpuProduct(self.kernels, self.kernels.pack_float8(weight, floats(bias)), computed)
        return CpuProduct(self.kernels, self.kernels.pack_quantized(weight, floats(bias)), computed)

    def prepare_experts(self, weights: Tensor, biases: Tensor | None, computed: torch.dtype) -> ExpertProduct:
        if self._uses_onednn:
            return TorchOperations().prepare_experts(weights, biases, computed)
        of_each = [None] * len(weights) if biases is None else list(biases)
        return self.join_experts([self.prepare_product(*each, computed) for each in zip(weights, of_each, strict=True)])

    def join_experts(self, products: Sequence[Product]) -> ExpertProduct:
        packed = [product.packed for product in products if isinstance(product, CpuProduct)]
        assert len(packed) == len(products)
        return CpuExpertProduct(self.kernels, packed)

    def choose_experts(self, logits: Tensor, choice: ExpertChoice, correction: Tensor | None) -> tuple[Tensor, Tensor]:
        return TorchOperations().choose_experts(logits, choice, correction)

    def sum_slots(self, slots: Tensor, weights: Tensor) -> Tensor:
        return TorchOperations().sum_slots(slots, weights)

    def packs(self, computed: torch.dtype, device: torch.device) -> bool:
        return not self._uses_onednn or TorchOperations().packs(computed, device)

    def takes_rows(self, computed: torch.dtype) -> bool:
        return not self._uses_onednn

    def attend_heads(
        self, attend: Attend, layer: int, heads: Tensor, preparation: HeadPreparation, sinks: Tensor | None
    ) -> Tensor:
        weights = (preparation.query_weight, preparation.key_weight)
        are_equal = all(weight is None or weight.dtype == heads.dtype for weight in weights)
        norm_rope = self.kernels.norm_rope if are_equal else TorchOperations().norm_rope
        return attend(layer, *norm_rope(heads, preparation), sinks)

    def embedding_of(self, product: Product) -> Callable[[Tensor], Tensor] | None:
        return product.take_rows if isinstance(product, CpuProduct) else None


class CpuProduct:
    """A weight in the panels that the C kernels read, in the dtype it has or quantised."""

    def __init__(self, kernels: CpuKernels, packed: PackedLinear, computed: torch.dtype) -> None:
        self.kernels = kernels
        self.packed = packed
        self._computed = computed

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.linear(x.float().contiguous(), self.packed).to(x.dtype)

    def take_rows(self, indexes: Tensor) -> Tensor:
        return self.kernels.take_rows(self.packed, indexes).to(self._computed)


class CpuExpertProduct:
    """Such weights of all experts."""

    def __init__(self, kernels: CpuKernels, packed: Sequence[PackedLinear]) -> None:
        """Raises ValueError if they are not alike: see `PackedExperts`."""
        self.kernels = kernels
        self.packed = PackedExperts(packed)

    def __call__(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.kernels.multiply_chosen(x.float().contiguous(), self.packed, ids).to(x.dtype)


def floats(bias: Tensor | None) -> Tensor | None:
    """The bias as products add it."""
    return None if bias is None else bias.float()
