"""Compiled grammars by content, so that one that comes again is not compiled again."""

from collections import OrderedDict

from pagewire.common.grammars.matcher import GrammarCompiler, Matcher

# What a compiled grammar takes besides its text, and a multiple of that.
_BYTES_EACH = 256 * 1024
_BYTES_PER_CHARACTER = 64

_Content = tuple[str, str, tuple[int, ...]]  # kind, text, end tokens


class GrammarCache:
    """Keeps the grammars that were used last, within a bound. Belongs to one thread."""

    def __init__(self, compiler: GrammarCompiler, max_bytes: int) -> None:
        """`max_bytes`: of all that is kept, as far as can be told from the grammars' texts."""
        self._compiler = compiler
        self._max_bytes = max_bytes
        self._kept: OrderedDict[_Content, Matcher] = OrderedDict()
        self._num_bytes = 0

    def get(self, kind: str, text: str, end_token_ids: tuple[int, ...]) -> Matcher:
        """Return a matcher of its own at a grammar's beginning. Raises GrammarError."""
        content = (kind, text, end_token_ids)
        kept = self._kept.get(content)
        if kept is not None:
            self._kept.move_to_end(content)
            return kept.copy()
        matcher = self._kept[content] = self._compiler.compile(kind, text, end_token_ids)
        self._num_bytes += _num_bytes(content)
        while self._num_bytes > self._max_bytes:
            forgotten, _ = self._kept.popitem(last=False)
            self._num_bytes -= _num_bytes(forgotten)
        return matcher.copy()


def _num_bytes(content: _Content) -> int:
    return _BYTES_EACH + _BYTES_PER_CHARACTER * len(content[1])
