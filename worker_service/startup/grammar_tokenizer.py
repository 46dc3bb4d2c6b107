"""The preparation of grammars during the start. They use the model's own tokenizer."""

import json
import logging
from pathlib import Path
from typing import Any

from pagewire.common.gguf import GgufError, GgufFile, config_json, is_gguf, read_text
from pagewire.common.gguf.tokenizer_files import read_tokenizer
from pagewire.common.grammars import GrammarCache, GrammarCompiler, GrammarError, version
from worker_service.epoch_grammars import Compile, CompileThread, EpochGrammars

logger = logging.getLogger(__name__)

_MAX_KEPT_BYTES = 256 * 1024 * 1024  # limit for compiled grammars that are kept, of this epoch and of earlier ones
_TOKENIZER_FILE = "tokenizer.json"
_CONFIG_FILES = ("generation_config.json", "config.json")  # end tokens come from the first file that names them


class GrammarStart:
    """The preparation of grammar support, concurrent with the loading of the model."""

    def __init__(self, path: Path, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._thread = CompileThread(lambda: _make_compile(path, vocab_size))

    def finish(self) -> tuple[EpochGrammars, str]:
        """Return the grammars and the version of the grammar library.

        The version is "" if grammars are not supported.
        """
        try:
            self._thread.wait()
        except (GrammarError, GgufError, OSError, ValueError) as error:
            # A checkpoint without a tokenizer is served by token ids, so a missing tokenizer is not a warning.
            level = logging.INFO if isinstance(error, FileNotFoundError) else logging.WARNING
            logger.log(level, "requests for structured output will be refused: %s", error)
            return EpochGrammars(None, self._vocab_size), ""
        return EpochGrammars(self._thread, self._vocab_size), version()

    def give_up(self) -> None:
        """Stop the preparation, because the model cannot be loaded."""
        self._thread.stop()


def _make_compile(path: Path, vocab_size: int) -> Compile:
    """Return the compile function.

    Raises GrammarError, GgufError, OSError or ValueError if grammars are not supported.
    """
    file = path if is_gguf(path) else path / _TOKENIZER_FILE
    cache = GrammarCache(GrammarCompiler(read_tokenizer(file), vocab_size), _MAX_KEPT_BYTES)
    # Processes the vocabulary now, so that the first request need not wait for it.
    cache.get("regex", ".*", _end_token_ids(path) or (0,))
    return cache.get


def _end_token_ids(path: Path) -> tuple[int, ...]:
    """Return the end tokens of most requests. Each grammar names its own end tokens, which may differ."""
    for config in _configs(path):
        found = config.get("eos_token_id")
        if found is not None:
            return tuple(sorted(set(found if isinstance(found, list) else [found])))
    return ()


def _configs(path: Path) -> list[dict[str, Any]]:
    if is_gguf(path):
        return [config_json(GgufFile.open(path))]
    files = [path / name for name in _CONFIG_FILES]
    return [json.loads(read_text(file)) for file in files if file.is_file()]
