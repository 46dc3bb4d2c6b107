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
    """The preparation of structured output during a worker's start, on a thread of its own while the model loads.

    The preparation reads the model's tokenizer and builds a grammar compiler for its vocabulary.
    """

    def __init__(self, path: Path, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._thread = CompileThread(lambda: _make_compile(path, vocab_size))

    def finish(self) -> tuple[EpochGrammars, str]:
        """Wait until grammars can be compiled. Return the worker's grammars and the version of the grammar library.

        If the model has no usable tokenizer, log the reason. The returned grammars then reject every grammar, and the
        version is "".
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
        """Stop the preparation of grammars, because the model cannot be loaded."""
        self._thread.stop()


def _make_compile(path: Path, vocab_size: int) -> Compile:
    """Read the model's tokenizer and return a function that compiles a grammar for its vocabulary.

    Raises GrammarError, GgufError, OSError or ValueError if the tokenizer is missing, invalid or not supported.
    """
    file = path if is_gguf(path) else path / _TOKENIZER_FILE
    cache = GrammarCache(GrammarCompiler(read_tokenizer(file), vocab_size), _MAX_KEPT_BYTES)
    # Processes the vocabulary now, so that the first request need not wait for it.
    cache.get("regex", ".*", _end_token_ids(path) or (0,))
    return cache.get


def _end_token_ids(path: Path) -> tuple[int, ...]:
    """Return the ids of the model's end-of-sequence tokens, from its configuration files. The result may be empty.

    Most requests use these end tokens. Each grammar names its own end tokens, which may differ.
    """
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
