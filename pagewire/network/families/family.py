"""A family of models: its architectures, and how its config.json becomes a list of operations.

`TextConfig` reads the settings that most families name as Llama does, and provides the blocks of such a model.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from pagewire.network.blocks import Attention, Experts, Mlp, Norm, activation, embed, layer, lm_head
from pagewire.network.expert_routing import ExpertRouting
from pagewire.network.families.positions import Ropes, read_no_windows, read_rope
from pagewire.network.families.reading import (
    MAX_EXPERTS,
    NUM_CHOSEN,
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
from pagewire.network.quantization import parse_quantization
from pagewire.network.rewrites import Renaming
from pagewire.network.rope import RopeConfig
from pagewire.network.stacks import STACKS, Stacks
from pagewire.network.weight_formats import Quantization

# Some published files of headless models lack the first part of the names.
WITHOUT_PREFIX: Renaming = ((r"^model\.", ""),)
# Settings of the whole checkpoint that override the text model's settings.
_OUTER = ("dtype", "torch_dtype", "quantization_config")


@dataclass(frozen=True, slots=True)
class Family:
    """A group of model architectures whose config.json files and checkpoints use the same names. A family knows how to
    read such a config.json into a `Network`."""

    architectures: tuple[str, ...]
    read: Callable[[JsonObject, str], Network]  # reads a config.json for one of the architectures
    ignored: str = r"\.rotary_emb\.inv_freq$"  # pattern of the names of tensors in a layer that are no weights
    # Alternative names of the weights that `read` names. The renaming that matches the most tensors is used.
    renamings: tuple[Renaming, ...] = ((), WITHOUT_PREFIX)
    # Tensors that may contain the weights of all experts; each expert's part gets a name of its own.
    stacks: Stacks = field(default_factory=lambda: STACKS)
    defaults: JsonObject = field(default_factory=dict)  # values of settings that files may omit
    length_key: str = "max_position_embeddings"  # the key of the maximum length
    model_type: str = ""  # for files without architectures, if the architecture's name does not contain it
    # The rope_parameters to assume if a file has no rope settings.
    default_rope: JsonObject = field(default_factory=dict)

    def parse(self, config: JsonObject, architecture: str) -> Network:
        """Return the model that the contents of a config.json describe. Settings that the file omits get the family's
        defaults."""
        has_rope = config.get("rope_parameters") is not None or config.get("rope_scaling")
        rope = {} if has_rope or not self.default_rope else {"rope_parameters": self.default_rope}
        return self.read({**self.defaults, **config, **rope}, architecture)


def inside(
    family: Family, architecture: str, model_types: tuple[str, ...], *, is_tied: bool = True, is_flat: bool = False
) -> Family:
    """Return the family of multimodal checkpoints that contain a language model of `family`. The setting `text_config`
    of config.json describes the language model, and `model_types` has the accepted values of its model_type. The weight
    names in published files differ from the names that transformers 5 writes, so both forms are supported.

    Args:
        is_tied: whether the weights are tied if config.json does not say so.
        is_flat: config.json may describe the language model at the top level, and weights may have its own names.
    """
    renamings: tuple[Renaming, ...] = (((r"^", "language_model."),), ((r"^model\.", "model.language_model."),))
    return replace(
        family,
        architectures=(architecture,),
        read=lambda config, name: family.parse(_text_config(config, model_types, is_tied, is_flat), name),
        renamings=(*renamings, ()) if is_flat else renamings,
    )


def _text_config(config: JsonObject, model_types: tuple[str, ...], is_tied: bool, is_flat: bool) -> JsonObject:
    text = json_object(config, "text_config") or (config if is_flat else {})
    if not text:
        raise unserved("text_config", config.get("text_config"), "an object that describes the text model")
    check_names(text)
    choice(text, "model_type", model_types[0], model_types)
    outer = {key: config[key] for key in _OUTER if config.get(key) is not None}
    # The whole model's setting decides whether weights are tied.
    return {**text, **outer, "tie_word_embeddings": config.get("tie_word_embeddings", is_tied)}


@dataclass(frozen=True, slots=True)
class TextConfig:
    """The settings of a language model that most families store in config.json, such as the hidden size and the number
    of layers. The methods return the building blocks of such a model."""

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
    ropes: tuple[RopeConfig | None, ...]  # [num_layers] the rotary embedding of each layer; None: heads are not rotated
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
        """Read the settings that most families name as Llama does.

        `ropes` are the rotary embeddings of the layers; by default one setting for all layers, which rotates whole
        heads. `windows` are the sliding windows of the layers; by default no windows. `eps_key` and `default_eps` are
        the key and the default of the epsilon of norms. `activation_key` is the key of the activation, and
        `activations` are the supported values, with the default first.
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
        """Return the settings of the model's norms over hidden states. The keyword arguments `how` set other fields of
        `Norm`."""
        return Norm(self.hidden_size, self.norm_eps, **how)

    def heads(
        self, layer: int, scale: float | None = None, softcap: float = 0.0, slopes: tuple[float, ...] = ()
    ) -> AttentionHeads:
        """Return the attention heads of a layer. `scale` multiplies the attention scores, and is head_dim ** -0.5 by
        default."""
        scale = self.head_dim**-0.5 if scale is None else scale
        window = self.windows[layer]
        return AttentionHeads(self.num_heads, self.num_kv_heads, self.head_dim, scale, window, softcap, slopes)

    def attention(self, layer: int, heads: AttentionHeads | None = None, **how: Any) -> Attention:
        """Return the attention block of a layer. The keyword arguments `how` set other fields of `Attention`."""
        heads, rope = heads or self.heads(layer), self.ropes[layer]
        return Attention(layer, self.hidden_size, heads, rope, self.num_positions, norm_eps=self.norm_eps, **how)

    def mlp(self, size: int | None = None, **how: Any) -> Mlp:
        """Return an MLP block. By default, this is the gated MLP of dense layers. The keyword arguments `how` set other
        fields of `Mlp`."""
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
        """Read the mixture-of-experts block of a layer from config.json. Each token uses num_experts_per_tok experts.

        Args:
            num_key, intermediate_key: the keys in config.json for the number of experts and their intermediate size.
            act: the activation; by default the model's activation, gated.
            has_bias: the experts' projections have biases.
            routing: other fields of `ExpertRouting`.
        """
        num_experts, chosen = read_routing(self.config, num_key, **routing)
        size, act = positive(self.config, intermediate_key), act or activation(self.activation)
        mlp = self.mlp(size, activation=act, has_bias=has_bias, counted="columns of an expert")
        return Experts(chosen, num_experts, mlp)

    def network(self, operations: Iterator[Operation], **how: Any) -> Network:
        """Return the complete model, which consists of `operations`. The keyword arguments `how` set other fields of
        `Network`."""
        return Network(
            self.architecture,
            tuple(operations),
            self.num_positions,
            self.tie_word_embeddings,
            self.dtype,
            self.quantization,
            **how,
        )

    def model(
        self,
        norm: Norm,
        layers: Callable[[int, str], Iterator[Operation]],
        *,
        embedding_factor: float = 1.0,
        logits_factor: float = 1.0,
        softcap: float = 0.0,
        head_bias: bool = False,
    ) -> Network:
        """Return a model that consists of a token embedding, transformer layers, a final norm and an LM head, with
        Llama's weight names. `layers` yields the operations of a layer, given its number and name."""

        def operations() -> Iterator[Operation]:
            yield embed("model.embed_tokens", self.vocab_size, self.hidden_size, embedding_factor)
            for at in range(self.num_layers):
                yield from layers(at, f"model.layers.{at}")
            yield norm("model.norm")
            yield lm_head("lm_head", self.hidden_size, self.vocab_size, logits_factor, softcap, has_bias=head_bias)

        return self.network(operations())

    def llama(
        self,
        mlp: Callable[[int, str], Iterator[Operation]] | None = None,
        *,
        has_mlp_bias: bool = False,
        **how: Any,
    ) -> Network:
        """Return a model with the layer structure and weight names of Llama. `mlp` yields the MLP operations of a
        layer, given the layer's number and name. The default is Llama's MLP. The keyword arguments `how` set fields of
        `Attention`."""
        norm, dense = self.norm(), self.mlp(has_bias=has_mlp_bias)

        def layers(number: int, name: str) -> Iterator[Operation]:
            attention = self.attention(number, **how)(f"{name}.self_attn")
            yield from layer(norm, norms_of(name), attention, mlp(number, name) if mlp else dense(f"{name}.mlp"))

        return self.model(norm, layers)


def norms_of(layer: str) -> tuple[str, str]:
    """Return the weight names of the norms before attention and before the MLP, as Llama checkpoints name them."""
    return f"{layer}.input_layernorm", f"{layer}.post_attention_layernorm"


def head_dim_of(config: JsonObject) -> int:
    """Return the size of an attention head from config.json. If `head_dim` is not set, the size is the hidden size
    divided by the number of heads."""
    if config.get("head_dim") is not None:
        return positive(config, "head_dim")
    return split_evenly("hidden_size", positive(config, "hidden_size"), positive(config, "num_attention_heads"))


def read_routing(config: JsonObject, num_key: str, **fields: Any) -> tuple[int, ExpertRouting]:
    """Read the mixture-of-experts settings of config.json. Return the number of experts, and the routing that chooses
    num_experts_per_tok of them for each token. `fields` sets other fields of `ExpertRouting`. Raises CheckpointError if
    the numbers contradict each other."""
    num_key = first_key(config, num_key, *NUM_EXPERTS)
    num_experts = positive(config, num_key, limit=MAX_EXPERTS)
    chosen_key = first_key(config, *NUM_CHOSEN)
    num_chosen = positive(config, chosen_key, limit=MAX_EXPERTS)
    if num_chosen > num_experts:
        raise unserved(chosen_key, num_chosen, f"at most {num_key}, {num_experts}")
    num_groups, num_chosen_groups = fields.get("num_groups", 1), fields.get("num_chosen_groups", 1)
    if num_experts % num_groups:
        raise unserved(num_key, num_experts, f"a multiple of n_group, {num_groups}")
    num_eligible = num_experts // num_groups * num_chosen_groups
    if num_chosen_groups > num_groups or num_chosen > num_eligible:
        raise unserved(
            "topk_group", num_chosen_groups, f"at most n_group, {num_groups}, with {num_chosen} experts at least"
        )
    return num_experts, ExpertRouting(num_chosen, **fields)
