"""Matchers, which track a grammar's state and report the allowed next tokens, and their compiler and cache."""

import ctypes
import json
from collections import OrderedDict
from collections.abc import Container, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from importlib import metadata

from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from llguidance.gbnf_to_lark import any_to_lark

from pagewire.common.grammars.json_schema import for_llguidance
from pagewire.common.grammars.literals import BYTE_PIECES, Alphabet, Literal, literals_of
from pagewire.common.grammars.structural_tag import structural_tag_to_lark
from pagewire.common.strict_json import from_json


def _limits(max_items_in_row: int, step_max_items: int) -> LLParserLimits:
    return LLParserLimits(
        max_items_in_row=max_items_in_row,
        initial_lexer_fuel=200_000,
        step_lexer_fuel=30_000,
        step_max_items=step_max_items,
        max_lexer_states=30_000,
        verbose_errors=False,
    )


# These limits bound the time of a mask, most of all the limit on the items in a row. A large schema has many items of
# one rule and one beginning, which are cheap. An ambiguous grammar needs time cubic in the number of items: 1.4 ms per
# output token with 300, and 43 ms with 1000. Only the kind "grammar" lets users write such rules.
_LIMITS = _limits(1_000, 5_000)
_OWN_GRAMMAR_LIMITS = _limits(300, 4_000)
# Where only one text can follow, the library would allow only the tokens into which the tokenizer splits that text. But
# a tokenizer may normalize the text to another form of Unicode, or read a token's name in it.
_ANY_TOKENS = '%llguidance {"no_forcing": true}'
# Estimated memory of a compiled grammar: a constant, and a multiple of its text's length.
_BYTES_EACH = 256 * 1024
_BYTES_PER_CHARACTER = 64
_REMEMBERED = 0.95  # the factor by which the slowest time decays from one mask to the next
_LIMIT_REASONS = ("LexerTooComplex", "ParserTooComplex")
_DEAD_END_REASON = "NoExtension"
_LIMIT_TEXTS = ("Current row has", "Too many items", "too many expressions")  # in errors without a reason code

_Content = tuple[str, str, tuple[int, ...]]  # kind, text, end tokens


class GrammarError(ValueError):
    """A grammar cannot be compiled, does not allow a token of the output, or allows no next token. The error message
    gives the reason.
    """


class GrammarLimitError(GrammarError):
    """A grammar needs more work or memory than the limits allow, either to compile or to compute a token mask."""


class GrammarDeadEndError(GrammarError):
    """A grammar allows no next token although the output is incomplete, because no tokens of the tokenizer spell the
    text that must follow.
    """


def version() -> str:
    """Return the version of the grammar library llguidance. The result of a grammar may differ between versions."""
    return metadata.version("llguidance")


@contextmanager
def _as_grammar_errors() -> Iterator[None]:
    """Convert all errors of the grammar library llguidance in the body of a `with` to GrammarError. Panics in
    llguidance's Rust code, which are not subclasses of Exception, are converted too.
    """
    try:
        yield
    except (GrammarError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:
        raise GrammarError(f"the grammar cannot be read: {error}") from None


class MaskCost:
    """An estimate of the time in seconds to compute the next token mask of a grammar. The estimate rises at once to the
    time of a slower mask, and decays with each faster mask.
    """

    def __init__(self) -> None:
        self.seconds = 0.0

    def observe(self, seconds: float) -> None:
        """Record how long the computation of a token mask took, and update the estimate."""
        self.seconds = max(seconds, _REMEMBERED * self.seconds)


@dataclass(frozen=True, slots=True)
class _MaskSizes:
    """The two sizes of a token mask: the number of tokens for which the grammar library computes bits, and the number
    of logits of the model. The tokenizer may have more tokens than the model has logits.
    """

    num_tokens: int
    vocab_size: int

    def cut(self, address: int, mask_bytes: int) -> None:
        """Clear the bits of a token mask for tokens without a logit. Raises GrammarDeadEndError if the mask then allows
        no token.
        """
        if num_bits := self.vocab_size % 32:
            last = ctypes.c_uint32.from_address(address + mask_bytes - 4)
            last.value &= (1 << num_bits) - 1
        if not ctypes.string_at(address, mask_bytes).strip(b"\0"):
            raise GrammarDeadEndError("the grammar allows only tokens that the model has no logits for")


class Matcher:
    """The state of a grammar after the tokens that one sequence has produced so far. The state determines which tokens
    the grammar allows next.
    """

    def __init__(self, state: LLMatcher, end_token_ids: frozenset[int], pace: MaskCost, sizes: _MaskSizes) -> None:
        self._state = state
        self._end_token_ids = end_token_ids
        self._sizes = sizes
        self.pace = pace  # shared by all matchers of the grammar
        self.end_token_id: int | None = None  # the end token that was consumed; after it no other token is allowed

    def copy(self) -> "Matcher":
        """Return an independent copy of the matcher, in the same state of the grammar."""
        copied = Matcher(self._state.deep_copy(), self._end_token_ids, self.pace, self._sizes)
        copied.end_token_id = self.end_token_id
        return copied

    def consume(self, token_ids: Sequence[int]) -> None:
        """Advance the state of the grammar by tokens of the output. Tokens after the first end token are ignored.

        Raises GrammarError for a token that the grammar does not allow, and GrammarLimitError if a token needs too much
        work. The matcher is unusable after an error.
        """
        if self.end_token_id is not None:
            return
        end = next((i for i, token_id in enumerate(token_ids) if token_id in self._end_token_ids), None)
        with _as_grammar_errors():
            is_taken = self._state.consume_tokens(list(token_ids[:end]))
            is_taken = is_taken and (
                end is None
                or self._state.is_accepting()
                # The grammar names the end token itself and is complete with it.
                or (self._state.consume_tokens([token_ids[end]]) and self._state.is_accepting())
            )
        if not is_taken:
            raise self.error() or GrammarError("the grammar does not allow a token of the output")
        if end is not None:
            self.end_token_id = token_ids[end]

    def fill_mask(self, address: int, mask_bytes: int) -> None:
        """Write a mask of the tokens that the grammar allows next to the memory at `address`.

        The mask has one bit per token, from the lowest bit of the first int32. `mask_bytes` must be `4 *
        ceil(vocab_size / 32)`. If the output has ended, the mask allows only the end token. Raises GrammarDeadEndError
        if no token is allowed, GrammarLimitError if the mask needs too much work, and GrammarError for other errors of
        the library.
        """
        if self.end_token_id is not None:
            ctypes.memset(address, 0, mask_bytes)
            byte, bit = divmod(self.end_token_id, 8)
            ctypes.memset(address + byte, 1 << bit, 1)
            return
        long_bytes = 4 * -(-self._sizes.num_tokens // 32)
        with _as_grammar_errors():
            if long_bytes == mask_bytes:
                self._state.unsafe_compute_mask_ptr(address, mask_bytes)
            else:
                mask = ctypes.create_string_buffer(long_bytes)
                self._state.unsafe_compute_mask_ptr(ctypes.addressof(mask), long_bytes)
                ctypes.memmove(address, mask, mask_bytes)
        if error := self.error():
            raise error
        if self._sizes.num_tokens > self._sizes.vocab_size:
            self._sizes.cut(address, mask_bytes)

    def error(self) -> GrammarError | None:
        """Return the error that made this matcher of a grammar unusable, or None if the matcher is usable."""
        if not self._state.is_error():
            return None
        text = self._state.get_error()
        if text.startswith(_DEAD_END_REASON):
            return GrammarDeadEndError("the tokenizer has no tokens for the text that must come next")
        is_limit = self._state.stop_reason() in _LIMIT_REASONS or any(known in text for known in _LIMIT_TEXTS)
        return (GrammarLimitError if is_limit else GrammarError)(text)

    def forced_text(self) -> str:
        """Return the text that must come next according to the grammar. The text ends at the first point where the
        grammar allows several continuations.
        """
        return "" if self._state.is_error() else self._state.compute_ff_bytes().decode(errors="ignore")


class GrammarCompiler:
    """A compiler of grammars for one tokenizer. Only one thread may use a compiler."""

    def __init__(self, tokenizer_json: str, vocab_size: int) -> None:
        """Create a compiler of grammars for the tokenizer in `tokenizer_json`, the content of a tokenizer.json.
        `vocab_size` is the number of the model's logits. The tokenizer may have more tokens than the model has logits.
        """
        self._tokenizer_json = tokenizer_json
        num_tokens, added, special, self._spells_all = _tokens(tokenizer_json)
        self._known_alphabet: Alphabet | None = None  # None: not computed, or every text can be spelled
        self._sizes = _MaskSizes(max(vocab_size, num_tokens), vocab_size)
        self._token_names = {name: token_id for name, token_id in added.items() if token_id < vocab_size}
        self._special = {name: token_id for name, token_id in special.items() if token_id < vocab_size}
        self._tokenizers: dict[tuple[int, ...], LLTokenizer] = {}  # by end tokens

    def compile(self, kind: str, text: str, end_token_ids: tuple[int, ...]) -> Matcher:
        """Compile a grammar, and return a matcher in the grammar's initial state. Raises GrammarError if the grammar is
        invalid or needs characters that no tokens can spell, and GrammarLimitError if the grammar is too large.
        """
        with _as_grammar_errors():
            tokenizer = self._tokenizer(end_token_ids)
            special = {name: self._special[name] for name in _named_special_tokens(kind, text) if name in self._special}
            names = {name: token for name, token in (self._token_names | special).items() if token not in end_token_ids}
            alphabet = self._alphabet(tokenizer)
            alone = {name for name in names if alphabet and alphabet.missing(Literal(name))}
            grammar = f"{_to_lark(kind, text, names, alone)}\n{_ANY_TOKENS}"
            limits = _OWN_GRAMMAR_LIMITS if kind == "grammar" else _LIMITS
            state = LLMatcher(tokenizer, grammar, limits=limits, log_level=0)
        matcher = Matcher(state, frozenset(end_token_ids), MaskCost(), self._sizes)
        if error := matcher.error():
            raise error
        tokens = names if kind == "structural_tag" else ()
        if alphabet and (fault := alphabet.fault(literals_of(grammar), tokens)):
            raise GrammarError(fault)
        return matcher

    def _alphabet(self, tokenizer: LLTokenizer) -> Alphabet | None:
        """Return the set of characters that the tokenizer's tokens can spell, or None if the tokens can spell every
        text.
        """
        if self._spells_all:
            return None
        if self._known_alphabet is None:
            ids = (token_id for token_id in range(self._sizes.vocab_size) if not tokenizer.is_special_token(token_id))
            self._known_alphabet = Alphabet(tokenizer.decode_bytes([token_id]) for token_id in ids)
        return self._known_alphabet

    def _tokenizer(self, end_token_ids: tuple[int, ...]) -> LLTokenizer:
        if end_token_ids not in self._tokenizers:
            self._tokenizers[end_token_ids] = LLTokenizer(
                self._tokenizer_json, n_vocab=self._sizes.num_tokens, eos_token=list(end_token_ids)
            )
        return self._tokenizers[end_token_ids]


class GrammarCache:
    """A least-recently-used cache of compiled grammars, limited in memory. Only one thread may use a cache."""

    def __init__(self, compiler: GrammarCompiler, max_bytes: int) -> None:
        """Create an empty cache of compiled grammars. `max_bytes` limits the cache's memory, which is estimated from
        the length of each grammar's text.
        """
        self._compiler = compiler
        self._max_bytes = max_bytes
        self._kept: OrderedDict[_Content, Matcher] = OrderedDict()
        self._num_bytes = 0

    def get(self, kind: str, text: str, end_token_ids: tuple[int, ...]) -> Matcher:
        """Return a new matcher in the initial state of a grammar. The grammar is compiled if it is not in the cache.
        Raises GrammarError if the grammar is invalid.
        """
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


def _named_special_tokens(kind: str, text: str) -> list[str]:
    """Return the names of the special tokens that a structural tag lists in `special_tokens`. Where a text of the
    structural tag contains such a name, the model may produce the special token instead of the characters of its name.
    """
    tag = from_json(text) if kind == "structural_tag" else None
    names = tag.get("special_tokens") if isinstance(tag, dict) else None
    return [name for name in names if isinstance(name, str)] if isinstance(names, list) else []


def _tokens(tokenizer_json: str) -> tuple[int, dict[str, int], dict[str, int], bool]:
    """Read the tokens of a tokenizer from the content of its tokenizer.json. Return a tuple of four values:

    - the number of tokens;
    - the ids of the added tokens that are not special, by name. Only names of the form <...> are included, because the
      grammar library recognizes no other names in texts;
    - the ids of the special tokens by name;
    - True if every byte has a token.

    For a broken tokenizer return 0, no tokens and True; the library then reports the reason.
    """
    try:
        tokenizer = json.loads(tokenizer_json)
        vocab, added_tokens = tokenizer["model"]["vocab"], tokenizer.get("added_tokens") or ()
        names = set(vocab) if isinstance(vocab, dict) else {piece for piece, _ in vocab}
        num_tokens = len(names.union(added["content"] for added in added_tokens))
        shown = {added["content"]: int(added["id"]) for added in added_tokens if not added.get("special")}
        special = {added["content"]: int(added["id"]) for added in added_tokens if added.get("special")}
    except (ValueError, TypeError, KeyError, AttributeError):
        return 0, {}, {}, True
    spells_all = any(names.issuperset(each) for each in BYTE_PIECES)
    names_shown = {name: shown[name] for name in shown if name.startswith("<") and name.endswith(">")}
    return num_tokens, names_shown, special, spells_all


def _to_lark(kind: str, text: str, token_names: Mapping[str, int], alone: Container[str]) -> str:
    """Convert a request's grammar of any kind to a grammar in Lark, the syntax that llguidance reads. The result may
    still be invalid.

    The model may produce a token of `token_names` (ids by name) where a structural tag contains the token's name. It
    must do so for the names in `alone`, because no other tokens can spell them. Raises ValueError for an unknown kind,
    or for a text that does not fit the kind.
    """
    match kind:
        case "json_schema":
            return f"start: %json {json.dumps(for_llguidance(from_json(text)))}"
        case "json_object":
            return f"start: %json {json.dumps(for_llguidance({'type': 'object'}))}"
        case "regex":
            return json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
        case "choice":
            return "start: " + " | ".join(map(json.dumps, _choices(text)))
        case "grammar":
            return any_to_lark(text)
        case "structural_tag":
            return structural_tag_to_lark(text, token_names, alone)
    raise ValueError(f"this server does not support grammars of kind {kind}")


def _choices(text: str) -> list[str]:
    """Return the texts of a grammar of the kind "choice" without duplicates. The output must be one of these texts.
    Raises ValueError if `text` is no JSON array of at least one nonempty text.
    """
    choices = json.loads(text)
    if (
        not isinstance(choices, list)
        or not choices
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise ValueError(f"the choice is {text[:80]}, but must be a list of one or more texts that are not empty")
    return list(dict.fromkeys(choices))
