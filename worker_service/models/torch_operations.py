"""The operations of a model in plain torch. Faster implementations override them."""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from pagewire.kernels.arguments import NormRopeParams
from pagewire.kernels.experts import multiply_routed, route_tokens, sum_slots
from pagewire.kernels.quantized import quantize
from pagewire.kernels.states import apply_delta_rule, convolve, normalize_gated
from pagewire.kernels.weight import StoredFormat, StoredWeight
from worker_service.models.rope import rotate

# oneDNN chooses a weight's layout for a number of rows. The layout matters for small batches.
PACKED_NUM_ROWS = 16
# Devices on which torch multiplies narrower floats to float32 without rounding the sums.
FLOAT32_PRODUCT_DEVICES = ("cuda",)


# attend(layer, query [T, num_heads, head_dim], key and value [T, num_kv_heads, head_dim], the layer's `Scoring.sinks`)
# -> [T, num_heads, head_dim]. The implementation decides where keys and values are stored and which tokens form a
# sequence.
Attend = Callable[[int, Tensor, Tensor, Tensor, Tensor | None], Tensor]
# The prepared weights of all experts. Arguments: x, [T, in_size] for tokens or [T * num_chosen, in_size] for slots, and
# the ids [T, num_chosen] of their experts. Result: slots [T * num_chosen, out_size].
ExpertProduct = Callable[[Tensor, Tensor], Tensor]


class Product(ABC):
    """The weight [out_size, in_size] and the bias of a linear layer, prepared so that activations can be multiplied by
    the weight. Each subclass stores the weight in another memory layout."""

    has_row_lookup = False  # whether `lookup_rows` is implemented

    @abstractmethod
    def __call__(self, x: Tensor) -> Tensor:
        """Return x W^T + b for activations x: [T, in_size] -> [T, out_size]."""

    def to_float32(self, x: Tensor, out: Tensor | None) -> Tensor:
        """Return x W^T + b in float32. If the weight layout permits, the result is not rounded to the model's dtype
        first. The result is written to the dense tensor `out`, or to new memory if `out` is None."""
        values = self(x)
        return values.float() if out is None else out.copy_(values)

    def lookup_rows(self, indexes: Tensor) -> Tensor:
        """Return rows of the weight by index, in the model's dtype: [T] int64 -> [T, in_size]. Raises
        NotImplementedError if this weight layout does not support reading rows."""
        raise NotImplementedError("this weight layout does not support reading rows")


@dataclass(frozen=True, slots=True, eq=False)
class DenseProduct(Product):
    """A weight in torch's ordinary dense layout and its bias, used for matrix multiplication on any device."""

    weight: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)

    def to_float32(self, x: Tensor, out: Tensor | None) -> Tensor:
        if self.weight.device.type not in FLOAT32_PRODUCT_DEVICES:
            return Product.to_float32(self, x, out)
        if out is None:
            out = x.new_empty(len(x), len(self.weight), dtype=torch.float32)
        product = torch.mm(x, self.weight.t(), out_dtype=torch.float32, out=out)
        return product if self.bias is None else product.add_(self.bias)


@dataclass(frozen=True, slots=True, eq=False)
class OnednnProduct(Product):
    """A weight in oneDNN's packed layout and its bias, used for fast matrix multiplication on a CPU."""

    packed: Tensor
    bias: Tensor | None

    def __call__(self, x: Tensor) -> Tensor:
        return torch.ops.mkldnn._linear_pointwise(x, self.packed, self.bias, "none", [], "")


class Operations:
    """The computations of which a model consists (matrix multiplication, normalization, attention and so on), in plain
    torch on any device. Subclasses implement them faster for CPUs and GPUs.

    All tensors have the model's dtype. Intermediate results in float32 are rounded at the same points as in
    transformers.
    """

    route_tokens = staticmethod(route_tokens)
    sum_slots = staticmethod(sum_slots)
    convolve = staticmethod(convolve)
    apply_delta_rule = staticmethod(apply_delta_rule)
    normalize_gated = staticmethod(normalize_gated)

    def can_store(self, held: torch.dtype, computed: torch.dtype) -> bool:
        """Return whether a weight can be kept in the checkpoint's dtype `held` although the model computes in the dtype
        `computed`. If not, the weight must be converted while loading."""
        return held == computed

    def prepare_product(
        self, weight: StoredWeight, bias: Tensor | None, computed: torch.dtype, *, rounds_inputs: bool = False
    ) -> Product:
        """Prepare the weight and the bias of a linear layer for multiplication with activations in the dtype
        `computed`. The outputs have the dtype `computed` too. If the weight's format cannot be kept, the weight is
        converted to `computed`.

        If `rounds_inputs` is true, the checkpoint was made for inputs rounded to 8 bits, so that an implementation may
        round them.
        """
        floats = weight.to_floats(computed)
        if not self.packs(computed, floats.device):
            return DenseProduct(floats, bias)
        return OnednnProduct(torch.ops.mkldnn._reorder_linear_weight(floats, PACKED_NUM_ROWS), bias)

    def quantized_bytes(self, stored: StoredFormat, out_size: int, in_size: int) -> int:
        """Estimate the memory, in bytes, of a weight [out_size, in_size] in the quantised format `stored` after
        `prepare_product`."""
        return stored.num_bytes(out_size, in_size)

    def quantize(self, values: Tensor, bits: int, importance: Tensor | None = None) -> StoredWeight:
        """Quantise float32 values [rows, columns] to codes of 8, 6 or 4 bits. The rounding, the use of the columns'
        `importance` and the errors are those of `pagewire.kernels.quantized.quantize`."""
        return quantize(values, bits, importance)

    def prepare_experts(self, weights: Tensor, biases: Tensor | None, computed: torch.dtype) -> ExpertProduct:
        """Prepare the weights [num_experts, out_size, in_size] and biases [num_experts, out_size] of an expert layer
        for multiplication. The result multiplies each token by the weights of its chosen experts, as
        `pagewire.kernels.experts.multiply_routed` specifies."""
        multiply = multiply_routed if weights.device.type == "cpu" else multiply_all
        return lambda x, ids: multiply(x, weights, ids, biases)

    def join_experts(self, products: Sequence[Product]) -> ExpertProduct:
        """Combine the quantised weights of a layer's experts into one object for the whole layer. Each weight was
        already prepared by `prepare_product`. The given `products` must not be used afterwards. Raises
        NotImplementedError in plain torch, which does not keep quantised weights."""
        raise NotImplementedError("plain torch widens quantised weights")

    def packs(self, computed: torch.dtype, device: torch.device) -> bool:
        """Return whether `prepare_product` copies a weight to another memory layout on this device. If so, both copies
        are in memory for a time while the model is loaded."""
        if device.type != "cpu" or not torch.backends.mkldnn.is_available():
            return False
        is_native_bfloat16 = computed == torch.bfloat16 and torch.ops.mkldnn._is_mkldnn_bf16_supported()
        return computed == torch.float32 or is_native_bfloat16

    def supports_row_lookup(self) -> bool:
        """Return whether rows can be read from a weight after packing. If so, a tied embedding can use the packed LM
        head and needs no copy of the weight."""
        return False

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Return the root mean square normalization of each row of x, [T, size], with the norm weight [size] (Zhang and
        Sennrich, 2019, https://arxiv.org/abs/1910.07467).

        x / sqrt(mean(x^2) + eps) is computed in float32, rounded to the weight's dtype, and multiplied by the weight.
        The result has the dtype of x.
        """
        # Round to the weight's dtype before the multiplication, as transformers does.
        return (F.rms_norm(x.float(), x.shape[-1:], None, eps).to(weight.dtype) * weight).to(x.dtype)

    def add_rms_norm(self, x: Tensor, update: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Add `update` to the residual stream x in place, both [T, size], and return `rms_norm` of the sum."""
        return self.rms_norm(x.add_(update), weight, eps)

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up, the activation of a gated MLP: [T, 2 * size] -> [T, size]. The gates are in the first
        half of each row."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def turn(self, attend: Attend, layer: int, heads: Tensor, preparation: NormRopeParams) -> tuple[Tensor, ...]:
        """Prepare query and key heads for attention: normalize the heads that have a norm weight, and apply rotary
        position embedding.

        `attend` is the attention of the step and `layer` the index of the layer. `heads` [T, num_heads + 2 *
        num_kv_heads, head_dim] contains queries, keys and values, and may be overwritten.

        Returns the input of `attend_rotated`: queries [T, num_heads, head_dim], and keys and values unless they are
        already stored in the KV cache.
        """
        return self.norm_rope(heads, preparation)

    def attend_rotated(self, attend: Attend, layer: int, turned: tuple[Tensor, ...], sinks: Tensor | None) -> Tensor:
        """Compute attention with the result of `turn` and return [T, num_heads, head_dim]. `sinks` are the attention
        sinks of the layer's heads, or None; see `Scoring.sinks`."""
        query, key, value = turned
        return attend(layer, query, key, value, sinks)

    def norm_rope(self, heads: Tensor, preparation: NormRopeParams) -> tuple[Tensor, Tensor, Tensor]:
        """Split `heads` into queries, keys and values, normalize queries and keys if they have a norm weight, and apply
        rotary position embedding. With `rotates_first`, normalize after the rotation. Return queries [T, num_heads,
        head_dim], and keys and values [T, num_kv_heads, head_dim] each."""
        num_heads, query_weight, key_weight, eps, cos, sin, rotates_first = preparation
        num_kv_heads = (heads.shape[1] - num_heads) // 2
        query, key, value = heads.split([num_heads, num_kv_heads, num_kv_heads], dim=1)
        steps: list[Callable[[Tensor, Tensor | None], Tensor]] = [
            lambda x, weight: x if weight is None else self.rms_norm(x, weight, eps),
            lambda x, weight: rotate(x, cos[:, None], sin[:, None]),
        ]
        for step in reversed(steps) if rotates_first else steps:
            query, key = step(query, query_weight), step(key, key_weight)
        return query, key, value


def multiply_all(x: Tensor, weights: Tensor, ids: Tensor, biases: Tensor | None) -> Tensor:
    """Multiply each token by its chosen experts, with the same result as `multiply_routed`. To do so, run every expert
    on all tokens and select the results of the chosen experts. This is slower, but needed on GPUs: while a CUDA graph
    is captured, the host cannot know the chosen experts."""
    experts = ids.flatten()[:, None]
    slots = x if len(x) == len(experts) else x.repeat_interleave(ids.shape[1], 0)
    outputs = slots.new_zeros(len(slots), weights.shape[1])
    for expert in range(len(weights)):
        bias = None if biases is None else biases[expert]
        outputs = torch.where(experts == expert, F.linear(slots, weights[expert], bias), outputs)
    return outputs
