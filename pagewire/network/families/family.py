"""What a family is: the architectures it serves, and how their config.json becomes a model.

`TextConfig` reads what most families spell as Llama does, and has the blocks of such a model ready to be composed.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from pagewire.network.blocks import Attention, Experts, Mlp, Norm, activation, embed, layer, lm_head
from pagewire.network.expert_routing import ExpertRouting
from pagewire.network.families.positions import Ropes, read_no_windows, read_rope
from pagewire.network.families.reading import (
    MAX_EXPERTS,
    NUM_EXPERTS,
    JsonObject,
    check_names,
    choice,
    dtype,
    first_key,
    flag,
    json_object,
    num_layers_of,
    number,
    positive,
    read_activation,
    split_evenly,
    unserved,
)
from pagewire.network.network import Network
from pagewire.network.operations import Activate, Activation, AttentionHeads, Operation
from pagewire.network.quantization import Quantization, parse_quantization
from pagewire.network.rewrites import Renaming
from pagewire.network.rope import RopeConfig
from pagewire.network.stacks import STACKS, Stacks

# Published files lack the first part of names where they hold no head.
WITHOUT_PREFIX: Renaming = ((r"^model\.", ""),)
_UNREAD = r"^(model\.)?(vision_tower|multi_modal_projector)\."  # of multimodal checkpoints
# Of the whole checkpoint, if its config.json says them there.
_OUTER = ("dtype", "torch_dtype", "quantization_config")


@dataclass(frozen=True, slots=True)
class Family:
    """Models that config.json and checkpoints describe in the same words."""

    architectures: tuple[str, ...]
    read: Callable[[JsonObject, str], Network]  # of config.json and the architecture
    ignored: str = r"\.rotary_emb\.inv_freq$"  # pattern of checkpoint names that hold no weights
    # What checkpoints may do with the names of `read`: that by which the most are there is taken.
    renamings: tuple[Renaming, ...] = ((), WITHOUT_PREFIX)
    # Tensors that may be there of all experts, whose parts have names of their own.
    stacks: Stacks = field(default_factory=lambda: STACKS)
    defaults: JsonObject = field(default_factory=dict)  # what files may leave out
    length_key: str = "max_position_embeddings"  # of the greatest length
    default_rope: JsonObject = field(default_factory=dict)  # the rope_parameters of files that say nothing of them

    def parse(self, config: JsonObject, architecture: str) -> Network:
        """Return the model that the contents of a config.json describe."""
        has_rope = config.get("rope_parameters") is not None or config.get("rope_scaling")
        rope = {} if has_rope or not self.default_rope else {"rope_parameters": self.default_rope}
        return self.read({**self.defaults, **config, **rope}, architecture)


def inside(family: Family, architecture: str, model_types: tuple[str, ...]) -> Family:
    """Return the family of multimodal checkpoints that hold a model of another in their text_config, which is of one of
    these types. Published files and those of transformers 5 name its weights differently."""
    return replace(
        family,
        architectures=(architecture,),
        read=lambda config, name: family.parse(_text_config(config, model_types), name),
        ignored=rf"{_UNREAD}|{family.ignored}",
        renamings=(((r"^", "language_model."),), ((r"^model\.", "model.language_model."),)),
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


@dataclass(frozen=True, slots=True)
class TextConfig:
    """What most families' config.json says of a model."""

    config: JsonObject
    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    num_positions: int
    norm_eps: float
    ropes: tuple[RopeConfig | None, ...]  # [num_layers] how heads are turned by their position; None: they are not
    windows: tuple[int, ...]  # [num_layers] see `AttentionHeads`
    activation: Activation
    tie_word_embeddings: bool
    dtype: str
    quantization: Quantization | None

    @staticmethod
    def read(
        config: JsonObject,
        architecture: str,
        *,
        ropes: Ropes | None = None,
        windows: tuple[int, ...] | None = None,
        eps_key: str = "rms_norm_eps",
        default_eps: float = 1e-6,
        activation_key: str = "hidden_act",
        activations: tuple[str, ...] = ("silu",),
    ) -> "TextConfig":
        """Read what most families spell as Llama does.

        Args:
            ropes: by default one for all layers, which turns whole heads.
            windows: of the layers; by default there are none.
            activations: that are served, the default first.
        """
        num_heads, head_dim = positive(config, "num_attention_heads"), head_dim_of(config)
        of_layers, num_positions = ropes or read_rope(config)
        return TextConfig(
            config=config,
            architecture=architecture,
            num_layers=num_layers_of(config),
            hidden_size=positive(config, "hidden_size"),
            intermediate_size=positive(config, "intermediate_size"),
            num_heads=num_heads,
            num_kv_heads=positive(config, "num_key_value_heads", num_heads),
            head_dim=head_dim,
            vocab_size=positive(config, "vocab_size"),
            num_positions=num_positions,
            norm_eps=number(config, eps_key, default_eps),
            ropes=of_layers,
            windows=read_no_windows(config, architecture) if windows is None else windows,
            activation=read_activation(config, activation_key, activations[0], activations),
            tie_word_embeddings=flag(config, "tie_word_embeddings", False),
            dtype=dtype(config),
            quantization=parse_quantization(config),
        )

    def norm(self, **how: bool) -> Norm:
        """Return the norms over hidden states."""
        return Norm(self.hidden_size, self.norm_eps, **how)

    def heads(
        self, layer: int, scale: float | None = None, softcap: float = 0.0, slopes: tuple[float, ...] = ()
    ) -> AttentionHeads:
        """Return the heads of a layer. `scale`: by default by the length of heads."""
        scale = self.head_dim**-0.5 if scale is None else scale
        window = self.windows[layer]
        return AttentionHeads(self.num_heads, self.num_kv_heads, self.head_dim, scale, window, softcap, slopes)

    def attention(self, layer: int, heads: AttentionHeads | None = None, **how: Any) -> Attention:
        """Return the attention of a layer. `how`: other fields of `Attention`."""
        heads, rope = heads or self.heads(layer), self.ropes[layer]
        return Attention(layer, self.hidden_size, heads, rope, self.num_positions, norm_eps=self.norm_eps, **how)

    def mlp(self, size: int | None = None, **how: Any) -> Mlp:
        """Return an MLP, by default that of dense layers, gated. `how`: other fields of `Mlp`."""
        how = {"activation": activation(self.activation), **how}
        return Mlp(self.hidden_size, size or self.intermediate_size, **how)

    def experts(
        self,
        num_key: str = "num_experts",
        intermediate_key: str = "moe_intermediate_size",
        act: Activate | None = None,
        *,
        has_bias: bool = False,
        **routing: Any,
    ) -> Experts:
        """Read experts of which num_experts_per_tok are chosen.

        Args:
            num_key, intermediate_key: where config.json says how many experts there are, and of what size.
            act: by default the model's, gated.
            routing: fields of `ExpertRouting`.
        """
        num_experts, chosen = read_routing(self.config, num_key, **routing)
        size, act = positive(self.config, intermediate_key), act or activation(self.activation)
        mlp = self.mlp(size, activation=act, has_bias=has_bias, counted="columns of an expert")
        return Experts(chosen, num_experts, mlp)

    def network(self, operations: Iterator[Operation], ignored: str = "") -> Network:
        """Return the model of these operations."""
        return Network(
            self.architecture,
            tuple(operations),
            self.num_positions,
            self.tie_word_embeddings,
            self.dtype,
            self.quantization,
            ignored,
        )

    def model(
        self,
        norm: Norm,
        layers: Callable[[int, str], Iterator[Operation]],
        *,
        embedding_factor: float = 1.0,
        logits_factor: float = 1.0,
        softcap: float = 0.0,
        ignored: str = "",
    ) -> Network:
        """Return a model of layers by their numbers and names, in Llama's names around them."""

        def operations() -> Iterator[Operation]:
            yield embed("model.embed_tokens", self.vocab_size, self.hidden_size, embedding_factor)
            for at in range(self.num_layers):
                yield from layers(at, f"model.layers.{at}")
            yield norm("model.norm")
            yield lm_head("lm_head", self.hidden_size, self.vocab_size, logits_factor, softcap)

        return self.network(operations(), ignored)

    def llama(
        self,
        mlp: Callable[[int, str], Iterator[Operation]] | None = None,
        *,
        has_mlp_bias: bool = False,
        ignored: str = "",
        **how: Any,
    ) -> Network:
        """Return a model of Llama's layers in Llama's names.

        Args:
            mlp: of a layer by its number and name, where it is another than Llama's.
            how: fields of `Attention`.
        """
        norm, dense = self.norm(), self.mlp(has_bias=has_mlp_bias)

        def layers(number: int, name: str) -> Iterator[Operation]:
            attention = self.attention(number, **how)(f"{name}.self_attn")
            yield from layer(norm, norms_of(name), attention, mlp(number, name) if mlp else dense(f"{name}.mlp"))

        return self.model(norm, layers, ignored=ignored)


def norms_of(layer: str) -> tuple[str, str]:
    """Return the names of the norms before attention and MLP, as Llama has them."""
    return f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"


def head_dim_of(config: JsonObject) -> int:
    """As config.json says, else the hidden size shared out among the heads."""
    if config.get("head_dim") is not None:
        return positive(config, "head_dim")
    return split_evenly("hidden_size", positive(config, "hidden_size"), positive(config, "num_attention_heads"))


def read_routing(config: JsonObject, num_key: str, **fields: Any) -> tuple[int, ExpertRouting]:
    """Read how many experts there are, and how num_experts_per_tok of them are chosen.

    `fields`: others of `ExpertRouting`.
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
    return num_experts, ExpertRouting(num_chosen, **fields)
