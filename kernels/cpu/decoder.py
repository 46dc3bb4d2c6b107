"""A decoder in one call: what `source/decoder.h` computes, on tensors."""

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from pagewire.kernels.arguments import Scoring
from pagewire.kernels.cache_rows import head_dim_of
from pagewire.kernels.cpu.linear import ELEMENTS, LinearLayer, PackedLinear
from pagewire.kernels.cpu.operations import CpuKernels
from pagewire.kernels.cpu.paged import CACHE_ELEMENTS, PagedRows, cache_step, check

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
        ("head", LinearLayer),
        ("embedding", ctypes.c_void_p),
        ("embedding_element", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("cos", "sin")),
        *((name, ctypes.c_int64) for name in ("num_layers", "hidden_size", "intermediate_size", "cache_element")),
        ("eps", ctypes.c_float),
    )


class _DecoderStep(ctypes.Structure):
    """Mirrors `decoder_step` of source/decoder.h."""

    _fields_ = (
        *((name, ctypes.c_void_p) for name in ("token_ids", "positions", "logit_rows")),
        ("num_logits", ctypes.c_int64),
        *((name, ctypes.c_void_p) for name in ("hidden", "logits", "highest")),
    )


@dataclass(frozen=True, slots=True, eq=False)
class LayerWeights:
    """The weights of one decoder layer. Norms are float32, [hidden_size] or, of heads, [head_dim] or None."""

    attention_norm: Tensor
    query_norm: Tensor | None
    key_norm: Tensor | None
    qkv: PackedLinear
    output: PackedLinear
    mlp_norm: Tensor
    gate_up: PackedLinear
    down: PackedLinear


@dataclass(frozen=True, slots=True, eq=False)
class DecoderWeights:
    """The weights of a decoder with a vocabulary of V tokens, which is computed at P positions at most."""

    embedding: Tensor | None  # [V, hidden_size] of any dtype that kernels know; None: the head's
    cos: Tensor  # [P, head_dim] float32, as `CpuKernels.norm_rope` takes them
    sin: Tensor
    layers: Sequence[LayerWeights]
    norm: Tensor  # [hidden_size] float32
    head: PackedLinear


# The order of source/decoder.h.
PARTS = ("norms", "products", "rotary", "attention", "head")


class DecoderKernel:
    """A decoder (Llama, Mistral, Qwen2, Qwen3) from token ids to logits, computed in float32.

    The cache may be of any dtype that kernels know.
    """

    def __init__(self, kernels: CpuKernels, weights: DecoderWeights, eps: float, num_heads: int) -> None:
        """Raises ValueError if a weight does not fit."""
        layers, norm, embedding = weights.layers, weights.norm, weights.embedding
        self._library = kernels.library
        self._weights = weights
        self._num_heads = num_heads
        self._hidden_size = len(norm)
        self._heads_size = layers[0].qkv.out_size
        for name, table in (("cos", weights.cos), ("sin", weights.sin)):
            check(name, table, torch.float32, tuple(weights.cos.shape))
        check("norm", norm, torch.float32, (self._hidden_size,))
        if embedding is not None:
            dtype = embedding.dtype if embedding.dtype in ELEMENTS else torch.float32
            check("embedding", embedding, dtype, (len(embedding), self._hidden_size))
        self._layers = (_Layer * len(layers))(*map(self._layer, layers))
        self._decoder = _Decoder(
            layers=ctypes.addressof(self._layers),
            norm=norm.data_ptr(),
            head=weights.head.layer(),
            embedding=None if embedding is None else embedding.data_ptr(),
            embedding_element=0 if embedding is None else ELEMENTS[embedding.dtype],
            cos=weights.cos.data_ptr(),
            sin=weights.sin.data_ptr(),
            num_layers=len(layers),
            hidden_size=self._hidden_size,
            intermediate_size=layers[0].down.in_size,
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
        token_ids: Tensor,
        positions: Tensor,
        logit_rows: Tensor,
        rows: PagedRows,
        scorings: Sequence[Scoring],
        kv_cache: Sequence[LayerCache],
    ) -> tuple[Tensor, Tensor, Tensor]:
        """One step through all layers; writes its keys and values to the cache.

        Args:
            token_ids, positions: [T] int64; trusted.
            logit_rows: [R] int64, the tokens that have logits, R at most T; trusted.
            rows: the step's; they hold T tokens.
            scorings: of each layer; all but the window is the first one's.
            kv_cache: of each layer, all of the same dtype, shape and strides.

        Returns:
            Final hidden states [T, hidden_size], logits [R, out_size of the head], and which logit is the highest of
            each row, [R] int64: the first of equals, -1 where there is a NaN.

        Raises:
            ValueError: shapes, strides or dtypes do not fit.
            MemoryError: there is none to compute in.
        """
        num_tokens, num_logits = len(token_ids), len(logit_rows)
        check("token_ids", token_ids, torch.int64, (num_tokens,))
        check("positions", positions, torch.int64, (num_tokens,))
        check("logit_rows", logit_rows, torch.int64, (num_logits,))
        if num_logits > num_tokens:
            raise ValueError(f"{num_logits} of {num_tokens} tokens are to have logits; all can at most")
        if len(rows.slot_mapping) != num_tokens:
            raise ValueError(f"there are {num_tokens} token_ids and {len(rows.slot_mapping)} in rows; they must agree")
        self._use_cache(kv_cache, scorings)
        step = cache_step(rows, scorings[0], num_tokens, self._num_heads, self._heads_size, *kv_cache[0])
        hidden = torch.empty(num_tokens, self._hidden_size)
        logits = torch.empty(num_logits, self._weights.head.out_size)
        highest = torch.empty(num_logits, dtype=torch.int64)
        tokens = _DecoderStep(
            token_ids.data_ptr(),
            positions.data_ptr(),
            logit_rows.data_ptr(),
            num_logits,
            hidden.data_ptr(),
            logits.data_ptr(),
            highest.data_ptr(),
        )
        if self._library.decode(*map(ctypes.addressof, (self._decoder, step, tokens, self._times))):
            raise MemoryError(f"no memory for a step of {num_tokens} tokens")
        return hidden, logits, highest

    def times(self) -> dict[str, int]:
        """Nanoseconds of the last step by part, `PARTS`; the activation is a part of the products."""
        return dict(zip(PARTS, self._times, strict=True))

    def _use_cache(self, kv_cache: Sequence[LayerCache], scorings: Sequence[Scoring]) -> None:
        """Points the layers to a cache. Raises ValueError if its layers differ in dtype, shape or strides."""
        if kv_cache is self._kv_cache:
            return
        first_key, first_value = kv_cache[0]
        self._check_heads(first_key.shape[2], head_dim_of(first_key))
        for layer, scoring, (key, value) in zip(self._layers, scorings, kv_cache, strict=True):
            found = (key.shape, key.stride(), value.shape, value.stride(), key.dtype, value.dtype)
            first = (first_key.shape, first_key.stride(), first_value.shape, first_value.stride())
            if found != (*first, first_key.dtype, first_key.dtype) or key.dtype not in CACHE_ELEMENTS:
                raise ValueError(
                    f"caches of {key.dtype} {tuple(key.shape)} with strides {key.stride()} and of {first_key.dtype} "
                    f"{tuple(first_key.shape)} with strides {first_key.stride()}: all layers have one shape, in one of "
                    f"{', '.join(map(str, CACHE_ELEMENTS))}"
                )
            layer.key_cache, layer.value_cache, layer.window = key.data_ptr(), value.data_ptr(), scoring.window
        self._decoder.cache_element = CACHE_ELEMENTS[first_key.dtype]
        self._kv_cache = kv_cache

    def _check_heads(self, num_kv_heads: int, head_dim: int) -> None:
        """Raises ValueError unless the weights give and take heads of this number and size."""
        check("cos", self._weights.cos, torch.float32, (len(self._weights.cos), head_dim))
        num_all = self._num_heads + 2 * num_kv_heads
        for weights in self._weights.layers:
            sizes = (weights.qkv.out_size, weights.output.in_size)
            if sizes != (num_all * head_dim, self._num_heads * head_dim):
                raise ValueError(
                    f"qkv gives {sizes[0]} and output takes {sizes[1]}; {self._num_heads} query heads and "
                    f"{num_kv_heads} KV heads of {head_dim} need {num_all * head_dim} and {self._num_heads * head_dim}"
                )
            for name, norm in (("query_norm", weights.query_norm), ("key_norm", weights.key_norm)):
                if norm is not None:
                    check(name, norm, torch.float32, (head_dim,))
