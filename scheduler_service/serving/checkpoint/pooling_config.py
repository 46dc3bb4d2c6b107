"""The pooling of a checkpoint's embeddings, from the files of sentence-transformers or from a GGUF file.

Without such files, the last token's hidden state is used, which depends on the whole prompt. Embeddings are always
scaled to length 1. A model whose pooling is not supported can still generate text: the pooling is reported when an
embedding is requested.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pagewire.common.gguf import GgufFile, read_json_value, read_settings
from pagewire.common.wire.messages import Pooling

_MODULES_FILE = "modules.json"
_MODES = {"pooling_mode_lasttoken": Pooling.LAST, "pooling_mode_mean_tokens": Pooling.MEAN}
_NAMED_MODES = {"lasttoken": Pooling.LAST, "mean": Pooling.MEAN}
_SERVED = "the last token's hidden state and the mean over all tokens are supported"
_GGUF_MEAN = 1  # a value of llama.cpp's `pooling_type`


@dataclass(frozen=True, slots=True)
class PoolingChoice:
    """The way in which the hidden states of a prompt are pooled to an embedding, or the reason why the model supports
    no embeddings."""

    pooling: Pooling
    refusal: str = ""


def read_pooling(directory: Path) -> PoolingChoice:
    """Read from a checkpoint directory how hidden states are pooled to an embedding: by the last token or by the mean.
    If the files specify any other operation, return the reason why the model supports no embeddings. Raise ValueError
    if a file cannot be read."""
    path = directory / _MODULES_FILE
    if not path.is_file():
        return PoolingChoice(Pooling.LAST)
    pooling = Pooling.LAST
    for module in _read_modules(path):
        kind = module["type"].rpartition(".")[2]
        if kind == "Pooling":
            config_path = directory / module["path"] / "config.json"
            choice = _pooling_of(config_path, read_settings(config_path, required=True))
            if choice.refusal:
                return choice
            pooling = choice.pooling
        elif kind not in ("Transformer", "Normalize"):
            return _refused(f"{path} has a module {kind}, which is not supported")
    return PoolingChoice(pooling)


def read_gguf_pooling(file: GgufFile) -> PoolingChoice:
    """Read from a GGUF file how hidden states are pooled to an embedding: by the last token or by the mean. Files with
    another pooling are refused earlier, when they are opened (`pagewire.common.gguf`)."""
    architecture = file.metadata.get("general.architecture")
    is_mean = file.metadata.get(f"{architecture}.pooling_type") == _GGUF_MEAN
    return PoolingChoice(Pooling.MEAN if is_mean else Pooling.LAST)


def _read_modules(path: Path) -> list[dict[str, str]]:
    modules = read_json_value(path)
    is_list = isinstance(modules, list) and all(isinstance(module, dict) for module in modules)
    if not is_list or not all(isinstance(module.get(key), str) for module in modules for key in ("type", "path")):
        raise ValueError(f"{path} must contain a list of modules, each with a type and a path")
    return modules


def _pooling_of(path: Path, config: Mapping[str, Any]) -> PoolingChoice:
    if not config.get("include_prompt", True):
        return _refused(f"{path}: include_prompt is false, but all tokens are pooled")
    if isinstance(config.get("pooling_mode"), str):
        names = [config["pooling_mode"]]
        found = [_NAMED_MODES.get(name) for name in names]
    else:
        names = sorted(key for key, value in config.items() if key.startswith("pooling_mode_") and value is True)
        found = [_MODES.get(name) for name in names]
    if len(found) == 1 and found[0] is not None:
        return PoolingChoice(found[0])
    return _refused(f"{path} specifies {' and '.join(names) or 'no pooling mode'}, which is not supported; {_SERVED}")


def _refused(reason: str) -> PoolingChoice:
    return PoolingChoice(Pooling.NONE, f"this checkpoint supports no embeddings: {reason}")
