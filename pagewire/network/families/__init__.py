"""The supported families of models, one file per group of related families. They convert a config.json to a list of
operations.

To add a family, define a `Family` at module level in a file of this package, and compose its model from
`pagewire.network.blocks`.
"""

import re
from collections.abc import Iterator
from dataclasses import replace
from pkgutil import iter_modules, resolve_name
from typing import Any

from pagewire.common.gguf import shown
from pagewire.network.checkpoint_files import CONFIG_FILE, INDEX_FILE, SINGLE_FILE, CheckpointError
from pagewire.network.families.family import Family
from pagewire.network.families.llama import LLAMA
from pagewire.network.families.reading import JsonObject, check_names, choice, flag, unserved
from pagewire.network.network import Network
from pagewire.network.operations import AttentionHeads
from pagewire.network.rope import RopeConfig

_MULTIMODAL = "ForConditionalGeneration"
_MODULES = [resolve_name(f"{__name__}.{found.name}") for found in iter_modules(__path__)]
_FAMILIES = [value for module in _MODULES for value in vars(module).values() if isinstance(value, Family)]
BY_ARCHITECTURE: dict[str, Family] = {
    architecture: family for family in _FAMILIES for architecture in family.architectures
}


def text_settings(config: JsonObject) -> tuple[dict[str, Any], str]:
    """Return the settings of the language model in a config.json, and the key of its maximum sequence length. Settings
    that the file omits get the family's defaults. The function raises no errors for unsupported settings.

    For a multimodal model, settings of the language model take precedence over settings of the whole model.
    """
    text = config.get("text_config")
    parts = (text, config) if isinstance(text, dict) else (config,)
    said = {key: value for part in parts for key, value in part.items() if value is not None}
    family = next((BY_ARCHITECTURE[name] for name in _known_architectures(said)), LLAMA)
    settings = {**family.defaults, **said}
    # Keys of other families count too, if the file does not name a known architecture. `parse_config` decides whether
    # the model is supported.
    keys = dict.fromkeys(each.length_key for each in (family, *_FAMILIES))
    return settings, next((key for key in keys if key in settings), " or ".join(keys))


def parse_config(config: JsonObject) -> Network:
    """Return the model that the contents of a config.json describe. Raises CheckpointError if the contents are broken
    or require something that is not supported."""
    architecture = _architecture(config)
    check_names(config)
    if config.get("transformers_weights") is not None:  # the file that transformers loads in place of the default
        choice(config, "transformers_weights", SINGLE_FILE, (SINGLE_FILE, INDEX_FILE))
    if lacks_head(config):
        config = {**config, "tie_word_embeddings": True}
    network = BY_ARCHITECTURE[architecture].parse(config, architecture)
    if not flag(config, "is_causal", True):
        if network.heads.alibi_slopes or any(heads.window or heads.pattern for heads in network.layers):
            raise unserved("is_causal", False, "true for a model with sliding windows, block patterns or ALiBi")
        if network.state_size:
            raise unserved("is_causal", False, "true for a model whose layers have states")
        network = replace(network, is_bidirectional=True)
    for heads, rope in dict.fromkeys(zip(network.layers, network.ropes, strict=True)):
        _check_heads(heads, rope)
    return network


def _check_heads(heads: AttentionHeads, rope: RopeConfig | None) -> None:
    """Raise CheckpointError unless the numbers and the size of a layer's heads fit each other and the layer's rope."""
    if heads.num_heads % heads.num_kv_heads:
        raise unserved("num_key_value_heads", heads.num_kv_heads, f"a divisor of {heads.num_heads} attention heads")
    if rope is None:
        return
    if heads.head_dim % 2:
        raise unserved("head_dim", heads.head_dim, "even, for rotary embedding")
    rotary_size = rope.rotary_size(heads.head_dim)
    if rotary_size < 2 or rotary_size % 2:
        raise unserved(
            "partial_rotary_factor",
            rope.rotary_share,
            f"a share that rotates an even number of {heads.head_dim} values",
        )


def lacks_head(config: JsonObject) -> bool:
    """Return whether a config.json names an architecture without LM head, such as `Qwen3Model`. Embedding models have
    such architectures; they cannot generate text."""
    named = config.get("architectures")
    return isinstance(named, list) and bool(named) and next(_known_architectures(config), None) not in (None, *named)


def only_embeds(config: JsonObject) -> bool:
    """Return whether a config.json describes a model that makes embeddings and cannot generate text. It has no LM head,
    or its tokens attend to later tokens, too."""
    settings, _ = text_settings(config)
    is_bidirectional = settings.get("is_causal") is False or settings.get("use_bidirectional_attention") is True
    return is_bidirectional or lacks_head(config)


def _architecture(config: JsonObject) -> str:
    named = config.get("architectures") or []
    if not isinstance(named, list) or not all(isinstance(name, str) for name in named):
        raise unserved("architectures", named, "a list of names, such as LlamaForCausalLM")
    architecture = next(_known_architectures(config), None)
    if architecture is not None:
        return architecture
    code = ", and the model's own code (auto_map) is never run" if config.get("auto_map") else ""
    names = shown(", ".join(named), 45).replace('"', "") or f"none (model_type {shown(config.get('model_type'), 25)})"
    raise CheckpointError(
        f"{CONFIG_FILE}: architecture {names} is not supported{code}; docs/models.md lists the supported architectures"
    )


def _known_architectures(config: JsonObject) -> Iterator[str]:
    """Yield the supported architectures that a config.json names; for one without LM head, such as `Qwen3Model` or
    `Gemma3TextModel`, the architecture with it. If the file has no `architectures`, its model_type names one, for
    example `gpt_neox` names GPTNeoXForCausalLM."""
    if named := config.get("architectures"):
        for name in map(str, named if isinstance(named, list) else ()):
            headed = f"{name.removesuffix('Model').removesuffix('Text')}ForCausalLM"
            yield from (each for each in (name, headed) if each in BY_ARCHITECTURE)
        return
    is_multimodal, model_type = bool(config.get("text_config")), str(config.get("model_type"))
    for name, family in BY_ARCHITECTURE.items():
        own = _plain(family.model_type or name)
        if own == _plain(model_type.removesuffix("_text")) and name.endswith(_MULTIMODAL) == is_multimodal:
            yield name


def _plain(name: str) -> str:
    return re.sub(rf"_|(ForCausalLM|LMHeadModel|{_MULTIMODAL})$", "", name).lower()
