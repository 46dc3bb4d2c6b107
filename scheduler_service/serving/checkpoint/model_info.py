"""The parts of a model that the scheduler reads from a checkpoint directory or a GGUF file: everything except the
weights."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from pagewire.common.gguf import (
    GgufFile,
    ModelFileError,
    check_pointer,
    config_json,
    generation_config_json,
    is_gguf,
    is_whole,
    read_settings,
    token_ids_of,
    unserved,
)
from pagewire.common.gguf.tokenizer_files import TokenizerFiles, directory_digest, settings_of
from pagewire.common.wire.messages import SamplingParams
from pagewire.network.families import only_embeds, text_settings
from pagewire.network.families.reading import HIDDEN_SIZE, MAX_SIZE
from pagewire.network.pooling_config import PoolingChoice, read_gguf_pooling, read_pooling
from scheduler_service.serving.checkpoint.chat_template import (
    ChatTemplate,
    chat_template_of,
    given_chat_template,
    read_chat_template,
)
from scheduler_service.serving.checkpoint.embedding_prompts import EmbeddingPrompts, read_embedding_prompts
from scheduler_service.serving.checkpoint.sampling_defaults import ignored_settings, sampling_defaults

# Tokenizer files that other tools read if there is no tokenizer.json.
_OTHER_TOKENIZERS = ("tokenizer.model", "vocab.json", "tekken.json", "tiktoken.model", "vocab.txt")


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """The properties of the served model that the scheduler needs, such as its vocabulary size, maximum length, end
    tokens and chat template. They are read from the checkpoint's files, without the weights."""

    name: str  # of the directory, or of the GGUF file without its suffix
    directory: Path  # absolute path of the directory or of the GGUF file
    model_type: str
    architectures: tuple[str, ...]
    digest: bytes  # SHA-256 over config.json and the tokenizer, if there is one; or over a GGUF file's header
    vocab_size: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    bos_token_id: int | None
    pad_token_id: int | None
    sampling_defaults: SamplingParams  # for requests that leave sampling options unset
    ignored_settings: str  # a warning about the checkpoint's unsupported settings, or ""
    template_file: ChatTemplate | None
    chat_refusals: tuple[str, ...]  # kinds of conversation that its template cannot render, and why
    special_tokens: Mapping[str, str]  # texts, by the names that a chat template uses
    tokenizer_path: Path | None  # a tokenizer.json or a GGUF file; None: there is no tokenizer
    has_standard_tokenizer_files: bool  # routers that read its files find the same tokenizer and template
    embedding: PoolingChoice  # how embeddings are pooled
    tokenizer_class: str = ""  # the class of transformers, from the tokenizer's files
    embedding_size: int = 0  # numbers of an embedding; 0: not in the configuration
    embedding_prompts: EmbeddingPrompts = field(default_factory=EmbeddingPrompts)
    only_embeds: bool = False  # the model makes embeddings, but generates no text

    @property
    def grammar_end_token_ids(self) -> tuple[int, ...]:
        """The tokens that may end an output that must match a grammar, in ascending order. They are the model's end
        tokens that are in its vocabulary, so that they can be sampled."""
        return tuple(token_id for token_id in self.eos_token_ids if token_id < self.vocab_size)

    @property
    def grammar_refusal(self) -> str:
        """The reason why outputs of this model cannot be constrained to a grammar, or an empty string if they can."""
        if self.tokenizer_path is None:
            return "the served checkpoint has no tokenizer, so no output can be matched to a grammar"
        if not self.grammar_end_token_ids:
            return (
                "the served checkpoint specifies no end token, which must end an output that matches a grammar; add "
                "eos_token_id to its generation_config.json"
            )
        return ""

    @property
    def chat_template(self) -> str | None:
        """The text of the model's chat template, or None if the checkpoint has no chat template."""
        return None if self.template_file is None else self.template_file.text

    def warnings(self) -> list[str]:
        """Return a warning for each feature that does not work with this checkpoint, such as text prompts if it has no
        tokenizer."""
        found = []
        if self.tokenizer_path is None:
            found.append(
                f"{self.directory} has no tokenizer.json: prompts and outputs are token ids only; text prompts, stop "
                f"texts and chat do not work{_convertible(self.directory)}"
            )
        if self.template_file is not None:
            found += [
                f"{self.template_file.source}: the chat template cannot render {refusal}; such conversations are "
                "refused"
                for refusal in self.chat_refusals
            ]
        found += [text for text in (self.embedding.refusal, self.ignored_settings) if text]
        return found


def read_model_info(model: str) -> ModelInfo:
    """Return the properties of the model in a checkpoint directory or a GGUF file. Raise ValueError, with a message of
    one line that names the file, if a file is missing or invalid."""
    return read_model(model)[0]


def read_model(model: str, chat_template: str | None = None) -> tuple[ModelInfo, TokenizerFiles | None]:
    """Read a model's files. Return a tuple: the model's properties, as from `read_model_info`, and the contents of the
    tokenizer's files, or None if the model has no tokenizer.

    The tokenizer's files take much time to read and much memory to keep. `chat_template` is a Jinja file or the text of
    a template that replaces all chat templates of the model.
    """
    path = Path(model)
    given = None if chat_template is None else given_chat_template(chat_template)
    if is_gguf(path):
        return _read_gguf(path, given)
    if not path.is_dir():
        raise ValueError(f"--model is {model!r}, but that is neither a directory nor a GGUF file")
    return _read_directory(path, given)


def _read_directory(path: Path, given: ChatTemplate | None) -> tuple[ModelInfo, TokenizerFiles | None]:
    config_path, generation_path = path / "config.json", path / "generation_config.json"
    tokenizer = TokenizerFiles.in_directory(path)
    special_tokens = (settings_of(path, "") if tokenizer is None else tokenizer.settings).texts()
    info = _model_info(
        path,
        name=_name_of(path.resolve()),
        config=read_settings(config_path, required=True),
        config_path=config_path,
        generation=read_settings(generation_path),
        generation_path=generation_path,
        special_tokens=special_tokens,
        template=given or read_chat_template(path, read_settings(path / "tokenizer_config.json")),
        tokenizer=tokenizer,
        end_token_id=None if tokenizer is None else tokenizer.token_id(special_tokens.get("eos_token", "")),
        digest=directory_digest(path, tokenizer),
        embedding=read_pooling(path),
    )
    return replace(info, embedding_prompts=read_embedding_prompts(path)), tokenizer


def _name_of(directory: Path) -> str:
    """Return the name of a model by its directory. A directory in the cache of Hugging Face's hub has the name of its
    repository, such as `models--Qwen--Qwen3-0.6B/snapshots/c1899de289a04d12100db370d81485cdf75e47ca`."""
    repository = directory.parents[1].name if directory.parent.name == "snapshots" else ""
    return repository.rpartition("--")[2] or directory.name


def _read_gguf(path: Path, given: ChatTemplate | None) -> tuple[ModelInfo, TokenizerFiles | None]:
    """Read the model's properties and tokenizer from a GGUF file. If a setting is invalid, the error names the file and
    the setting. The setting has the name that it has in config.json."""
    file = GgufFile.open(path)
    tokenizer = TokenizerFiles.of(path)
    info = _model_info(
        path,
        name=path.resolve().stem,
        config=config_json(file),
        config_path=path,
        generation=generation_config_json(file),
        generation_path=path,
        special_tokens=tokenizer.settings.texts(),
        template=given or chat_template_of(tokenizer.config, path),
        tokenizer=tokenizer,
        end_token_id=None,
        digest=file.digest,
        embedding=read_gguf_pooling(file),
    )
    return info, tokenizer


def _model_info(
    path: Path,
    *,
    name: str,
    config: dict[str, Any],
    config_path: Path,
    generation: dict[str, Any],
    generation_path: Path,
    special_tokens: Mapping[str, str],
    template: ChatTemplate | None,
    tokenizer: TokenizerFiles | None,
    end_token_id: int | None,
    digest: bytes,
    embedding: PoolingChoice,
) -> ModelInfo:
    """Build the properties of a model from its parsed files. `end_token_id` is the tokenizer's end token; the end
    tokens of the other files apply too. Raise ValueError if a setting is invalid."""
    is_embedder = only_embeds(config)
    config, length_key = text_settings(config)
    vocab_size = _positive(config, "vocab_size", config_path)
    size = next((config[key] for key in HIDDEN_SIZE if is_whole(config.get(key))), 0)
    # The end tokens are in generation_config.json, or else in config.json. The tokenizer's end token is added to them.
    names_ends = generation.get("eos_token_id") is not None
    named, file = (generation, generation_path) if names_ends else (config, config_path)
    own = set() if end_token_id is None else {end_token_id}
    return ModelInfo(
        name=name,
        directory=path.resolve(),
        model_type=_text(config, "model_type", config_path),
        architectures=_names(config, "architectures", config_path),
        digest=digest,
        vocab_size=vocab_size,
        max_model_len=_positive(config, length_key, config_path),
        eos_token_ids=tuple(sorted(token_ids_of(named, "eos_token_id", file) | own)),
        bos_token_id=_token_id(config, "bos_token_id"),
        pad_token_id=_token_id(config, "pad_token_id"),
        sampling_defaults=sampling_defaults(generation, generation_path, vocab_size),
        ignored_settings=ignored_settings(generation, generation_path),
        template_file=template,
        chat_refusals=() if template is None else template.refusals(special_tokens),
        special_tokens=special_tokens,
        tokenizer_path=None if tokenizer is None else tokenizer.path,
        has_standard_tokenizer_files=(template is None or template.is_plain)
        and (tokenizer is None or tokenizer.is_plain),
        embedding=embedding,
        tokenizer_class=str(tokenizer.config.get("tokenizer_class") or tokenizer.settings.kind.name)
        if tokenizer
        else "",
        only_embeds=is_embedder,
        embedding_size=embedding.dense[-1].out_size if embedding.dense else size,
    )


def _text(config: dict[str, Any], key: str, file: Path) -> str:
    value = config.get(key) or ""
    if not isinstance(value, str):
        raise unserved(file, key, value, "a text")
    return value


def _names(config: dict[str, Any], key: str, file: Path) -> tuple[str, ...]:
    value = config.get(key) or []
    if not isinstance(value, list) or not all(isinstance(name, str) for name in value):
        raise unserved(file, key, value, "a list of names")
    return tuple(value)


def _positive(config: dict[str, Any], key: str, file: Path) -> int:
    value = config.get(key)
    if not is_whole(value) or not 1 <= value <= MAX_SIZE:
        raise unserved(file, key, value, f"a whole number from 1 to {MAX_SIZE}")
    return value


def _token_id(config: dict[str, Any], key: str) -> int | None:
    """Return the token id that is stored under `key` in a model's configuration, or None if it is missing or invalid.
    The token id is only reported to clients, so an invalid token id is not an error."""
    value = config.get(key)
    return value if is_whole(value) and 0 <= value < 2**31 else None


def _convertible(directory: Path) -> str:
    """Return a hint on how to convert the checkpoint's tokenizer to a tokenizer.json, for a warning. Return an empty
    string if the directory contains no other tokenizer file."""
    path = next((directory / name for name in _OTHER_TOKENIZERS if (directory / name).is_file()), None)
    if path is None:
        return ""
    try:
        check_pointer(path)
    except ModelFileError as error:
        return f". {error}"
    return (
        f'. To convert {path.name}, run: python -c "from transformers import AutoTokenizer as T; '
        f"T.from_pretrained('{directory}').save_pretrained('{directory}')\""
    )
