"""The operations of a decoder on a GPU.

Triton kernels compute experts, quantised weights, and the operations between matrix multiplications. cuBLAS computes
matrix multiplications of float weights.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pagewire.kernels.arguments import NormRopeParams
from pagewire.kernels.triton import experts, fused, linear, scaled, states
from pagewire.kernels.triton.cache import HEAD_DIMS
from pagewire.kernels.weight import FLOAT8, StoredFormat, StoredWeight
from pagewire.network.operations import (
    Convolve,
    DeltaRule,
    Normalize,
    NormalizeGated,
    OperationList,
    QkNormRopeStore,
)
from worker_service.attention.backends.triton import CachedAttend
from worker_service.models.linear import stack
from worker_service.models.torch_operations import Attend, DenseProduct, ExpertProduct, Operations, Product

_MIN_CAPABILITY = {torch.int8: (0, 0), FLOAT8: (8, 9)}  # of a GPU that can convert values of this element type


class TritonOperations(Operations):
    """The operations of a model on a GPU, computed by Triton kernels with one launch each.

    Intermediate results are rounded as in `Operations`, the implementation in plain torch.
    """

    rms_norm = staticmethod(fused.rms_norm)
    add_rms_norm = staticmethod(fused.add_rms_norm)
    silu_mul = staticmethod(fused.silu_mul)
    norm_rope = staticmethod(fused.norm_rope)
    route_tokens = staticmethod(experts.route_tokens)
    sum_slots = staticmethod(experts.sum_slots)
    convolve = staticmethod(states.convolve)
    apply_delta_rule = staticmethod(states.apply_delta_rule)
    normalize_gated = staticmethod(states.normalize_gated)

    def __init__(self, device: torch.device) -> None:
        """Create the operations for one GPU. Quantised weights are read on the host and then copied to `device`."""
        self._device = device
        self._assigned: tuple[Tensor, experts.Assignment] | None = None  # the last expert ids and their assignment

    @staticmethod
    def refusal(listed: OperationList) -> str | None:
        """Return the reason why the Triton kernels cannot compute a model, or None if they can compute it.

        The reason is a clause that follows "the Triton kernels" in a message. `listed` are the operations of the model.
        """
        turns = [each for each in listed if type(each) is QkNormRopeStore and (each.rope or each.query_norm)]
        norms = [each for each in listed if type(each) is Normalize and not each.is_centered]
        odd = next((turn.heads.head_dim for turn in turns if turn.heads.head_dim not in HEAD_DIMS), None)
        if odd is not None:
            bounds = f"{HEAD_DIMS[0]} to {HEAD_DIMS[-1]} in steps of {HEAD_DIMS.step}"
            return f"rotate heads of size {bounds}, and the model's heads have size {odd}"
        width = max((norm.weight.num_elements for norm in norms), default=0)
        if width > fused.MAX_NORM_SIZE:
            return f"normalize rows of at most {fused.MAX_NORM_SIZE} elements, and the model's rows have {width}"
        return _state_refusal(listed)

    def prepare_product(
        self, weight: StoredWeight, bias: Tensor | None, computed: torch.dtype, *, rounds_inputs: bool = False
    ) -> Product:
        """Prepare a weight and its bias for matrix multiplication on the GPU, and return the multiplication.

        If `rounds_inputs` is set and the GPU has an 8-bit kernel for the weight, the inputs are rounded to 8 bits.
        """
        if weight.scale is None:
            return DenseProduct(weight.to_floats(computed).to(self._device), bias)
        if rounds_inputs and scaled.is_supported(self._device, weight.element):
            packed = scaled.pack(weight, self._device)
            if packed is not None:
                return RoundedProduct(packed, bias)
        return PackedProduct(linear.pack(weight, self._device), bias, computed)

    def can_store(self, held: torch.dtype, computed: torch.dtype) -> bool:
        """Return whether GPU memory can store a weight in dtype `held` if the model computes in dtype `computed`.

        8-bit floats require a GPU that can convert them, or Triton's interpreter.
        """
        if held not in _MIN_CAPABILITY or self._device.type != "cuda":
            return held == computed or held in _MIN_CAPABILITY
        return torch.cuda.get_device_capability(self._device) >= _MIN_CAPABILITY[held]

    def quantized_bytes(self, stored: StoredFormat, out_size: int, in_size: int) -> int:
        return linear.num_bytes(stored, out_size, in_size)

    def quantize(self, values: Tensor, bits: int, importance: Tensor | None = None) -> StoredWeight:
        importance = None if importance is None else importance.to(self._device)
        return super().quantize(values.to(self._device), bits, importance).with_each(Tensor.cpu)

    def packs(self, computed: torch.dtype, device: torch.device) -> bool:
        return False

    def prepare_experts(self, weights: Tensor, biases: Tensor | None, computed: torch.dtype) -> ExpertProduct:
        num_experts = len(weights)
        return lambda x, ids: experts.multiply_routed(
            x, weights, self._assign_experts(num_experts, ids, x.dtype), biases
        )

    def join_experts(self, products: Sequence[Product]) -> ExpertProduct:
        """Join the weights of all experts of a layer into one matrix multiplication.

        The weights must be all quantised or all dense (floats).
        """
        dense = [product for product in products if isinstance(product, DenseProduct)]
        if dense:
            assert len(dense) == len(products)
            biases = _stack_biases([product.bias for product in dense])
            return self.prepare_experts(stack([product.weight for product in dense]), biases, dense[0].weight.dtype)
        packed = [product for product in products if isinstance(product, PackedProduct)]
        assert len(packed) == len(products)
        weights, biases = (
            linear.join([product.packed for product in packed]),
            _stack_biases([each.bias for each in packed]),
        )
        return PackedExpertProduct(weights, biases, partial(self._assign_experts, len(packed)))

    def _assign_experts(self, num_experts: int, ids: Tensor, dtype: torch.dtype) -> experts.Assignment:
        """Sort the tokens of a step by expert. `ids` are the experts chosen for each token.

        Both matrix multiplications of an expert layer use the same result, so tokens are sorted once per layer.
        """
        if self._assigned is None or self._assigned[0] is not ids:
            self._assigned = ids, experts.assign(ids, num_experts, dtype)
        return self._assigned[1]

    def turn(self, attend: Attend, layer: int, heads: Tensor, preparation: NormRopeParams) -> tuple[Tensor, ...]:
        """Rotate query and key heads by their positions (RoPE), and if possible write keys and values to the KV cache.

        If `attend` is a `CachedAttend`, one kernel launch does both, and only the queries are returned.
        """
        if not isinstance(attend, CachedAttend):
            return super().turn(attend, layer, heads, preparation)
        return (attend.cachings[layer].turn(heads, preparation, *attend.kv_cache[layer]),)

    def attend_rotated(self, attend: Attend, layer: int, turned: tuple[Tensor, ...], sinks: Tensor | None) -> Tensor:
        if isinstance(attend, CachedAttend) and len(turned) == 1:
            return attend.attend_cached(layer, *turned, sinks)
        return super().attend_rotated(attend, layer, turned, sinks)


@dataclass(frozen=True, slots=True, eq=False)
class PackedProduct(Product):
    """A matrix multiplication of unrounded inputs with a quantised weight: integer codes or 8-bit floats."""

    packed: linear.PackedWeight
    bias: Tensor | None
    computed: torch.dtype  # dtype in which the model computes
    has_row_lookup = True

    def __call__(self, x: Tensor) -> Tensor:
        return linear.multiply(x, self.packed, self.bias)

    def to_float32(self, x: Tensor, out: Tensor | None) -> Tensor:
        if out is None:
            out = x.new_empty(len(x), self.packed.out_size, dtype=torch.float32)
        return linear.multiply(x, self.packed, self.bias, out)

    def lookup_rows(self, indexes: Tensor) -> Tensor:
        return linear.lookup_rows(self.packed, indexes, self.computed)


@dataclass(frozen=True, slots=True, eq=False)
class PackedExpertProduct:
    """A matrix multiplication of tokens with the quantised weights of the experts chosen for them."""

    packed: linear.PackedWeight
    biases: Tensor | None
    assign: Callable[[Tensor, torch.dtype], experts.Assignment]  # (ids, dtype of the multiplication) -> assignment

    def __call__(self, x: Tensor, ids: Tensor) -> Tensor:
        return linear.multiply_routed(x, self.packed, self.assign(ids, x.dtype), self.biases)


@dataclass(frozen=True, slots=True, eq=False)
class RoundedProduct(Product):
    """A matrix multiplication of an 8-bit weight with inputs that are rounded to the same 8-bit type."""

    weight: scaled.ScaledWeight
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return scaled.multiply(x, self.weight, self.bias)

    def to_float32(self, x: Tensor, out: Tensor | None) -> Tensor:
        values = scaled.multiply(x, self.weight, self.bias, torch.float32)
        return values if out is None else out.copy_(values)


def _state_refusal(listed: OperationList) -> str | None:
    """Return the reason why the Triton kernels cannot compute the states of a model. See `TritonOperations.refusal`."""
    for each in listed:
        if type(each) is Convolve and each.kernel_size not in states.KERNEL_SIZES:
            sizes = f"{states.KERNEL_SIZES[0]} to {states.KERNEL_SIZES[-1]}"
            return f"compute convolutions of size {sizes}, and the model's have size {each.kernel_size}"
        if type(each) is DeltaRule and each.key_dim > states.MAX_KEY_DIM:
            return f"compute delta rules with keys of at most {states.MAX_KEY_DIM} elements, not {each.key_dim}"
        if type(each) is NormalizeGated and each.weight.num_elements > states.MAX_HEAD_DIM:
            return f"normalize gated heads of at most {states.MAX_HEAD_DIM} elements, not {each.weight.num_elements}"
    return None


def _stack_biases(biases: Sequence[Tensor | None]) -> Tensor | None:
    """Stack the biases of all experts to one tensor [num_experts, out_size]. Return None if no expert has a bias."""
    there = [bias for bias in biases if bias is not None]
    return stack(there) if there else None
