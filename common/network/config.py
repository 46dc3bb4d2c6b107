"""The model that a checkpoint's config.json describes, in one vocabulary for all families."""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from pagewire.common.network.expert_routing import ExpertRouting
from pagewire.common.network.quantization import Quantization

# Far above any model there is: what lies beyond is a mistake, and would be built before memory says so.
MAX_LAYERS = 1 << 12
MAX_EXPERTS = 1 << 10
MAX_SIZE = 1 << 24  # of a vector, a vocabulary, a head count, and of the positions of a sequence

JsonObject = Mapping[str, Any]  # config.json, or an object in it
Activation = Literal["silu", "gelu", "gelu_tanh", "relu", "clamped_swiglu"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding (Su et al., 2021, https://arxiv.org/abs/2104.09864) and how its frequencies are scaled.

    A type uses the fields of its own line and leaves the others alone.
    """

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0  # linear, llama3, yarn
    original_max_position_embeddings: int = 0  # llama3, yarn, and where there are short_divisors
    low_freq_factor: float = 1.0  # llama3
    high_freq_factor: float = 4.0  # llama3
    attention_factor: float = 1.0  # multiplies cos and sin, by any type
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0  # yarn
    truncate: bool = True  # yarn
    divisors: tuple[float, ...] = ()  # [rotary_size / 2] of the frequencies, by any type; none: not divided
    short_divisors: tuple[float, ...] = ()  # in their place where no sequence is longer than the original length
    rotary_share: float = 1.0  # of a head's values, the first of them; the others are left as they are
    is_interleaved: bool = False  # the checkpoint's pairs are neighbours, not elements of two halves

    def rotary_size(self, head_dim: int) -> int:
        """Return how many values of a head are turned."""
        return int(head_dim * self.rotary_share)

    def head_order(self, head_dim: int) -> list[int] | None:
        """Return which value of a checkpoint's head each value of ours is, such that pairs are (i, i + head_dim / 2)
        and those that are turned come first; None: they are so already.

        Queries and keys in one order have the products that they had before.
        """
        size = self.rotary_size(head_dim)
        turned = [*range(0, size, 2), *range(1, size, 2)] if self.is_interleaved else list(range(size))
        if size == head_dim and not self.is_interleaved:
            return None
        middle = (size + head_dim) // 2
        return [*turned[: size // 2], *range(size, middle), *turned[size // 2 :], *range(middle, head_dim)]

    def serving(self, max_model_len: int) -> "RopeConfig":
        """Return what turns sequences that are at most so long. One list of divisors serves all of them, however short
        they are, since a key that is cached was turned before it is known how long its sequence becomes."""
        if not self.short_divisors or max_model_len > self.original_max_position_embeddings:
            return self
        return replace(self, divisors=self.short_divisors, short_divisors=())


@dataclass(frozen=True, slots=True)
class QueryGrowth:
    """Queries grow with their position, by 1 + beta * log(1 + floor(position / num_positions)); Llama 4's attention
    temperature, https://arxiv.org/abs/2501.19399."""

    beta: float
    num_positions: int


@dataclass(frozen=True, slots=True)
class Experts:
    """The MLPs of a layer of which each token goes to a few: see `pagewire.kernels.experts`.

    They are gated, or not, and have the activation, as all MLPs of the model. A router's logits are float32.
    """

    routing: ExpertRouting
    num_experts: int
    intermediate_size: int  # of each
    has_router_bias: bool = False
    has_correction: bool = False  # is added to the router's scores for the routing alone
    bias: bool = False  # of the experts' products
    shared_intermediate_size: int = 0  # of an expert that every token goes to beside them; 0: there is none
    has_shared_gate: bool = False  # what that one gives is multiplied by the sigmoid of a product of the input


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """The shape of a model, and in what it differs from others: a flag for each difference, whichever family has it.

    A layer adds to its input what attention makes of it, then what the MLP makes of that; `is_parallel`: of the same.
    """

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int  # positions the model can tell apart, rope scaling included
    norm_eps: float
    ropes: tuple[RopeConfig | None, ...]  # [num_layers] how heads are turned by their position; None: they are not
    windows: tuple[int, ...]  # [num_layers] positions a query attends to, its own included; 0: all up to its own
    tie_word_embeddings: bool
    dtype: str  # the checkpoint's own; float32 where it names none
    attention_scale: float  # of the products of queries and keys
    quantization: Quantization | None = None  # of the checkpoint's weights
    num_further_layers: int = 0  # that the checkpoint has behind the last one, to predict further tokens; left alone
    has_position_embedding: bool = False  # one that is learnt is added to that of tokens
    alibi_slopes: tuple[float, ...] = ()  # [num_heads], see `Scoring.alibi_slopes`; none: scores fall by no distance
    # Norms
    norm: Literal["rms", "layer"] = "rms"
    norm_bias: bool = False
    embedding_norm: bool = False  # of what the embeddings give
    norm_adds_one: bool = False  # norms multiply by 1 + weight, in float32; those of heads too
    pre_norm: bool = True  # of what attention and the MLP read
    post_norm: bool = False  # of what they add
    qk_norm: Literal["none", "head", "projection"] = "none"  # RMS norm of queries and keys: each head, or all of them
    # Attention and MLP
    is_parallel: bool = False  # the MLP reads what attention reads
    qkv_bias: bool = False
    qkv_by_head: bool = False  # the checkpoint has the rows of each head's query, key and value together
    qkv_limit: float = 0.0  # of queries, keys and values, behind norms of projections, on both sides; 0: there is none
    has_sinks: bool = False  # see `Scoring.sinks`
    output_bias: bool = False  # of attention's output projection
    attention_softcap: float = 0.0  # scores are bounded to softcap * tanh(score / softcap); 0: they are not
    query_growth: QueryGrowth | None = None
    is_gated: bool = True  # the MLP's activation multiplies a second product
    activation: Activation = "silu"
    swiglu_alpha: float = 1.0  # see `clamped_swiglu`
    swiglu_limit: float = 0.0  # the same
    mlp_bias: bool = False
    experts: Experts | None = None
    expert_layers: tuple[bool, ...] = ()  # [num_layers] whether experts stand in place of the MLP, where there are any
    # Factors
    embedding_multiplier: float = 1.0
    residual_multiplier: float = 1.0  # of what attention and the MLP add
    logits_multiplier: float = 1.0
    logits_softcap: float = 0.0  # as that of attention

    @property
    def sliding_window(self) -> int:
        """Positions that any layer attends to from a query, its own included; 0: all up to its own."""
        return max(self.windows) if all(self.windows) else 0

    def has_experts(self, layer: int) -> bool:
        return self.experts is not None and self.expert_layers[layer]

    @property
    def rope(self) -> RopeConfig | None:
        """That of the first layer that has one; None: there is none."""
        return next((rope for rope in self.ropes if rope is not None), None)

    def serving(self, max_model_len: int | None) -> "ModelConfig":
        """Return the model where no sequence is longer than that, or than its positions."""
        served = self.max_position_embeddings if max_model_len is None else max_model_len
        return replace(self, ropes=tuple(rope and rope.serving(served) for rope in self.ropes))
