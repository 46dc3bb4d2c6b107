"""The families of models that are served, relatives in a file: how config.json is read, and what weights are called.

One more is a `Family` here and a line of `_FAMILIES`; what it needs that no other has is a flag of `ModelConfig`.
"""

from worker_service.models.checkpoint_files import CONFIG_FILE, CheckpointError, shown
from worker_service.models.config import JsonObject, ModelConfig
from worker_service.models.families import (
    gemma,
    glm,
    gpt,
    gpt_neox,
    gpt_oss,
    llama,
    mistral,
    olmo,
    qwen,
    starcoder2,
)
from worker_service.models.families.family import Family, inside
from worker_service.models.families.reading import check_names, unserved

_FAMILIES = (
    gpt.GPT2,
    llama.LLAMA,
    mistral.MISTRAL,
    qwen.QWEN2,
    qwen.QWEN3,
    llama.SMOLLM3,
    llama.PHI3,
    llama.GRANITE,
    mistral.MINISTRAL3,
    mistral.MISTRAL3,
    olmo.OLMO2,
    olmo.OLMO3,
    llama.SEED_OSS,
    glm.GLM,
    glm.GLM4,
    gemma.GEMMA2,
    gemma.GEMMA3,
    inside(gemma.GEMMA3, "Gemma3ForConditionalGeneration", ("gemma3_text",)),
    starcoder2.FAMILY,
    gpt_neox.FAMILY,
    qwen.QWEN3_MOE,
    mistral.MIXTRAL,
    olmo.OLMOE,
    qwen.QWEN2_MOE,
    gpt.BLOOM,
    gpt.MPT,
    gpt_oss.FAMILY,
    glm.GLM4_MOE,
)
BY_ARCHITECTURE: dict[str, Family] = {
    architecture: family for family in _FAMILIES for architecture in family.architectures
}


def parse_config(config: JsonObject) -> ModelConfig:
    """The model that the contents of a config.json describe.

    Raises:
        CheckpointError: they are broken, or ask for something that is not supported.
    """
    architecture = _architecture(config)
    check_names(config)
    model = BY_ARCHITECTURE[architecture].parse(config, architecture)
    if model.num_heads % model.num_kv_heads:
        raise unserved("num_key_value_heads", model.num_kv_heads, f"a divisor of {model.num_heads} attention heads")
    if model.rope is None:
        return model
    if model.head_dim % 2:
        raise unserved("head_dim", model.head_dim, "even, for rotary embedding")
    rotary_size = model.rope.rotary_size(model.head_dim)
    if rotary_size < 2 or rotary_size % 2:
        raise unserved(
            "partial_rotary_factor", model.rope.rotary_share, f"such that an even part of {model.head_dim} is turned"
        )
    return model


def _architecture(config: JsonObject) -> str:
    supported = ", ".join(BY_ARCHITECTURE)
    architectures = config.get("architectures") or []
    if not isinstance(architectures, list) or not all(isinstance(name, str) for name in architectures):
        raise unserved("architectures", architectures, f"a list of names; supported: {supported}")
    for architecture in architectures:
        if architecture in BY_ARCHITECTURE:
            return architecture
    code = ", and the model's own code (auto_map) is never run" if config.get("auto_map") else ""
    named = ", ".join(architectures) or f"none (model_type {shown(config.get('model_type'))})"
    raise CheckpointError(f"{CONFIG_FILE}: architecture {named} is not supported{code}; supported: {supported}")
