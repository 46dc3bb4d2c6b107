"""The operations of a decoder on a CPU."""

from collections.abc import Sequence

import torch
from torch import Tensor

from pagewire.kernels.arguments import NormRopeParams
from pagewire.kernels.cpu import CpuKernels, PackedExperts, PackedLinear
from pagewire.kernels.weight import FLOAT8, StoredWeight
from worker_service.models.torch_operations import ExpertProduct, Operations, Product


def create_host_operations(kernels: CpuKernels | None, *, uses_onednn: bool = False) -> Operations:
    """Return the implementation of a model's operations on a CPU: the C kernels, or plain torch if `kernels` is None.

    If `uses_onednn` is set, oneDNN computes matrix multiplications even if there are C kernels.
    """
    if kernels is None:
        return Operations()
    return CpuOperations(kernels) if uses_onednn else CpuProducts(kernels)


class CpuOperations(Operations):
    """The operations of a model on a CPU by C kernels, except matrix multiplications, which oneDNN computes.

    Models compute in float32 and bfloat16.
    """

    def __init__(self, kernels: CpuKernels) -> None:
        self.kernels = kernels

    def quantize(self, values: Tensor, bits: int, importance: Tensor | None = None) -> StoredWeight:
        return self.kernels.quantize(values, bits, importance)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        return self.kernels.silu_mul(gate_up)

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        return (self.kernels.rms_norm if weight.dtype == x.dtype else super().rms_norm)(x, weight, eps)

    def add_rms_norm(self, x: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
        add_rms_norm = self.kernels.add_rms_norm if weight.dtype == x.dtype else super().add_rms_norm
        return add_rms_norm(x, update, weight, eps)

    def norm_rope(self, heads: Tensor, preparation: NormRopeParams) -> tuple[Tensor, Tensor, Tensor]:
        weights = (preparation.query_weight, preparation.key_weight)
        are_equal = all(weight is None or weight.dtype == heads.dtype for weight in weights)
        return (self.kernels.norm_rope if are_equal else super().norm_rope)(heads, preparation)


class CpuProducts(CpuOperations):
    """The operations of a model on a CPU, all of them by C kernels.

    Matrix multiplications in float32 accept weights of any dtype. Matrix multiplications in bfloat16 round their inputs
    to bfloat16 and accept bfloat16 weights.
    """

    def can_store(self, held: torch.dtype, computed: torch.dtype) -> bool:
        """Return whether memory can store a weight in dtype `held` if the model computes in dtype `computed`.

        Float32 models can store bfloat16 and float16 weights, because float32 represents all their values exactly. This
        halves the bytes that are read.
        """
        is_narrow = computed == torch.float32 and held in (torch.bfloat16, torch.float16)
        return held == computed or is_narrow or held in (torch.int8, FLOAT8)

    def prepare_product(
        self, weight: StoredWeight, bias: Tensor | None, computed: torch.dtype, *, rounds_inputs: bool = False
    ) -> Product:
        """Pack a weight and its bias for the C kernels, and return the matrix multiplication.

        `rounds_inputs` has no effect, because these kernels do not round inputs further for it.
        """
        if not self.can_store(weight.element, computed):
            weight = StoredWeight(weight.to_floats(computed))
        packed = self.kernels.pack_linear(weight.with_each(Tensor.contiguous), floats(bias), computed)
        return CpuProduct(self.kernels, packed, computed)

    def prepare_experts(self, weights: Tensor, biases: Tensor | None, computed: torch.dtype) -> ExpertProduct:
        of_each = [None] * len(weights) if biases is None else list(biases)
        each = zip(map(StoredWeight, weights), of_each, strict=True)
        return self.join_experts([self.prepare_product(weight, bias, computed) for weight, bias in each])

    def join_experts(self, products: Sequence[Product]) -> ExpertProduct:
        packed = [product.packed for product in products if isinstance(product, CpuProduct)]
        assert len(packed) == len(products)
        return CpuExpertProduct(self.kernels, packed)

    def packs(self, computed: torch.dtype, device: torch.device) -> bool:
        return True

    def supports_row_lookup(self) -> bool:
        return True


class CpuProduct(Product):
    """A matrix multiplication with a weight that is packed in the layout of the C kernels.

    The weight may be quantised.
    """

    has_row_lookup = True

    def __init__(self, kernels: CpuKernels, packed: PackedLinear, computed: torch.dtype) -> None:
        self.kernels = kernels
        self.packed = packed
        self._computed = computed

    def __call__(self, x: Tensor) -> Tensor:
        return self.kernels.linear(x.float().contiguous(), self.packed).to(x.dtype)

    def lookup_rows(self, indexes: Tensor) -> Tensor:
        return self.kernels.lookup_rows(self.packed, indexes).to(self._computed)


class CpuExpertProduct:
    """A matrix multiplication of tokens with the experts chosen for them, by the C kernels.

    All experts' weights are packed.
    """

    def __init__(self, kernels: CpuKernels, packed: Sequence[PackedLinear]) -> None:
        """Join the packed weights of all experts of a layer.

        Raises ValueError if the weights differ in shape or format. See `PackedExperts`.
        """
        self.kernels = kernels
        self.packed = PackedExperts(packed)

    def __call__(self, x: Tensor, ids: Tensor) -> Tensor:
        return self.kernels.multiply_routed(x.float().contiguous(), self.packed, ids).to(x.dtype)


def floats(bias: Tensor | None) -> Tensor | None:
    """Return a bias in float32, the dtype in which matrix multiplications add it. None stays None."""
    return None if bias is None else bias.float()
