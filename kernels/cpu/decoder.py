"""All layers of a decoder in one call: what `source/decoder.h` computes, on tensors."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from kernels.cpu.linear import ELEMENTS, LinearLayer, PackedLinear
from kernels.cpu.operations import CpuKernels
from kernels.cpu.paged import PagedRows, PagedScoring, cache_step, check

# One layer's (key_cache, value_cache), [num_blocks, block_size, num_kv_heads, head_dim] each.
LayerCache = tuple[Tensor, Tensor]


class _Layer(ctypes.Structure):
    """Mirrors `decoder_layer` of source/decoder.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("attention_norm", "mlp_norm", "query_norm", "key_norm")),
        *((name, LinearLayer) for name in ("qkv", "output", "gate_up", "down")),
        *((name, ctypes.c_void_p) for name in ("key_cache", "value_cache")),
        ("window", ctypes.c_int64),
    )


class _Decoder(ctypes.Structure):
    """Mirrors `decoder` of source/decoder.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("layers", "norm")),
        *((name, ctypes.c_int64) for name in ("num_layers", "hidden_size", "intermediate_size", "cache_element")),
        ("eps", ctypes.c_float),
    )


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """Of one decoder layer. Norms are float32, [hidden_size] or, of heads, [head_dim] or None."""

    attention_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    qkv: PackedLinear
    output: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


# The order of source/decoder.h.
PARTS = ("norms", "products", "rotary", "attention")


class DecoderStack:
    """The layers of a decoder (Llama, Mistral, Qwen2, Qwen3) and the norm after them, computed in float32.

    The cache may be of any dtype that kernels know.
    """

    def __init__(
        self, kernels: CpuKernels, layers: Sequence[LayerWeights], norm: Tensor, eps: float, num_heads: int
    ) -> None:
        """Raises ValueError if a norm does not fit."""
        self._library = kernels.library
        self._weights = tuple(layers)
        self._norm = norm
        self._num_heads = num_heads
        self._hidden_size = len(norm)
        self._heads_size = layers[0].qkv.out_size
        self._layers = (_Layer * len(layers))(*map(self._layer, layers))
        self._decoder = _Decoder(
            ctypes.addressof(self._layers),
            norm.data_ptr(),
            len(layers),
            self._hidden_size,
            layers[0].down.in_size,
            eps=eps,
        )
        self._kv_cache: Sequence[LayerCache] | None = None
        self._times = (ctypes.c_int64 * len(PARTS))()

    def _layer(self, weights: LayerWeights) -> _Layer:
        for name, norm in (("attention_norm", weights.attention_norm), ("mlp_norm", weights.mlp_norm)):
            check(name, norm, torch.float32, (self._hidden_size,))
        pointers = (weights.attention_norm, weights.mlp_norm, weights.query_norm, weights.key_norm)
        products = (weights.qkv, weights.output, weights.gate_up, weights.down)
        return _Layer(
            *(None if tensor is None else tensor.data_ptr() for tensor in pointers),
            *(product.layer() for product in products),
        )

    def forward(
        self,
        x: Tensor,
        cos: Tensor,
        sin: Tensor,
        rows: PagedRows,
        scorings: Sequence[PagedScoring],
        kv_cache: Sequence[LayerCache],
    ) -> Tensor:
        """One step through all layers; writes its keys and values to the cache.

        Args:
            x: [T, hidden_size] embeddings; overwritten.
            cos, sin: [T, head_dim], as `CpuKernels.norm_rope` takes them.
            rows: the step's; they hold T tokens.
            scorings: of each layer; all but the window is the first one's.
            kv_cache: of each layer, all of the same dtype, shape and strides.

        Returns:
            [T, hidden_size], normed.

        Raises:
            ValueError: shapes, strides or dtypes do not fit.
            MemoryError: there is none to compute in.
        """
        num_tokens, head_dim = len(x), kv_cache[0][0].shape[3]
        check("x", x, torch.float32, (num_tokens, self._hidden_size))
        check("cos", cos, torch.float32, (num_tokens, head_dim))
        check("sin", sin, torch.float32, (num_tokens, head_dim))
        if len(rows.slot_mapping) != num_tokens:
            raise ValueError(f"x has {num_tokens} tokens and the rows {len(rows.slot_mapping)}; they must agree")
        self._use_cache(kv_cache, scorings)
        step = cache_step(rows, scorings[0], num_tokens, self._num_heads, self._heads_size, *kv_cache[0])
        hidden = torch.empty_like(x)
        pointers = [tensor.data_ptr() for tensor in (x, cos, sin, hidden)]
        structures = (ctypes.addressof(self._decoder), ctypes.addressof(step))
        if self._library.decode(*structures, *pointers, ctypes.addressof(self._times)):
            raise MemoryError(f"no memory for a step of {num_tokens} tokens")
        return hidden

    def times(self) -> dict[str, int]:
        """Nanoseconds of the last step by part, `PARTS`; the activation is a part of the products."""
        return dict(zip(PARTS, self._times, strict=True))

    def _use_cache(self, kv_cache: Sequence[LayerCache], scorings: Sequence[PagedScoring]) -> None:
        """Points the layers to a cache. Raises ValueError if its layers differ in dtype, shape or strides."""
        if kv_cache is self._kv_cache:
            return
        first_key, first_value = kv_cache[0]
        self._check_heads(*first_key.shape[2:])
        for layer, scoring, (key, value) in zip(self._layers, scorings, kv_cache, strict=True):
            found = (key.shape, key.stride(), value.shape, value.stride(), key.dtype, value.dtype)
            first = (first_key.shape, first_key.stride(), first_value.shape, first_value.stride())
            if found != (*first, first_key.dtype, first_key.dtype) or key.dtype not in ELEMENTS:
                raise ValueError(
                    f"caches of {key.dtype} {tuple(key.shape)} with strides {key.stride()} and of {first_key.dtype} "
                    f"{tuple(first_key.shape)} with strides {first_key.stride()}: all layers have one shape, in one of "
                    f"{', '.join(map(str, ELEMENTS))}"
                )
            layer.key_cache, layer.value_cache, layer.window = key.data_ptr(), value.data_ptr(), scoring.window
        self._decoder.cache_element = ELEMENTS[first_key.dtype]
        self._kv_cache = kv_cache

    def _check_heads(self, num_kv_heads: int, head_dim: int) -> None:
        """Raises ValueError unless the weights give and take heads of this number and size."""
        num_all = self._num_heads + 2 * num_kv_heads
        for weights in self._weights:
            sizes = (weights.qkv.out_size, weights.output.in_size)
            if sizes != (num_all * head_dim, self._num_heads * head_dim):
                raise ValueError(
                    f"qkv gives {sizes[0]} and output takes {sizes[1]}; {self._num_heads} query heads and "
                    f"{num_kv_heads} KV heads of {head_dim} need {num_all * head_dim} and {self._num_heads * head_dim}"
                )
            for name, norm in (("query_norm", weights.query_norm), ("key_norm", weights.key_norm)):
                if norm is not None:
                    check(name, norm, torch.float32, (head_dim,))
