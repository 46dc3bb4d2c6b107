"""Text to token ids off the event loop, and token ids to text as they come.

`TextDecoder` never lets half a character out, and holds text back while it may become a stop text.
"""

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import decoders

from pagewire.common.gguf.tokenizer_files import read_tokenizer
from scheduler_service.serving.turns import on_thread

# Prompt tokens that a decoder looks at, so that the first output token knows whether a space stands before it.
_NUM_CONTEXT_TOKENS = 6
# A character has at most 4 bytes: of those at the end that are unreadable so far, 3 may begin one.
_MAX_HELD_CHARS = 3
# Beyond this the decoder lets go of the oldest tokens of its window, but keeps those whose characters are held.
_MAX_WINDOW_TOKENS = 64
_NUM_KEPT_TOKENS = 8
_NUM_THREADS = 2
_REPLACEMENT = "\ufffd"
_NAME_OF_BYTE = "<0x{:02X}>"  # as sentencepiece writes it
# How byte-level tokenizers write bytes in names of tokens: what can be printed as it is, the others from U+0100 on.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES_OF_CHARS = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + at): byte for at, byte in enumerate(_OTHERS)}
_Result = TypeVar("_Result")
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # of glibc


def load_tokenizer(path: Path, text: str | None = None) -> HuggingFaceTokenizer:
    """Load a tokenizer.json with what the files beside it say, or what stands for it in a GGUF file: the `text`, where
    that has been read. Raises ValueError if it cannot be read."""
    try:
        return HuggingFaceTokenizer.from_str(text or read_tokenizer(path))
    except ValueError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{path} is not a tokenizer: {error}") from error


class Tokenizer:
    """A model's tokenizer."""

    def __init__(self, path: Path, text: str | None = None) -> None:
        """See `load_tokenizer`."""
        self._tokenizer = load_tokenizer(path, text)
        self._path = path
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenizer")
        self._long_text_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer of long texts")
        self.max_token_bytes = _max_token_bytes(self._tokenizer)
        # Byte-level tokens are bytes, whatever stands around them: what one alone makes of whole characters stays.
        self._has_pieces = isinstance(self._tokenizer.decoder, decoders.ByteLevel)
        self._byte_tokens = _byte_tokens(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_texts = frozenset(token.content for token in added.values() if token.special)
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self._pieces: dict[bool, dict[int, str]] = {True: {}, False: {}}  # by skip_special_tokens
        self._bytes: dict[int, bytes] = {}  # of tokens that were asked for

    async def encode(
        self,
        text: str,
        max_tokens: int,
        then: Callable[[list[int]], _Result],
        *,
        add_special_tokens: bool = True,
        is_long: bool = False,
    ) -> _Result | int:
        """Return what `then` makes of the token ids of a prompt, with the special tokens that belong around one or
        without; their number where there are more than `max_tokens`. Raises ValueError for a text that it has no
        tokens for.

        Long texts have a thread of their own, so that no other waits for one.
        """
        threads, encode = (self._long_text_thread, self._encode_long) if is_long else (self._threads, self._encode)
        return await on_thread(threads, partial(encode, text, max_tokens, add_special_tokens, then))

    def decode(self, token_ids: Sequence[int], *, skip_special_tokens: bool) -> str:
        if self._byte_tokens.keys().isdisjoint(token_ids):
            return self._tokenizer.decode(list(token_ids), skip_special_tokens=skip_special_tokens)
        skipped = self.special_token_ids if skip_special_tokens else frozenset[int]()
        shown = (token_id for token_id in token_ids if token_id not in skipped)
        names: list[str] = []
        for is_byte, run in itertools.groupby(shown, self._byte_tokens.__contains__):
            if is_byte:
                names += _names_of_bytes(bytes(self._byte_tokens[token_id] for token_id in run))
            else:
                names += [name for name in map(self._tokenizer.id_to_token, run) if name is not None]
        return self._tokenizer.decoder.decode(names)

    def piece(self, token_id: int, *, skip_special_tokens: bool) -> str | None:
        """The text of a token that is the same in any context, after text that ends with a whole character. None if it
        is not."""
        pieces = self._pieces[skip_special_tokens]
        piece = pieces.get(token_id)
        if piece is None:
            if not self._has_pieces:
                return None
            piece = pieces[token_id] = self.decode((token_id,), skip_special_tokens=skip_special_tokens)
        return None if _REPLACEMENT in piece else piece

    def name_of(self, token_id: int) -> str:
        """The name that a token has in the vocabulary, or none."""
        return self._tokenizer.id_to_token(token_id) or ""

    def bytes_of(self, token_id: int) -> bytes:
        """The bytes that a token adds to a text, which need not be whole characters; of a special one those of its
        name."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._find_bytes(token_id)
        return known

    def text_decoder(
        self,
        prompt_token_ids: Sequence[int],
        *,
        stop: Sequence[str],
        min_tokens: int,
        include_stop_text: bool,
        skip_special_tokens: bool,
    ) -> "TextDecoder":
        decoder = IncrementalDecoder(self, prompt_token_ids, skip_special_tokens=skip_special_tokens)
        return TextDecoder(decoder, stop=stop, min_tokens=min_tokens, include_stop_text=include_stop_text)

    def _find_bytes(self, token_id: int) -> bytes:
        if token_id in self._added:
            return self._added[token_id]
        if token_id in self._byte_tokens:
            return bytes((self._byte_tokens[token_id],))
        name = self.name_of(token_id)
        if self._has_pieces and all(char in _BYTES_OF_CHARS for char in name):
            return bytes(_BYTES_OF_CHARS[char] for char in name)
        # Behind another, as itself: a text's first token may lose its space.
        one, two = (self.decode((token_id,) * count, skip_special_tokens=False) for count in (1, 2))
        return two[len(one) :].encode()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._long_text_thread.shutdown(wait=False, cancel_futures=True)

    def _encode_long(
        self, text: str, max_tokens: int, add_special_tokens: bool, then: Callable[[list[int]], _Result]
    ) -> _Result | int:
        try:
            return self._encode(text, max_tokens, add_special_tokens, then)
        finally:
            # The allocator of most Linux systems would keep freed memory: hundreds of megabytes after a text of one.
            # Other threads run meanwhile.
            if _malloc_trim is not None:
                _malloc_trim(0)

    def _encode(
        self, text: str, max_tokens: int, add_special_tokens: bool, then: Callable[[list[int]], _Result]
    ) -> _Result | int:
        try:
            # Only the functions for batches let other threads run meanwhile.
            (encoding,) = self._tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except BaseException as error:  # its panics are no Exceptions: a pattern that takes too many steps, say
            raise ValueError(f"{self._path} makes no tokens of this text: {error}") from None
        # No other thread runs while a list of ids is made.
        return then(encoding.ids) if len(encoding) <= max_tokens else len(encoding)


def _max_token_bytes(tokenizer: HuggingFaceTokenizer) -> int | None:
    """Count the bytes of text of the longest token, or None where a token is not the bytes that its name has."""
    if not isinstance(tokenizer.decoder, decoders.ByteLevel) or tokenizer.normalizer is not None:
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None  # it takes the spaces around it along, however many
    # A byte-level token's name has a character for each byte; that of an added one is its text.
    lengths = [len(name) for name in tokenizer.get_vocab(with_added_tokens=False)]
    return max([*lengths, *(len(token.content.encode()) for token in added)], default=None)


def _byte_tokens(tokenizer: HuggingFaceTokenizer) -> dict[int, int]:
    """Return the tokens that stand for one byte each, of a tokenizer that has such for characters without a token."""
    if tokenizer.decoder is None or b'"ByteFallback"' not in tokenizer.decoder.__getstate__():
        return {}
    found = {tokenizer.token_to_id(_NAME_OF_BYTE.format(byte)): byte for byte in range(256)}
    return {token_id: byte for token_id, byte in found.items() if token_id is not None}


def _names_of_bytes(run: bytes) -> Iterator[str]:
    """Yield names of tokens for a run of bytes, in which each byte that belongs to no character is a replacement
    character of its own. The library would make one of every byte of such a run, those of whole characters too."""
    for char in run.decode(errors="surrogateescape"):
        if "\ud800" <= char <= "\udfff":
            yield _REPLACEMENT
        else:
            yield from map(_NAME_OF_BYTE.format, char.encode())


class IncrementalDecoder:
    """Joins tokens to text so that the parts concatenate to the text of the whole.

    A token's text depends on its neighbours, so a window of tokens is decoded and what is new in it goes out (after
    TGI's prefix and read offsets). Replacement characters at its end may be half a character and wait.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._window = list(prompt_token_ids[-_NUM_CONTEXT_TOKENS:])
        self._num_read = len(self._window)  # tokens of the window whose text is out
        text = self._decode()
        self._num_chars_out = _num_certain(text)  # of the window's text
        self._is_whole = self._num_chars_out == len(text)  # everything is out, and it ends with a whole character

    def push(self, token_ids: Sequence[int]) -> str:
        """Return the text that these tokens completed."""
        if self._is_whole and len(token_ids) == 1:
            piece = self._tokenizer.piece(token_ids[0], skip_special_tokens=self._skip_special_tokens)
            if piece is not None:
                self._window[:] = token_ids
                self._num_read = 1
                self._num_chars_out = len(piece)
                return piece
        # A window of tokens without text would not know whether a space stands before the next one.
        self._window.extend(token_id for token_id in token_ids if token_id not in self._skipped)
        text = self._decode()
        num_certain = _num_certain(text)
        new = text[self._num_chars_out : num_certain]
        self._num_chars_out += len(new)
        self._is_whole = num_certain == len(text)
        if self._is_whole and new:
            # The window now begins with what was new, and everything in it is out.
            del self._window[: self._num_read]
            self._num_read = len(self._window)
            self._num_chars_out = len(self._decode())
        elif len(self._window) > _MAX_WINDOW_TOKENS:
            del self._window[:-_NUM_KEPT_TOKENS]
            self._num_read = 0
            self._num_chars_out = max(0, len(self._decode()) - (len(text) - num_certain))
        return new

    def flush(self) -> str:
        """Return the text that is left at the end, half a character included."""
        new = self._decode()[self._num_chars_out :]
        self._num_chars_out += len(new)
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip_special_tokens)


def _num_certain(text: str) -> int:
    """Count the characters that stay whatever tokens follow."""
    return max(len(text.rstrip(_REPLACEMENT)), len(text) - _MAX_HELD_CHARS)


class DecodedText(NamedTuple):
    """The text that some tokens completed. A tuple, because there is one for every token."""

    text: str
    stop_text: str | None = None  # the stop text that ended the output
    num_tokens: int = 0  # of the tokens given, those that belong to the output


class TextDecoder:
    """Makes the text of one output, and cuts it off at the first stop text."""

    def __init__(
        self, decoder: IncrementalDecoder, *, stop: Sequence[str], min_tokens: int, include_stop_text: bool
    ) -> None:
        """No stop text ends the output before it has more than `min_tokens` tokens."""
        self._decoder = decoder
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._include_stop_text = include_stop_text
        self._num_tokens = 0
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> DecodedText:
        """Return the text that is certain to stay. After a `stop_text` nothing may be pushed any more."""
        if not self._stop:
            return DecodedText(self._decoder.push(token_ids), None, len(token_ids))
        released: list[str] = []
        for position, token_id in enumerate(token_ids):
            self._num_tokens += 1
            self._held += self._decoder.push((token_id,))
            match = self._find_stop()
            if match is not None:
                text, stop_text = match
                return DecodedText("".join(released) + text, stop_text, position + 1)
            num_kept = self._num_chars_to_hold()
            released.append(self._held[: len(self._held) - num_kept])
            self._held = self._held[len(self._held) - num_kept :]
        return DecodedText("".join(released), num_tokens=len(token_ids))

    def flush(self) -> DecodedText:
        """Return the text that was held back, once the output has ended otherwise, up to a stop text that half a
        character at the end completes."""
        self._held += self._decoder.flush()
        text, stop_text = self._find_stop() or (self._held, None)
        self._held = ""
        return DecodedText(text, stop_text)

    def _find_stop(self) -> tuple[str, str] | None:
        """Find the earliest stop text in the held text: what stays of that, and the stop text."""
        if self._num_tokens <= self._min_tokens:
            return None
        matches = [(self._held.find(stop_text), stop_text) for stop_text in self._stop]
        found = min((match for match in matches if match[0] >= 0), default=None, key=lambda match: match[0])
        if found is None:
            return None
        start, stop_text = found
        return self._held[: start + len(stop_text) if self._include_stop_text else start], stop_text

    def _num_chars_to_hold(self) -> int:
        """Count the characters at the end of the held text with which a stop text may begin."""
        longest = 0
        for stop_text in self._stop:
            for length in range(min(len(stop_text) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop_text[:length]):
                    longest = length
                    break
        return longest
