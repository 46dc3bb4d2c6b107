"""The parts of a model that the scheduler reads, of a checkpoint directory or of a GGUF file: all but the weights."""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, TypeGuard

from pagewire.gguf import GgufFile, config_json, generation_config_json, is_gguf, read_text, tokenizer_config_json
from pagewire.transport.sampling_ranges import RANGES
from scheduler_service.core.plan import SamplingParams
from scheduler_service.serving.chat_template import ChatTemplate, read_chat_template
from scheduler_service.serving.pooling_config import PoolingChoice, read_gguf_pooling, read_pooling
from scheduler_service.serving.sampling_options import API_DEFAULTS, CHECKPOINTS_OPTIONS

# The keys under which the families of models give their greatest length.
# What published files of Gemma 3 with vision leave out.
_TEXT_DEFAULTS = {"vocab_size": 262_208, "max_position_embeddings": 131_072}
_LENGTH_KEYS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
# Those of families whose files may leave it out, by model_type.
_DEFAULT_LENGTHS = {"bloom": 2048}
_MAX_SIZE = 1 << 24  # of a vocabulary and of a length: far above any model there is
_MAX_SHOWN = 100  # characters of a value in an error


@dataclass(frozen=True, slots=True)
class ModelInfo:
    name: str  # of the directory, or of the GGUF file without its ending
    directory: Path  # absolute; or that of the GGUF file
    model_type: str
    architectures: tuple[str, ...]
    digest: bytes  # SHA-256 over config.json and, where there is one, tokenizer.json; or over a GGUF file's header
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    sampling_defaults: SamplingParams  # what requests mean that leave sampling unset
    template_file: ChatTemplate | None
    special_tokens: Mapping[str, str]  # texts, by the names that a chat template uses
    tokenizer_path: Path | None  # a tokenizer.json or a GGUF file
    embedding: PoolingChoice  # how embeddings are made

    @property
    def has_tokenizer(self) -> bool:
        return self.tokenizer_path is not None

    @property
    def grammar_end_token_ids(self) -> tuple[int, ...]:
        """The tokens that end an output which matches a grammar, rising: the end tokens that can be sampled."""
        return tuple(token_id for token_id in self.eos_token_ids if token_id < self.vocab_size)

    @property
    def grammar_refusal(self) -> str:
        """Why no output can match a grammar, or nothing."""
        if not self.has_tokenizer:
            return "the served checkpoint has no tokenizer, and without its texts no output can match a grammar"
        if not self.grammar_end_token_ids:
            return (
                "the served checkpoint names no end token, with which an output that matches a grammar ends; add "
                "eos_token_id to its generation_config.json"
            )
        return ""

    @property
    def chat_template(self) -> str | None:
        """Its text."""
        return None if self.template_file is None else self.template_file.text

    def warnings(self) -> list[str]:
        """Return warnings about what does not work with this checkpoint. Raises ValueError if nobody should be given
        it."""
        found = []
        if not self.has_tokenizer:
            found.append(
                f"{self.directory} has no tokenizer.json: prompts and outputs are token ids only; text prompts, stop "
                "texts, chat and the gateway do not work"
            )
        fault = None if self.template_file is None else self.template_file.fault()
        if fault is not None:
            found.append(f"{fault}; chat does not work")
        if self.embedding.refusal:
            found.append(self.embedding.refusal)
        return found


def read_model_info(model: str) -> ModelInfo:
    """Read a checkpoint directory or a GGUF file. Raises ValueError, one line that names the file at fault."""
    path = Path(model)
    if is_gguf(path):
        return _model_info(_read_gguf(path))
    if not path.is_dir():
        raise ValueError(f"--model is {model!r}, but that is neither a directory nor a GGUF file")
    return _model_info(_read_directory(path))


@dataclass(frozen=True, slots=True)
class _Settings:
    """What a model's small files hold, and which file says so."""

    path: Path  # of the model
    name: str
    config: dict[str, Any]
    config_path: Path
    generation: dict[str, Any]
    generation_path: Path
    tokenizer_config: dict[str, Any]
    template_file: ChatTemplate | None
    tokenizer_path: Path | None
    digest: bytes
    embedding: PoolingChoice


def _read_directory(path: Path) -> _Settings:
    config_path, tokenizer_path = path / "config.json", path / "tokenizer.json"
    config = _with_text_config(_read_json(config_path, required=True))
    tokenizer_config = _read_json(path / "tokenizer_config.json")
    digest = hashlib.sha256(config_path.read_bytes())
    has_tokenizer = tokenizer_path.is_file()
    if has_tokenizer:
        digest.update(tokenizer_path.read_bytes())
    return _Settings(
        path,
        path.resolve().name,
        config,
        config_path,
        _read_json(path / "generation_config.json"),
        path / "generation_config.json",
        tokenizer_config,
        read_chat_template(path, tokenizer_config),
        tokenizer_path if has_tokenizer else None,
        digest.digest(),
        read_pooling(path, partial(_read_json, required=True)),
    )


def _with_text_config(config: dict[str, Any]) -> dict[str, Any]:
    """Of a multimodal model, what is said of its text model is taken where the whole says nothing."""
    text = config.get("text_config")
    if not isinstance(text, dict):
        return config
    defaults = _TEXT_DEFAULTS if text.get("model_type") == "gemma3_text" else {}
    return {**defaults, **text, **{key: value for key, value in config.items() if value is not None}}


def _read_gguf(path: Path) -> _Settings:
    """What is wrong in a file's settings is told of the file, under the names that config.json has for them."""
    file = GgufFile.open(path)
    tokenizer_config = tokenizer_config_json(file)
    template = tokenizer_config.get("chat_template")
    return _Settings(
        path,
        path.resolve().stem,
        config_json(file),
        path,
        generation_config_json(file),
        path,
        tokenizer_config,
        None if template is None else ChatTemplate(template, path),
        path,
        file.digest,
        read_gguf_pooling(file),
    )


def _model_info(settings: _Settings) -> ModelInfo:
    config, config_path = settings.config, settings.config_path
    model_type = _text(config, "model_type", config_path)
    return ModelInfo(
        name=settings.name,
        directory=settings.path.resolve(),
        model_type=model_type,
        architectures=_names(config, "architectures", config_path),
        digest=settings.digest,
        vocab_size=_positive(config, ("vocab_size",), config_path),
        max_model_len=_positive(config, _LENGTH_KEYS, config_path, _DEFAULT_LENGTHS.get(model_type)),
        eos_token_ids=_end_token_ids(config, config_path, settings.generation, settings.generation_path),
        bos_token_id=_token_id(config, "bos_token_id"),
        pad_token_id=_token_id(config, "pad_token_id"),
        sampling_defaults=_sampling_defaults(settings.generation, settings.generation_path),
        template_file=settings.template_file,
        special_tokens=_special_tokens(settings.tokenizer_config),
        tokenizer_path=settings.tokenizer_path,
        embedding=settings.embedding,
    )


def _read_json(path: Path, *, required: bool = False) -> dict[str, Any]:
    if not path.is_file():
        if required:
            raise ValueError(f"{path} is missing: --model must name a checkpoint directory as published")
        return {}
    try:
        content = json.loads(read_text(path))
        json.dumps(content, ensure_ascii=False).encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"{path}: {error.object[error.start]!r} is half a character, which no text may have") from None
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}") from error
    except RecursionError as error:
        raise ValueError(f"{path} is not JSON that can be read: it is nested too deeply") from error
    if not isinstance(content, dict):
        raise ValueError(f"{path} holds {type(content).__name__}, but must hold an object")
    return content


def _error(file: Path, key: str, value: Any, expected: str) -> ValueError:
    shown = json.dumps(value, default=str)
    shown = shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."
    return ValueError(f"{file}: {key} is {shown}, but must be {expected}")


def _is_whole(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and not isinstance(value, bool)


def _text(config: dict[str, Any], key: str, file: Path) -> str:
    value = config.get(key) or ""
    if not isinstance(value, str):
        raise _error(file, key, value, "a text")
    return value


def _names(config: dict[str, Any], key: str, file: Path) -> tuple[str, ...]:
    value = config.get(key) or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise _error(file, key, value, "a list of names")
    return tuple(value)


def _positive(config: dict[str, Any], keys: tuple[str, ...], file: Path, default: int | None = None) -> int:
    found = next((key for key in keys if config.get(key) is not None), " or ".join(keys))
    value = config.get(found, default)
    if not _is_whole(value) or not 1 <= value <= _MAX_SIZE:
        raise _error(file, found, value, f"a whole number from 1 to {_MAX_SIZE}")
    return value


def _end_token_ids(
    config: dict[str, Any], config_path: Path, generation: dict[str, Any], generation_path: Path
) -> tuple[int, ...]:
    """generation_config.json's, else config.json's."""
    key, file, value = "eos_token_id", generation_path, generation.get("eos_token_id")
    if value is None:
        file, value = config_path, config.get(key)
    token_ids = [] if value is None else value if isinstance(value, list) else [value]
    if not all(_is_whole(token_id) and 0 <= token_id < 2**31 for token_id in token_ids):
        raise _error(file, key, value, f"a token id from 0 to {2**31 - 1} or a list of them")
    return tuple(sorted(set(token_ids)))


def _token_id(config: dict[str, Any], key: str) -> int | None:
    """None too for what nobody here would use it for anyway: it is only told on."""
    value = config.get(key)
    return value if _is_whole(value) and 0 <= value < 2**31 else None


def _sampling_defaults(generation: dict[str, Any], file: Path) -> SamplingParams:
    """generation_config.json's values, else the API's own."""
    values: dict[str, Any] = {}
    for key in CHECKPOINTS_OPTIONS:
        value, legal = generation.get(key), RANGES[key]
        if value is None:
            continue
        takes_whole = _is_whole(getattr(API_DEFAULTS, key))
        is_number = _is_whole(value) or (isinstance(value, float) and not takes_whole)
        if not is_number or not legal.holds(value):
            expected = f"a {'whole ' if takes_whole else ''}number {'' if legal.excludes_low else 'from '}{legal}"
            raise _error(file, key, value, expected)
        values[key] = value
    return replace(API_DEFAULTS, **values)


def _special_tokens(tokenizer_config: dict[str, Any]) -> dict[str, str]:
    """The texts that tokenizer_config.json gives as `bos_token`, `eos_token` and so on."""
    texts = {}
    for name, value in tokenizer_config.items():
        text = value.get("content") if isinstance(value, dict) else value
        if name.endswith("_token") and isinstance(text, str):
            texts[name] = text
    return texts
