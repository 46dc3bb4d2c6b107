"""The computation of a checkpoint's embeddings, from the files of sentence-transformers or from a GGUF file.

Without such files, the last token's hidden state is used, which depends on the whole prompt. Embeddings are always
scaled to length 1. A model whose modules are not supported can still generate text: the reason is reported when an
embedding is requested.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagewire.common.gguf import GgufFile, is_whole, read_json_value, read_settings, shown
from pagewire.common.wire.messages import Pooling

_MODULES_FILE = "modules.json"
_MODES = {"pooling_mode_lasttoken": Pooling.LAST, "pooling_mode_mean_tokens": Pooling.MEAN}
_NAMED_MODES = {"lasttoken": Pooling.LAST, "mean": Pooling.MEAN}
_SERVED = "the last token's hidden state and the mean over all tokens are supported"
_GGUF_MEAN = 1  # a value of llama.cpp's `pooling_type`
_KINDS = ("Transformer", "Pooling", "Dense", "Normalize")  # in the order in which they may follow one another
_EMBEDDING = "sentence_embedding"  # the name of the pooled vector
# Classes of torch.nn.
DENSE_ACTIVATIONS = ("Identity", "Tanh", "ReLU", "GELU", "SiLU", "Sigmoid")


@dataclass(frozen=True, slots=True)
class DenseModule:
    """A linear layer with an activation that follows the pooling."""

    folder: str  # of its files, in the checkpoint
    in_size: int
    out_size: int
    has_bias: bool
    activation: str  # one of DENSE_ACTIVATIONS


@dataclass(frozen=True, slots=True)
class PoolingChoice:
    """The way in which the hidden states of a prompt are pooled to an embedding, or the reason why the model supports
    no embeddings."""

    pooling: Pooling
    refusal: str = ""
    dense: tuple[DenseModule, ...] = ()  # applied to the pooled states, one after the other


class _UnsupportedError(Exception):
    """Raised if a module of a checkpoint is not supported. The message names the file and the setting."""


def read_pooling(directory: Path) -> PoolingChoice:
    """Read from a checkpoint directory how hidden states are pooled to an embedding: by the last token or by the mean,
    and then by dense layers. If the files specify any other operation, return the reason why the model supports no
    embeddings. Raise ValueError if a file cannot be read."""
    path = directory / _MODULES_FILE
    if not path.is_file():
        return PoolingChoice(Pooling.LAST)
    try:
        return _choice_of(directory, path)
    except _UnsupportedError as error:
        return PoolingChoice(Pooling.NONE, f"this checkpoint supports no embeddings: {error}")


def read_gguf_pooling(file: GgufFile) -> PoolingChoice:
    """Read from a GGUF file how hidden states are pooled to an embedding: by the last token or by the mean. Files with
    another pooling are refused earlier, when they are opened (`pagewire.common.gguf`)."""
    architecture = file.metadata.get("general.architecture")
    is_mean = file.metadata.get(f"{architecture}.pooling_type") == _GGUF_MEAN
    return PoolingChoice(Pooling.MEAN if is_mean else Pooling.LAST)


def _choice_of(directory: Path, path: Path) -> PoolingChoice:
    modules = _read_modules(path)
    kinds = [module["type"].rpartition(".")[2] for module in modules]
    for kind in kinds:
        if kind not in _KINDS:
            raise _UnsupportedError(f"{path} has a module {kind}, which is not supported")
    if kinds != sorted(kinds, key=_KINDS.index):
        raise _UnsupportedError(f"{path} has the order {', '.join(kinds)}, but {', '.join(_KINDS)} is supported")
    pooling, dense = Pooling.LAST, list[DenseModule]()
    for kind, module in zip(kinds, modules, strict=True):
        file = directory / module["path"] / "config.json"
        if kind == "Pooling":
            pooling = _pooling_of(file, read_settings(file, required=True))
        elif kind == "Dense":
            dense.append(_dense_of(file, module["path"], read_settings(file, required=True)))
    return PoolingChoice(pooling, dense=tuple(dense))


def _read_modules(path: Path) -> list[dict[str, str]]:
    modules = read_json_value(path)
    is_list = isinstance(modules, list) and all(isinstance(module, dict) for module in modules)
    if not is_list or not all(isinstance(module.get(key), str) for module in modules for key in ("type", "path")):
        raise ValueError(f"{path} must contain a list of modules, each with a type and a path")
    return modules


def _pooling_of(path: Path, config: Mapping[str, Any]) -> Pooling:
    if not config.get("include_prompt", True):
        raise _UnsupportedError(f"{path}: include_prompt is false, but all tokens are pooled")
    if isinstance(config.get("pooling_mode"), str):
        names = [config["pooling_mode"]]
        found = [_NAMED_MODES.get(name) for name in names]
    else:
        names = sorted(key for key, value in config.items() if key.startswith("pooling_mode_") and value is True)
        found = [_MODES.get(name) for name in names]
    if len(found) == 1 and found[0] is not None:
        return found[0]
    named = " and ".join(names) or "no pooling mode"
    raise _UnsupportedError(f"{path} specifies {named}, which is not supported; {_SERVED}")


def _dense_of(path: Path, folder: str, config: Mapping[str, Any]) -> DenseModule:
    """Return the dense layer that a module's config.json describes. The defaults are those of sentence-transformers."""
    in_size, out_size, has_bias = config.get("in_features"), config.get("out_features"), config.get("bias", True)
    if not (is_whole(in_size) and is_whole(out_size) and min(in_size, out_size) >= 1 and isinstance(has_bias, bool)):
        raise ValueError(f"{path} must have the whole numbers in_features and out_features; bias is true or false")
    package, _, activation = str(config.get("activation_function", "torch.nn.Tanh")).rpartition(".")
    if not package.startswith("torch.nn") or activation not in DENSE_ACTIVATIONS:
        served = f"{', '.join(DENSE_ACTIVATIONS)} of torch.nn"
        raise _UnsupportedError(f"{path}: activation_function is {package}.{activation}, but must be one of {served}")
    only: dict[str, Any] = {"module_input_name": _EMBEDDING, "module_output_name": _EMBEDDING, "use_residual": False}
    for key, value in only.items():
        if config.get(key) not in (None, value):
            raise _UnsupportedError(f"{path}: {key} is {shown(config[key])}, but must be {shown(value)}")
    return DenseModule(folder, in_size, out_size, has_bias, activation)
