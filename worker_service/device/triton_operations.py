"""The operations of a decoder on a GPU: Triton kernels for experts, quantised weights, and between products of floats,
which are cuBLAS's."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch import Tensor

from pagewire.kernels.arguments import HeadPreparation
from pagewire.kernels.triton import experts, fused, linear, scaled
from pagewire.kernels.triton.cache import HEAD_DIMS
from pagewire.kernels.weight import FLOAT8, HeldFormat, HeldWeight
from pagewire.network.operations import Listing, Normalize, QkNormRopeStore
from worker_service.attention.backends.triton import CachedAttend
from worker_service.models.linear import stack
from worker_service.models.torch_operations import Attend, DenseProduct, ExpertProduct, Operations, Product

_MIN_CAPABILITY = {torch.int8: (0, 0), FLOAT8: (8, 9)}  # of a GPU that converts values of an element


class TritonOperations(Operations):
    """A launch each; intermediate results are rounded where `Operations` rounds them."""

    rms_norm = staticmethod(fused.rms_norm)
    add_rms_norm = staticmethod(fused.add_rms_norm)
    silu_mul = staticmethod(fused.silu_mul)
    norm_rope = staticmethod(fused.norm_rope)
    route_tokens = staticmethod(experts.route_tokens)
    sum_slots = staticmethod(experts.sum_slots)

    def __init__(self, device: torch.device) -> None:
        """`device`: where quantised weights go, which are read on the host."""
        self._device = device
        self._assigned: tuple[Tensor, experts.Assignment] | None = None  # the last ids, and what became of them

    @staticmethod
    def refusal(listed: Listing) -> str | None:
        """Why the kernels cannot compute a model, behind "they"; None: they can, or it uses the products alone."""
        turns = [each for each in listed if type(each) is QkNormRopeStore and (each.rope or each.query_norm)]
        norms = [each for each in listed if type(each) is Normalize and not each.is_centered]
        odd = next((turn.heads.head_dim for turn in turns if turn.heads.head_dim not in HEAD_DIMS), None)
        if odd is not None:
            bounds = f"{HEAD_DIMS[0]} to {HEAD_DIMS[-1]} in steps of {HEAD_DIMS.step}"
            return f"turn heads of {bounds}, and the model's are {odd}"
        width = max((norm.weight.num_elements for norm in norms), default=0)
        if width > fused.MAX_NORM_SIZE:
            return f"normalize rows of at most {fused.MAX_NORM_SIZE}, and the model's are {width}"
        return None

    def prepare_product(
        self, weight: HeldWeight, bias: Tensor | None, computed: torch.dtype, *, rounds_inputs: bool = False
    ) -> Product:
        """Inputs are rounded where the weight was made for that, and there is such a product."""
        if weight.scale is None:
            return DenseProduct(weight.to_floats(computed).to(self._device), bias)
        if rounds_inputs and scaled.is_supported(self._device, weight.element):
            packed = scaled.pack(weight, self._device)
            if packed is not None:
                return RoundedProduct(packed, bias)
        return PackedProduct(linear.pack(weight, self._device), bias, computed)

    def can_hold(self, held: torch.dtype, computed: torch.dtype) -> bool:
        """Floats of 8 bits need a GPU that converts them; the interpreter does."""
        if held not in _MIN_CAPABILITY or self._device.type != "cuda":
            return held == computed or held in _MIN_CAPABILITY
        return torch.cuda.get_device_capability(self._device) >= _MIN_CAPABILITY[held]

    def quantized_bytes(self, stored: HeldFormat, out_size: int, in_size: int) -> int:
        return linear.num_bytes(stored, out_size, in_size)

    def packs(self, computed: torch.dtype, device: torch.device) -> bool:
        return False

    def prepare_experts(self, weights: Tensor, biases: Tensor | None, computed: torch.dtype) -> ExpertProduct:
        num_experts = len(weights)
        return lambda x, ids: experts.multiply_routed(x, weights, self._assign(num_experts, ids, x.dtype), biases)

    def join_experts(self, products: Sequence[Product]) -> ExpertProduct:
        """Of one kind: all are packed, or what was to be packed was found to be floats."""
        dense = [product for product in products if isinstance(product, DenseProduct)]
        if dense:
            assert len(dense) == len(products)
            biases = _joined([product.bias for product in dense])
            return self.prepare_experts(stack([product.weight for product in dense]), biases, dense[0].weight.dtype)
        packed = [product for product in products if isinstance(product, PackedProduct)]
        assert len(packed) == len(products)
        weights, biases = linear.join([product.packed for product in packed]), _joined([each.bias for each in packed])
        return PackedExpertProduct(weights, biases, partial(self._assign, len(packed)))

    def _assign(self, num_experts: int, ids: Tensor, dtype: torch.dtype) -> experts.Assignment:
        """Both products of a layer have the same slots, which are sorted once."""
        if self._assigned is None or self._assigned[0] is not ids:
            self._assigned = ids, experts.assign(ids, num_experts, dtype)
        return self._assigned[1]

    def turn(self, attend: Attend, layer: int, heads: Tensor, preparation: HeadPreparation) -> tuple[Tensor, ...]:
        """Where attention lets it, one launch turns the heads and writes keys and values to the cache."""
        if not isinstance(attend, CachedAttend):
            return super().turn(attend, layer, heads, preparation)
        return (attend.caching.turn(heads, preparation, *attend.kv_cache[layer]),)

    def attend_turned(self, attend: Attend, layer: int, turned: tuple[Tensor, ...], sinks: Tensor | None) -> Tensor:
        if isinstance(attend, CachedAttend) and len(turned) == 1:
            return attend.attend_cached(layer, *turned, sinks)
        return super().attend_turned(attend, layer, turned, sinks)


@dataclass(frozen=True, slots=True, eq=False)
class PackedProduct(Product):
    """A product of inputs as they are with codes, or with floats of 8 bits."""

    packed: linear.PackedWeight
    bias: Tensor | None
    computed: torch.dtype  # by the model
    gives_rows = True

    def __call__(self, x: Tensor) -> Tensor:
        return linear.multiply(x, self.packed, self.bias)

    def to_float32(self, x: Tensor, out: Tensor | None) -> Tensor:
        if out is None:
            out = x.new_empty(len(x), self.packed.out_size, dtype=torch.float32)
        return linear.multiply(x, self.packed, self.bias, out)

    def take_rows(self, indexes: Tensor) -> Tensor:
        return linear.take_rows(self.packed, indexes, self.computed)


@dataclass(frozen=True, slots=True, eq=False)
class PackedExpertProduct:
    """Such products of experts with their slots."""

    packed: linear.PackedWeight
    biases: Tensor | None
    assign: Callable[[Tensor, torch.dtype], experts.Assignment]  # ids, for products of a dtype

    def __call__(self, x: Tensor, ids: Tensor) -> Tensor:
        return linear.multiply_routed(x, self.packed, self.assign(ids, x.dtype), self.biases)


@dataclass(frozen=True, slots=True, eq=False)
class RoundedProduct(Product):
    """A product of inputs that are rounded to 8 bits with a weight of 8 bits of the same kind."""

    weight: scaled.ScaledWeight
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return scaled.multiply(x, self.weight, self.bias)

    def to_float32(self, x: Tensor, out: Tensor | None) -> Tensor:
        values = scaled.multiply(x, self.weight, self.bias, torch.float32)
        return values if out is None else out.copy_(values)


def _joined(biases: Sequence[Tensor | None]) -> Tensor | None:
    """[num_experts, out_size]; None: there are none."""
    there = [bias for bias in biases if bias is not None]
    return stack(there) if there else None
