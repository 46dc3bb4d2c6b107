"""Text models inside multimodal checkpoints, whose parts that see are left out."""

from dataclasses import replace

from worker_service.models.config import JsonObject
from worker_service.models.families.family import Family, Weight
from worker_service.models.families.reading import check_names, choice, json_object, unserved

_UNREAD = r"^(model\.)?(vision_tower|multi_modal_projector)\."
# Of the whole checkpoint, if its config.json says them there.
_OUTER = ("dtype", "torch_dtype", "quantization_config")


def inside(family: Family, architecture: str, model_types: tuple[str, ...]) -> Family:
    """Return the family of checkpoints that hold a model of another, which is of one of these types, in their
    text_config. Published files and those of transformers 5 name its weights differently."""
    published = tuple(replace(weight, source=f"language_model.{weight.source}") for weight in family.weights)
    return Family(
        (architecture,),
        lambda config, name: family.parse(_text_config(config, model_types), name),
        published,
        ignored=rf"{_UNREAD}|{family.ignored}",
        alternatives=(tuple(map(_renamed, family.weights)),),
    )


def _renamed(weight: Weight) -> Weight:
    source = weight.source
    if source.startswith("model."):
        source = f"model.language_model.{source.removeprefix('model.')}"
    return replace(weight, source=source)


def _text_config(config: JsonObject, model_types: tuple[str, ...]) -> JsonObject:
    text = json_object(config, "text_config")
    if not text:
        raise unserved("text_config", config.get("text_config"), "an object that describes the text model")
    check_names(text)
    choice(text, "model_type", model_types[0], model_types)
    outer = {key: config[key] for key in _OUTER if config.get(key) is not None}
    # Whether weights are tied is a matter of the whole.
    return {**text, **outer, "tie_word_embeddings": config.get("tie_word_embeddings", True)}
