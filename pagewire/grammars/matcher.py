"""A grammar's state, moved on by tokens, which says what tokens may come next."""

import ctypes
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib import metadata

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

from pagewire.grammars.source import to_llguidance


def _limits(max_items_in_row: int, step_max_items: int) -> LLParserLimits:
    return LLParserLimits(
        max_items_in_row=max_items_in_row,
        initial_lexer_fuel=200_000,
        step_lexer_fuel=30_000,
        step_max_items=step_max_items,
        max_lexer_states=30_000,
        verbose_errors=False,
    )


# What a mask may take follows from these, and what that is in seconds most of all from the items of a row. Those of one
# rule and one beginning are many in a large schema, and cheap; an ambiguous grammar takes time in their third power:
# 1.4 ms a token of the output with 300, 43 ms with 1000. Only in a grammar of their own can users write such rules.
_LIMITS = _limits(1_000, 5_000)
_OWN_GRAMMAR_LIMITS = _limits(300, 4_000)
_REMEMBERED = 0.95  # of what was slow, from one mask to the next
_LIMIT_REASONS = ("LexerTooComplex", "ParserTooComplex")
_LIMIT_TEXTS = ("Current row has", "Too many items", "too many expressions")  # of errors that come without a reason


class GrammarError(ValueError):
    """A grammar that cannot be read, a token that it refuses, or a state that allows none. The text says why."""


class GrammarLimitError(GrammarError):
    """A grammar that takes more work or memory than it may."""


def version() -> str:
    """The version of the library, on which depends what a grammar means."""
    return metadata.version("llguidance")


@contextmanager
def _caught() -> Iterator[None]:
    """Make errors of the library and its panics, which are no Exceptions, a GrammarError."""
    try:
        yield
    except (GrammarError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise GrammarError(f"the grammar cannot be read: {error}") from None


class MaskPace:
    """What the masks of a grammar take, as far as is known: as long as the slowest, which is forgotten by and by."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        """A mask took so long."""
        self.seconds = max(seconds, _REMEMBERED * self.seconds)


class Matcher:
    """The state of a grammar behind the tokens of one output."""

    def __init__(self, state: LLMatcher, end_token_ids: frozenset[int], pace: MaskPace) -> None:
        self._state = state
        self._end_token_ids = end_token_ids
        self.pace = pace  # of all matchers of the grammar
        self.end_token_id: int | None = None  # the end token that was consumed: from there on nothing else is allowed

    def copy(self) -> "Matcher":
        """Returns a matcher in the same state, which goes its own way."""
        copied = Matcher(self._state.deep_copy(), self._end_token_ids, self.pace)
        copied.end_token_id = self.end_token_id
        return copied

    def consume(self, token_ids: Sequence[int]) -> None:
        """Move on by tokens; those behind the first end token are not looked at. Raises GrammarError for one that is
        not allowed, GrammarLimitError; then the matcher is of no more use."""
        if self.end_token_id is not None:
            return
        end = next((i for i, token_id in enumerate(token_ids) if token_id in self._end_token_ids), None)
        with _caught():
            is_taken = self._state.consume_tokens(list(token_ids[:end]))
            is_taken = is_taken and (end is None or self._state.is_accepting())
        if not is_taken:
            raise self.error() or GrammarError("the grammar does not allow a token of the output")
        if end is not None:
            self.end_token_id = token_ids[end]

    def fill_mask(self, address: int, mask_bytes: int) -> None:
        """Write which tokens are allowed, a bit each, the lowest of int32 number 0 first, to memory of `mask_bytes`,
        which are `4 * ceil(vocab_size / 32)`. Behind an end token that one alone is. Raises GrammarError where no token
        is allowed, GrammarLimitError."""
        if self.end_token_id is not None:
            self._allow_end_alone(address, mask_bytes)
            return
        with _caught():
            self._state.unsafe_compute_mask_ptr(address, mask_bytes)
        if error := self.error():
            raise error

    def error(self) -> GrammarError | None:
        """Why the matcher is of no more use."""
        if not self._state.is_error():
            return None
        text = self._state.get_error()
        is_limit = self._state.stop_reason() in _LIMIT_REASONS or any(known in text for known in _LIMIT_TEXTS)
        return (GrammarLimitError if is_limit else GrammarError)(text)

    def _allow_end_alone(self, address: int, mask_bytes: int) -> None:
        assert self.end_token_id is not None
        ctypes.memset(address, 0, mask_bytes)
        byte, bit = divmod(self.end_token_id, 8)
        ctypes.memset(address + byte, 1 << bit, 1)


class GrammarCompiler:
    """Reads grammars for one tokenizer. Belongs to one thread."""

    def __init__(self, tokenizer_json: str, vocab_size: int) -> None:
        """`vocab_size`: the model's, as many tokens as it has logits."""
        self._tokenizer_json = tokenizer_json
        self._vocab_size = vocab_size
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}  # by end tokens

    def compile(self, kind: str, text: str, end_token_ids: tuple[int, ...]) -> Matcher:
        """Return a matcher at a grammar's beginning. Raises GrammarError, in the library's own words."""
        with _caught():
            limits = _OWN_GRAMMAR_LIMITS if kind == "grammar" else _LIMITS
            state = LLMatcher(self._tokenizer(end_token_ids), to_llguidance(kind, text), limits=limits, log_level=0)
        matcher = Matcher(state, frozenset(end_token_ids), MaskPace())
        if error := matcher.error():
            raise error
        return matcher

    def _tokenizer(self, end_token_ids: tuple[int, ...]) -> LLTokenizer:
        if end_token_ids not in self._tokenizers:
            self._tokenizers[end_token_ids] = LLTokenizer(
                self._tokenizer_json, n_vocab=self._vocab_size, eos_token=list(end_token_ids)
            )
        return self._tokenizers[end_token_ids]
