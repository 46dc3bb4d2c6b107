"""The operations of a model, which faster code can override."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pagewire.kernels.arguments import HeadPreparation
from pagewire.kernels.experts import multiply_routed, route_tokens, sum_slots
from pagewire.kernels.quantized import quantize
from pagewire.kernels.weight import HeldFormat, HeldWeight
from worker_service.models.rope import rotate

# oneDNN lays a weight out for a number of rows; small batches are where the layout matters.
PACKED_NUM_ROWS = 16
# Where torch multiplies narrower floats to float32, without rounding the sums.
FLOAT32_PRODUCT_DEVICES = ("cuda",)


# attend(layer, query [T, num_heads, head_dim], key and value [T, num_kv_heads, head_dim], the layer's `Scoring.sinks`)
# -> [T, num_heads, head_dim]. Where keys and values are kept, and which tokens belong together, is its own business.
Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor | None], Tensor]
# Such weights of experts, ready to be multiplied with by slots: x, [T, in_size] of tokens or [T * num_chosen, in_size]
# of slots, and the ids [T, num_chosen] of their experts, to slots [T * num_chosen, out_size].
ExpertProduct = Callable[[Tensor, Tensor], Tensor]


class Product(ABC):
    """A weight [out_size, in_size] and its bias, ready to be multiplied with."""

    gives_rows = False  # whether there is `take_rows`

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """x W^T + b: [T, in_size] -> [T, out_size]."""

    def to_float32(self, x: Tensor, out: Tensor | None) -> Tensor:
        """The same, where there is no bias, in float32, not rounded to the model's dtype if that is possible. `out`:
        where to write, dense; None: new memory."""
        values = self(x)
        return values.float() if out is None else out.copy_(values)

    def take_rows(self, indexes: Tensor) -> Tensor:
        """Rows of the weight by their indexes, in the model's dtype: [T] int64 -> [T, in_size]."""
        raise NotImplementedError("this layout is not good for that")


@dataclass(frozen=True, slots=True, eq=False)
class DenseProduct(Product):
    """A product with a weight as it is."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def to_float32(self, x: Tensor, out: Tensor | None) -> Tensor:
        if self.weight.device.type not in FLOAT32_PRODUCT_DEVICES:
            return Product.to_float32(self, x, out)
        if out is None:
            out = x.new_empty(len(x), len(self.weight), dtype=torch.float32)
        return torch.mm(x, self.weight.t(), out_dtype=torch.float32, out=out)


@dataclass(frozen=True, slots=True, eq=False)
class OnednnProduct(Product):
    """A product with a weight in oneDNN's layout."""

    packed: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class Operations:
    """The operations in plain torch, on any device; those in faster code are its subclasses.

    All tensors are of the model's dtype; what is computed in float32 in between is rounded as transformers does.
    """

    route_tokens = staticmethod(route_tokens)
    sum_slots = staticmethod(sum_slots)

    def can_hold(self, held: torch.dtype, computed: torch.dtype) -> bool:
        """Whether a weight may stay in the element `held` of the checkpoint where the model computes in `computed`."""
        return held == computed

    def prepare_product(
        self, weight: HeldWeight, bias: Tensor | None, computed: torch.dtype, *, rounds_inputs: bool = False
    ) -> Product:
        """Lays a weight out for its product, of activations and to outputs of the dtype `computed`, and widens what
        cannot be held to that. `rounds_inputs`: it was made for inputs that are rounded as it is, which may be done."""
        floats = weight.to_floats(computed)
        if not self.packs(computed, floats.device):
            return DenseProduct(floats, bias)
        return OnednnProduct(torch.ops.mkldnn._reorder_linear_weight(floats, PACKED_NUM_ROWS), bias)

    def quantized_bytes(self, stored: HeldFormat, out_size: int, in_size: int) -> int:
        """Estimate the memory that `prepare_product` takes for a weight in a format that is held."""
        return stored.num_bytes(out_size, in_size)

    def quantize(self, values: Tensor, bits: int) -> HeldWeight:
        """Makes codes of 8 or 4 bits of float32 [rows, columns]: see `pagewire.kernels.quantized`."""
        return quantize(values, bits)

    def prepare_experts(self, weights: Tensor, biases: Tensor | None, computed: torch.dtype) -> ExpertProduct:
        """Lays weights [num_experts, out_size, in_size], and biases [num_experts, out_size], out as `prepare_product`
        does. See `multiply_routed` of `pagewire.kernels.experts`."""
        multiply = multiply_routed if weights.device.type == "cpu" else multiply_all
        return lambda x, ids: multiply(x, weights, ids, biases)

    def join_experts(self, products: Sequence[Product]) -> ExpertProduct:
        """The product of experts of which each has one, of a weight with scales, that are needed no more."""
        raise NotImplementedError("weights are widened")

    def packs(self, computed: torch.dtype, device: torch.device) -> bool:
        """Whether `prepare_product` makes a copy of a weight on this device, in a layout of its own."""
        if device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        is_native_bfloat16 = computed == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return computed == torch.float32 or is_native_bfloat16

    def takes_rows(self) -> bool:
        """Whether rows can be taken from such a copy."""
        return False

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x / sqrt(mean(x^2) + eps) in float32, rounded to the dtype of the weight, times that: [T, size] by [size].

        Root mean square normalization (Zhang and Sennrich, 2019, https://arxiv.org/abs/1910.07467).
        """
        # Rounded to the weight's dtype before it is multiplied, as transformers does.
        return (F.rms_norm(x.float(), x.shape[-1:], None, eps).to(weight.dtype) * weight).to(x.dtype)

    def add_rms_norm(self, x: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
        """x += update in place, both [T, size]; returns `rms_norm` of the sum."""
        return self.rms_norm(x.add_(update), weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """silu(gate) * up: [T, 2 * size], gates first, to [T, size]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def turn(self, attend: Attend, layer: int, heads: Tensor, preparation: HeadPreparation) -> tuple[Tensor, ...]:
        """Normalizes each head of queries and keys where it has a weight, and turns it by its position.

        Args:
            attend, layer: of the step, and its layer.
            heads: [T, num_heads + 2 * num_kv_heads, head_dim]: queries, keys, values. May be written to.

        Returns:
            What `attend_turned` takes: queries, [T, num_heads, head_dim], and keys and values, if they are not stored.
        """
        return self.norm_rope(heads, preparation)

    def attend_turned(self, attend: Attend, layer: int, turned: tuple[Tensor, ...], sinks: Tensor | None) -> Tensor:
        """What `attend` gives: [T, num_heads, head_dim]. `sinks`: of the layer; see `Scoring.sinks`."""
        query, key, value = turned
        return attend(layer, query, key, value, sinks)

    def norm_rope(self, heads: Tensor, preparation: HeadPreparation) -> tuple[Tensor, Tensor, Tensor]:
        """Queries [T, num_heads, head_dim], and keys and values [T, num_kv_heads, head_dim], ready to attend."""
        num_heads, query_weight, key_weight, eps, cos, sin = preparation
        num_kv_heads = (heads.shape[1] - num_heads) // 2
        query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        if query_weight is not None:
            query = self.rms_norm(query, query_weight, eps)
        if key_weight is not None:
            key = self.rms_norm(key, key_weight, eps)
        return rotate(query, cos[:, None], sin[:, None]), rotate(key, cos[:, None], sin[:, None]), value


def multiply_all(x: Tensor, weights: Tensor, ids: Tensor, biases: Tensor | None) -> Tensor:
    """As `multiply_routed`, by all experts: which are chosen, a host that captures a graph cannot know."""
    experts = ids.flatten()[:, None]
    slots = x if len(x) == len(experts) else x.repeat_interleave(ids.shape[1], 0)
    outputs = slots.new_zeros(len(slots), weights.shape[1])
    for expert in range(len(weights)):
        bias = None if biases is None else biases[expert]
        outputs = torch.where(experts == expert, F.linear(slots, weights[expert], bias), outputs)
    return outputs
