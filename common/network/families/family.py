"""What a family is: the architectures it serves, how their config.json is read, and the names of their weights."""

import re
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from dataclasses import fields as dataclass_fields
from enum import Enum
from typing import Any, Literal

from pagewire.common.network.config import MAX_EXPERTS, Experts, JsonObject, ModelConfig
from pagewire.common.network.expert_routing import ExpertRouting
from pagewire.common.network.families.positions import Ropes, read_no_windows, read_rope
from pagewire.common.network.families.reading import (
    NUM_EXPERTS,
    activation,
    check_names,
    choice,
    dtype,
    first_key,
    flag,
    json_object,
    num_layers_of,
    number,
    positive,
    split_evenly,
    unserved,
)
from pagewire.common.network.quantization import parse_quantization
from pagewire.common.network.stacks import STACKS, Stacks

_UNREAD = r"^(model\.)?(vision_tower|multi_modal_projector)\."  # of multimodal checkpoints
# Of the whole checkpoint, if its config.json says them there.
_OUTER = ("dtype", "torch_dtype", "quantization_config")


class Split(Enum):
    """The kinds of dimensions of a weight that ranks share out, by what they count."""

    HEADS = "heads"
    KV_HEADS = "KV heads"
    INTERMEDIATE = "intermediate size"
    EXPERT_INTERMEDIATE = "intermediate size of experts"
    SHARED_INTERMEDIATE = "intermediate size of the shared expert"
    QKV_BY_HEAD = "heads with their keys and values"
    HEAD_VALUES = "a value of each head"
    VOCABULARY = "vocabulary"


@dataclass(frozen=True, slots=True)
class Weight:
    """The place in the model of a checkpoint module's weight, and of its bias if there is one. `{layer}` and `{expert}`
    count from 0."""

    source: str  # module in the checkpoint
    target: str  # module of the model
    part: int | None = None  # which projection of a merged `Linear`
    is_transposed: bool = False  # the checkpoint holds [in, out]
    # What ranks share out, and whether that is the outputs (0) or the inputs (1) of the module. Projections that the
    # checkpoint holds as one weight are shared out one by one, by a split each where these differ. None: whole on every
    # rank.
    split: Split | tuple[Split, ...] | None = None
    axis: int = 0
    layers: Literal["all", "dense", "experts"] = "all"  # which layers have it: those with an MLP, or with experts


@dataclass(frozen=True, slots=True)
class Family:
    """Models that config.json and checkpoints describe in the same words."""

    architectures: tuple[str, ...]
    read: Callable[[JsonObject, str], ModelConfig]  # of config.json and the architecture
    weights: tuple[Weight, ...]
    ignored: str = r"\.rotary_emb\.inv_freq$"  # pattern of checkpoint names that hold no weights
    optional_prefix: str = "model."  # of checkpoint names; published files lack it where they hold no head
    # Tensors that may be there of all experts, whose parts have the names of `weights`.
    stacks: Stacks = field(default_factory=lambda: STACKS)
    alternatives: tuple[tuple[Weight, ...], ...] = ()  # to `weights`, of which the one that names most is taken
    defaults: JsonObject = field(default_factory=dict)  # what files may leave out
    length_key: str = "max_position_embeddings"  # of the greatest length
    default_rope: JsonObject = field(default_factory=dict)  # the rope_parameters of files that say nothing of them

    def parse(self, config: JsonObject, architecture: str) -> ModelConfig:
        """Return the model that the contents of a config.json describe."""
        has_rope = config.get("rope_parameters") is not None or config.get("rope_scaling")
        rope = {} if has_rope or not self.default_rope else {"rope_parameters": self.default_rope}
        return self.read({**self.defaults, **config, **rope}, architecture)


# The names of Llama's weights, which most families have.
LAYER, OURS = "model.layers.{layer}", "layers.{layer}"
EMBEDDING = Weight("model.embed_tokens", "embedding")
QKV = (
    Weight(f"{LAYER}.self_attn.q_proj", f"{OURS}.attention.qkv", part=0, split=Split.HEADS),
    Weight(f"{LAYER}.self_attn.k_proj", f"{OURS}.attention.qkv", part=1, split=Split.KV_HEADS),
    Weight(f"{LAYER}.self_attn.v_proj", f"{OURS}.attention.qkv", part=2, split=Split.KV_HEADS),
)
HEAD_NORMS = (
    Weight(f"{LAYER}.self_attn.q_norm", f"{OURS}.attention.query_norm"),
    Weight(f"{LAYER}.self_attn.k_norm", f"{OURS}.attention.key_norm"),
)
ATTENTION_OUTPUT = Weight(f"{LAYER}.self_attn.o_proj", f"{OURS}.attention.output", split=Split.HEADS, axis=1)
GATED_MLP = (
    Weight(f"{LAYER}.mlp.gate_proj", f"{OURS}.mlp.up", part=0, split=Split.INTERMEDIATE),
    Weight(f"{LAYER}.mlp.up_proj", f"{OURS}.mlp.up", part=1, split=Split.INTERMEDIATE),
)
MERGED_MLP = (Weight(f"{LAYER}.mlp.gate_up_proj", f"{OURS}.mlp.up", split=Split.INTERMEDIATE),)
MLP_OUTPUT = Weight(f"{LAYER}.mlp.down_proj", f"{OURS}.mlp.down", split=Split.INTERMEDIATE, axis=1)
PRE_NORMS = (
    Weight(f"{LAYER}.input_layernorm", f"{OURS}.attention_norm"),
    Weight(f"{LAYER}.post_attention_layernorm", f"{OURS}.mlp_norm"),
)
HEAD = (Weight("model.norm", "norm"), Weight("lm_head", "head", split=Split.VOCABULARY))
LLAMA_WEIGHTS = (EMBEDDING, *PRE_NORMS, *QKV, ATTENTION_OUTPUT, *GATED_MLP, MLP_OUTPUT, *HEAD)


# Experts, in the names of most families.
_EXPERTS = f"{LAYER}.mlp.experts.{{expert}}"
ROUTER = Weight(f"{LAYER}.mlp.gate", f"{OURS}.mlp.router", layers="experts")
EXPERTS = (
    Weight(f"{_EXPERTS}.gate_proj", f"{OURS}.mlp.up.{{expert}}", 0, split=Split.EXPERT_INTERMEDIATE, layers="experts"),
    Weight(f"{_EXPERTS}.up_proj", f"{OURS}.mlp.up.{{expert}}", 1, split=Split.EXPERT_INTERMEDIATE, layers="experts"),
    Weight(
        f"{_EXPERTS}.down_proj",
        f"{OURS}.mlp.down.{{expert}}",
        split=Split.EXPERT_INTERMEDIATE,
        axis=1,
        layers="experts",
    ),
)


def shared_expert(source: str) -> tuple[Weight, ...]:
    """The weights of an expert that every token goes to. `source`: its name in the MLP."""
    return tuple(
        replace(
            weight,
            source=weight.source.replace(".mlp.", f".mlp.{source}."),
            target=weight.target.replace(".mlp.", ".mlp.shared."),
            split=Split.SHARED_INTERMEDIATE,
            layers="experts",
        )
        for weight in (*GATED_MLP, MLP_OUTPUT)
    )


def in_dense_layers(weights: tuple[Weight, ...]) -> tuple[Weight, ...]:
    return tuple(replace(weight, layers="dense") for weight in weights)


def head_dim_of(config: JsonObject) -> int:
    """As config.json says, else the hidden size shared out among the heads."""
    if config.get("head_dim") is not None:
        return positive(config, "head_dim")
    return split_evenly("hidden_size", positive(config, "hidden_size"), positive(config, "num_attention_heads"))


def read_experts(
    config: JsonObject,
    num_key: str = "num_experts",
    intermediate_key: str = "moe_intermediate_size",
    **fields: Any,
) -> Experts:
    """Read experts of which num_experts_per_tok are chosen.

    Args:
        num_key, intermediate_key: where config.json says how many experts there are, and of what size.
        fields: of `Experts`, and of its choice.
    """
    num_key = first_key(config, num_key, *NUM_EXPERTS)
    num_experts = positive(config, num_key, limit=MAX_EXPERTS)
    num_chosen = positive(config, "num_experts_per_tok", limit=MAX_EXPERTS)
    if num_chosen > num_experts:
        raise unserved("num_experts_per_tok", num_chosen, f"at most {num_key}, {num_experts}")
    num_groups, num_chosen_groups = fields.get("num_groups", 1), fields.get("num_chosen_groups", 1)
    if num_experts % num_groups:
        raise unserved(num_key, num_experts, f"a multiple of n_group, {num_groups}")
    num_eligible = num_experts // num_groups * num_chosen_groups
    if num_chosen_groups > num_groups or num_chosen > num_eligible:
        raise unserved(
            "topk_group", num_chosen_groups, f"at most n_group, {num_groups}, with {num_chosen} experts at least"
        )
    of_routing = {
        field.name: fields.pop(field.name) for field in dataclass_fields(ExpertRouting) if field.name in fields
    }
    return Experts(ExpertRouting(num_chosen, **of_routing), num_experts, positive(config, intermediate_key), **fields)


def read_decoder(
    config: JsonObject,
    architecture: str,
    *,
    ropes: Ropes | None = None,
    windows: tuple[int, ...] | None = None,
    eps_key: str = "rms_norm_eps",
    default_eps: float = 1e-6,
    activation_key: str = "hidden_act",
    activations: tuple[str, ...] = ("silu",),
    **flags: Any,
) -> ModelConfig:
    """Read what most families spell as Llama does.

    Args:
        ropes: by default one for all layers, which turns whole heads.
        windows: of the layers; by default there are none.
        activations: that are served, the default first.
        flags: fields of `ModelConfig` that this family sets.
    """
    num_heads, head_dim = positive(config, "num_attention_heads"), head_dim_of(config)
    of_layers, num_positions = ropes or read_rope(config)
    return ModelConfig(
        architecture=architecture,
        num_layers=num_layers_of(config),
        hidden_size=positive(config, "hidden_size"),
        intermediate_size=positive(config, "intermediate_size"),
        num_heads=num_heads,
        num_kv_heads=positive(config, "num_key_value_heads", num_heads),
        head_dim=head_dim,
        vocab_size=positive(config, "vocab_size"),
        max_position_embeddings=num_positions,
        norm_eps=number(config, eps_key, default_eps),
        ropes=of_layers,
        windows=read_no_windows(config, architecture) if windows is None else windows,
        tie_word_embeddings=flag(config, "tie_word_embeddings", False),
        dtype=dtype(config),
        quantization=parse_quantization(config),
        activation=activation(config, activation_key, activations[0], activations),
        **{"attention_scale": head_dim**-0.5, **flags},
    )


def inside(family: Family, architecture: str, model_types: tuple[str, ...]) -> Family:
    """Return the family of multimodal checkpoints that hold a model of another in their text_config, which is of one of
    these types. Published files and those of transformers 5 name its weights differently."""
    published = tuple(replace(weight, source=f"language_model.{weight.source}") for weight in family.weights)
    renamed = tuple(
        replace(weight, source=re.sub(r"^model\.", "model.language_model.", weight.source)) for weight in family.weights
    )
    return replace(
        family,
        architectures=(architecture,),
        read=lambda config, name: family.parse(_text_config(config, model_types), name),
        weights=published,
        ignored=rf"{_UNREAD}|{family.ignored}",
        alternatives=(renamed,),
    )


def _text_config(config: JsonObject, model_types: tuple[str, ...]) -> JsonObject:
    text = json_object(config, "text_config")
    if not text:
        raise unserved("text_config", config.get("text_config"), "an object that describes the text model")
    check_names(text)
    choice(text, "model_type", model_types[0], model_types)
    outer = {key: config[key] for key in _OUTER if config.get(key) is not None}
    # Whether weights are tied is a matter of the whole.
    return {**text, **outer, "tie_word_embeddings": config.get("tie_word_embeddings", True)}
