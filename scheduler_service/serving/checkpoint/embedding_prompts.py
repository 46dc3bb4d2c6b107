"""The prompts that a checkpoint specifies for texts to embed, from the file config_sentence_transformers.json."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from pagewire.common.gguf import read_settings, unserved

_FILE = "config_sentence_transformers.json"
_EMPTY = {"query": "", "document": ""}  # sentence-transformers adds these if the file lacks them


@dataclass(frozen=True, slots=True)
class EmbeddingPrompts:
    """The texts that precede texts to embed, by name, and the name of the default."""

    texts: Mapping[str, str] = field(default_factory=dict)
    default: str | None = None  # None: without a prompt


def read_embedding_prompts(directory: Path) -> EmbeddingPrompts:
    """Read the prompts of a checkpoint directory. The result has none if the file is missing. Raise ValueError if the
    file cannot be read or its default is not one of its prompts."""
    path = directory / _FILE
    config = read_settings(path)
    texts, default = config.get("prompts") or {}, config.get("default_prompt_name")
    if not isinstance(texts, dict) or not all(isinstance(text, str | None) for text in texts.values()):
        raise unserved(path, "prompts", texts, "an object of texts")
    if default not in (None, *texts, *_EMPTY):
        raise unserved(path, "default_prompt_name", default, f"one of {', '.join(texts)}, or null")
    known = _EMPTY if config else {}
    return EmbeddingPrompts({**known, **{name: text or "" for name, text in texts.items()}}, default)
