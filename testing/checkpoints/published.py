"""Published config.json files of well-known repositories, in `configs/`, one file per repository.

`config` has every key of the published file. `reduced` has the smaller sizes for a model that a test can compute; an
object in it changes only the given keys of the published object.
"""

import json
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

FOLDER = Path(__file__).parent / "configs"


@dataclass(frozen=True)
class Published:
    """The files of one repository that describe its model and its tokenizer."""

    repository: str
    tokenizer_class: str | None  # in tokenizer_config.json
    vocabulary: str | None  # "bytes" or "pieces" (SentencePiece); None: the repository has no tokenizer.json
    config: dict[str, Any]
    reduced: dict[str, Any]

    @property
    def small_config(self) -> dict[str, Any]:
        return _merge(self.config, self.reduced)

    @property
    def is_bidirectional(self) -> bool:
        """Whether tokens attend to later tokens, too. Such a model makes embeddings."""
        return self.config.get("is_causal") is False or self.config.get("use_bidirectional_attention") is True

    @property
    def is_generator(self) -> bool:
        """Whether the model generates text: its attention is causal, and its head yields logits of tokens."""
        return not self.is_bidirectional and not self.config["architectures"][0].endswith("Classification")


@cache
def published() -> dict[str, Published]:
    """Return the published files by their repositories' names."""
    found = [Published(**json.loads(path.read_text())) for path in sorted(FOLDER.glob("*.json"))]
    return {each.repository: each for each in found}


def _merge(whole: dict[str, Any], changes: dict[str, Any]) -> dict[str, Any]:
    inner = {
        key: _merge(whole[key], value)
        for key, value in changes.items()
        if isinstance(value, dict) and isinstance(whole.get(key), dict)
    }
    return {**whole, **changes, **inner}
