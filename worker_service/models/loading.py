"""Loads a checkpoint directory into a model, tensor by tensor."""

from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from worker_service.checkpoint import Checkpoint, DummyTensors, Tensors
from worker_service.models import decoder, gpt2
from worker_service.models.config import ModelConfig
from worker_service.models.linear import Embedding, Linear
from worker_service.models.model import Model
from worker_service.models.operations import Operations, TorchOperations
from worker_service.models.rope import RotaryEmbedding
from worker_service.models.weights import Progress, Weight, fill_layers, hold_dtypes, load_weights


@dataclass(frozen=True, slots=True)
class Family:
    """The code of some architectures."""

    model: type[decoder.Decoder] | type[gpt2.GPT2]
    weights: tuple[Weight, ...]
    ignored: str  # pattern of checkpoint names that hold no weights
    optional_prefix: str = ""  # of checkpoint names; some published files lack it


DECODER = Family(decoder.Decoder, decoder.WEIGHTS, decoder.IGNORED)
GPT2 = Family(gpt2.GPT2, gpt2.WEIGHTS, gpt2.IGNORED, optional_prefix="transformer.")
FAMILIES = {
    "LlamaForCausalLM": DECODER,
    "MistralForCausalLM": DECODER,
    "Qwen2ForCausalLM": DECODER,
    "Qwen3ForCausalLM": DECODER,
    "GPT2LMHeadModel": GPT2,
}


def load_model(
    path: Path,
    *,
    dtype: torch.dtype,
    device: torch.device,
    progress: Progress | None = None,
    operations: Operations | None = None,
    is_dummy: bool = False,
) -> Model:
    """Loads the model of a checkpoint directory, ready to run.

    Args:
        path: holds config.json and the safetensors files.
        dtype: what the model computes in. Weights are converted as they are read, except where `operations` multiply
            with them in the dtype of the checkpoint.
        device: where it computes.
        progress: called after each tensor with (tensors loaded, tensors in all).
        operations: what the model computes with; by default plain torch.
        is_dummy: the directory need hold nothing but config.json, and the weights are random.

    Raises:
        CheckpointError: the checkpoint is broken or not supported.
    """
    config = ModelConfig.load(path)
    checkpoint: Tensors = DummyTensors() if is_dummy else Checkpoint(path)
    family = FAMILIES[config.architecture]
    operations = operations or TorchOperations()
    with torch.device("meta"):
        model = family.model(config, operations)
    # As in transformers, a head that the checkpoint holds counts, whatever config.json says.
    is_tied = config.tie_word_embeddings and "lm_head.weight" not in checkpoint.names
    if is_tied:
        model.head.weight = None
    model.to(dtype)
    table = list(_weights(family, config, checkpoint))
    hold_dtypes(model, checkpoint, table, lambda held: operations.can_hold(held, dtype))
    # Not `to_empty`: torch lays out meta tensors with symbolic shapes, and importing their sympy takes half a second.
    model._apply(lambda tensor: torch.empty(tensor.shape, dtype=tensor.dtype, device=device))
    load_weights(model, checkpoint, table, family.ignored, progress)
    if is_tied:
        model.head.weight = model.embedding.weight
    _finish(model, dtype, is_tied)
    return model.requires_grad_(False).eval()


def _finish(model: decoder.Decoder | gpt2.GPT2, dtype: torch.dtype, is_tied: bool) -> None:
    modules = list(model.modules())
    for module in modules:
        if isinstance(module, Linear):
            module.finish_loading(dtype)
        elif isinstance(module, RotaryEmbedding):
            module.finish_loading()
    for module in modules:
        if isinstance(module, Embedding):
            module.finish_loading(dtype, model.head if is_tied and module is model.embedding else None)


def _weights(family: Family, config: ModelConfig, checkpoint: Tensors) -> Iterator[Weight]:
    """The family's table for this model, in the names this checkpoint uses."""
    prefix = family.optional_prefix
    has_prefix = any(name.startswith(prefix) for name in checkpoint.names)
    for weight in fill_layers(family.weights, config.num_layers):
        yield weight if has_prefix else replace(weight, source=weight.source.removeprefix(prefix))
