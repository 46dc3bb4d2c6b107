"""Tokenization on threads, and incremental detokenization of outputs.

`TextDecoder` never releases an incomplete character. It holds text back as long as the text may begin a stop text.
"""

import ctypes
import itertools
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

from tokenizers import Encoding, decoders
from tokenizers import Tokenizer as HuggingFaceTokenizer

from pagewire.common.gguf.tokenizer_files import read_tokenizer
from scheduler_service.serving.checkpoint.infill_tokens import PromptParts, find_infill_tokens
from scheduler_service.serving.checkpoint.model_info import ModelInfo
from scheduler_service.serving.turns import on_thread

# The number of prompt tokens in a decoder's window. The space before the first output token depends on them.
_NUM_CONTEXT_TOKENS = 6
# A character has at most 4 bytes, so at most 3 undecodable bytes at the end can begin a character.
_MAX_HELD_CHARS = 3
# If the window is longer than this, the decoder drops its oldest tokens. It keeps the last tokens, whose characters may
# be held back.
_MAX_WINDOW_TOKENS = 64
_NUM_KEPT_TOKENS = 8
_NUM_THREADS = 2
_REPLACEMENT = "\ufffd"
_NAME_OF_BYTE = "<0x{:02X}>"  # as sentencepiece writes it
# In token names of byte-level tokenizers, printable bytes are themselves; other bytes are characters from U+0100 on.
_PRINTABLE = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES_OF_CHARS = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + at): byte for at, byte in enumerate(_OTHERS)}
_Result = TypeVar("_Result")
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # in glibc


def load_tokenizer(path: Path, text: str | None = None) -> HuggingFaceTokenizer:
    """Load a Hugging Face tokenizer from a tokenizer.json file and the files beside it, or from a GGUF file. `text` is
    the tokenizer in the format of tokenizer.json, if the caller has already read the file. Raise ValueError if the
    tokenizer cannot be read."""
    try:
        return HuggingFaceTokenizer.from_str(text or read_tokenizer(path))
    except ValueError:
        raise
    except Exception as error:  # the library raises bare Exceptions
        raise ValueError(f"{path} is not a tokenizer: {error}") from error


class Tokenizer:
    """A model's tokenizer. It encodes prompts on threads and decodes output tokens."""

    def __init__(self, path: Path, text: str | None = None, model: ModelInfo | None = None) -> None:
        """See `load_tokenizer`. Without the properties of the `model`, tokens for infilling are not recognized."""
        self._tokenizer = load_tokenizer(path, text)
        self._path = path
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="tokenizer")
        self._long_text_thread = ThreadPoolExecutor(1, thread_name_prefix="tokenizer of long texts")
        self.max_token_bytes = _max_token_bytes(self._tokenizer)
        # Byte-level tokens have the same bytes in any context, so a token of whole characters always has the same text.
        self._has_pieces = isinstance(self._tokenizer.decoder, decoders.ByteLevel)
        self._byte_tokens = _byte_tokens(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_token_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.special_texts = frozenset(token.content for token in added.values() if token.special)
        self._added = {token_id: token.content.encode() for token_id, token in added.items()}
        self.infill = None if model is None else find_infill_tokens(self._tokenizer, model)
        self._pieces: dict[bool, dict[int, str]] = {True: {}, False: {}}  # caches, by skip_special_tokens
        self._bytes: dict[int, bytes] = {}  # a cache, by token

    async def encode(
        self,
        prompt: str | PromptParts,
        max_tokens: int,
        then: Callable[[list[int]], _Result],
        *,
        add_special_tokens: bool = True,
        is_long: bool = False,
    ) -> _Result | int:
        """Tokenize a prompt on a thread, call `then` with the token ids on the same thread, and return the result of
        `then`. If the prompt has more than `max_tokens` tokens, do not call `then`, and return the number of tokens.
        With `add_special_tokens`, the special tokens that surround a prompt are added. Raise ValueError if a text
        cannot be tokenized.

        The `prompt` is a text, or the parts of a prompt for infilling. The texts in such parts never become tokens for
        infilling.

        With `is_long`, use a separate thread, so that short texts do not wait for long ones.
        """
        threads, encode = (self._long_text_thread, self._encode_long) if is_long else (self._threads, self._encode)
        return await on_thread(threads, partial(encode, prompt, max_tokens, add_special_tokens, then))

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
        """Return the text of a token, for an output whose text so far ends with a complete character. Return None if
        the text depends on the preceding tokens, or if the token ends within a character."""
        pieces = self._pieces[skip_special_tokens]
        piece = pieces.get(token_id)
        if piece is None:
            if not self._has_pieces:
                return None
            piece = pieces[token_id] = self.decode((token_id,), skip_special_tokens=skip_special_tokens)
        return None if _REPLACEMENT in piece else piece

    def name_of(self, token_id: int) -> str:
        """Return the entry of a token in the tokenizer's vocabulary, or an empty string if the token id is unknown."""
        return self._tokenizer.id_to_token(token_id) or ""

    def bytes_of(self, token_id: int) -> bytes:
        """Return the bytes that a token adds to a text. They may be only a part of a character in UTF-8. For a special
        token, return the bytes of its name."""
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
        # Decode the token after itself, because the first token of a text may lose its space.
        one, two = (self.decode((token_id,) * count, skip_special_tokens=False) for count in (1, 2))
        return two[len(one) :].encode()

    def close(self) -> None:
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._long_text_thread.shutdown(wait=False, cancel_futures=True)

    def _encode_long(
        self, prompt: str | PromptParts, max_tokens: int, add_special_tokens: bool, then: Callable[[list[int]], _Result]
    ) -> _Result | int:
        try:
            return self._encode(prompt, max_tokens, add_special_tokens, then)
        finally:
            # glibc would keep the freed memory: hundreds of megabytes after a text of one megabyte. The call releases
            # the interpreter's lock.
            if _malloc_trim is not None:
                _malloc_trim(0)

    def _encode(
        self, prompt: str | PromptParts, max_tokens: int, add_special_tokens: bool, then: Callable[[list[int]], _Result]
    ) -> _Result | int:
        if isinstance(prompt, str):
            encoding = self._encoding(self._tokenizer, prompt, add_special_tokens=add_special_tokens)
            # Creating the list of ids holds the interpreter's lock, so only do this if it is short enough.
            return then(encoding.ids) if len(encoding) <= max_tokens else len(encoding)
        assert self.infill is not None, "only prompts for infilling have parts"
        encodings = [part if isinstance(part, int) else self._encoding(self.infill.inner, part) for part in prompt]
        num_tokens = sum(1 if isinstance(each, int) else len(each) for each in encodings)
        return then(self.infill.join(encodings)) if num_tokens <= max_tokens else num_tokens

    def _encoding(self, tokenizer: HuggingFaceTokenizer, text: str, *, add_special_tokens: bool = False) -> Encoding:
        try:
            # Only the functions for batches release the interpreter's lock.
            (encoding,) = tokenizer.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        except BaseException as error:  # a Rust panic, as for a pattern with too many steps
            raise ValueError(f"{self._path} cannot tokenize this text: {error}") from None
        return encoding


def _max_token_bytes(tokenizer: HuggingFaceTokenizer) -> int | None:
    """Return the size in bytes of the longest text of a single token. Return None if this size cannot be determined
    from the vocabulary, because the text of a token may differ from its name."""
    if not isinstance(tokenizer.decoder, decoders.ByteLevel) or tokenizer.normalizer is not None:
        return None
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return None  # it includes any number of surrounding spaces
    # The name of a byte-level token has one character for each byte. The name of an added token is its text.
    lengths = [len(name) for name in tokenizer.get_vocab(with_added_tokens=False)]
    return max([*lengths, *(len(token.content.encode()) for token in added)], default=None)


def _byte_tokens(tokenizer: HuggingFaceTokenizer) -> dict[int, int]:
    """Return the tokens that represent a single byte, as a mapping from token id to byte. The mapping is empty if the
    tokenizer has no such tokens ("byte fallback")."""
    if tokenizer.decoder is None or b'"ByteFallback"' not in tokenizer.decoder.__getstate__():
        return {}
    found = {tokenizer.token_to_id(_NAME_OF_BYTE.format(byte)): byte for byte in range(256)}
    return {token_id: byte for token_id, byte in found.items() if token_id is not None}


def _names_of_bytes(run: bytes) -> Iterator[str]:
    """Yield the names of the tokens that represent these bytes, such as "<0x41>". For each byte that belongs to no
    complete character, yield the replacement character U+FFFD instead.

    If the bytes are not valid UTF-8, the tokenizer library would replace all of them, including complete characters.
    """
    for char in run.decode(errors="surrogateescape"):
        if "\ud800" <= char <= "\udfff":
            yield _REPLACEMENT
        else:
            yield from map(_NAME_OF_BYTE.format, char.encode())


class IncrementalDecoder:
    """A detokenizer that decodes the output tokens of one sample step by step. The concatenated results equal the text
    of all tokens.

    The text of a token depends on the neighbouring tokens. Therefore the decoder decodes the latest tokens together and
    returns only the new part of their text, like TGI with its prefix and read offsets. Replacement characters at the
    end of the text may belong to an incomplete character, so the decoder holds them back.
    """

    def __init__(self, tokenizer: Tokenizer, prompt_token_ids: Sequence[int], *, skip_special_tokens: bool) -> None:
        self._tokenizer = tokenizer
        self._skip_special_tokens = skip_special_tokens
        self._skipped = tokenizer.special_token_ids if skip_special_tokens else frozenset[int]()
        self._window = list(prompt_token_ids[-_NUM_CONTEXT_TOKENS:])
        self._num_read = len(self._window)  # tokens of the window whose text was released
        text = self._decode()
        self._num_chars_out = _num_certain(text)  # released, of the window's text
        self._is_whole = self._num_chars_out == len(text)  # all text was released, and ends with a whole character

    def push(self, token_ids: Sequence[int]) -> str:
        """Decode the next output tokens, and return the text that these tokens completed."""
        if self._is_whole and len(token_ids) == 1:
            piece = self._tokenizer.piece(token_ids[0], skip_special_tokens=self._skip_special_tokens)
            if piece is not None:
                self._window[:] = token_ids
                self._num_read = 1
                self._num_chars_out = len(piece)
                return piece
        # Special tokens without text are omitted: the space before the next token depends on tokens with text.
        self._window.extend(token_id for token_id in token_ids if token_id not in self._skipped)
        text = self._decode()
        num_certain = _num_certain(text)
        new = text[self._num_chars_out : num_certain]
        self._num_chars_out += len(new)
        self._is_whole = num_certain == len(text)
        if self._is_whole and new:
            # The window now begins with the new tokens, and all of its text was released.
            del self._window[: self._num_read]
            self._num_read = len(self._window)
            self._num_chars_out = len(self._decode())
        elif len(self._window) > _MAX_WINDOW_TOKENS:
            del self._window[:-_NUM_KEPT_TOKENS]
            self._num_read = 0
            self._num_chars_out = max(0, len(self._decode()) - (len(text) - num_certain))
        return new

    def flush(self) -> str:
        """Return the text that the decoder still holds back at the end of the output. An incomplete character at its
        end is returned as a replacement character."""
        new = self._decode()[self._num_chars_out :]
        self._num_chars_out += len(new)
        return new

    def _decode(self) -> str:
        return self._tokenizer.decode(self._window, skip_special_tokens=self._skip_special_tokens)


def _num_certain(text: str) -> int:
    """Return the number of characters of a decoded text that later tokens cannot change. These are the first characters
    of the text."""
    return max(len(text.rstrip(_REPLACEMENT)), len(text) - _MAX_HELD_CHARS)


class DecodedText(NamedTuple):
    """The result of `TextDecoder.push`: the text that the given output tokens completed. It is a tuple because one is
    created for every token."""

    text: str
    stop_text: str | None = None  # the stop text that ended the output
    num_tokens: int = 0  # how many of the given tokens belong to the output


class TextDecoder:
    """A detokenizer for the output of one sample that also detects stop texts. The decoded text ends at the first stop
    text."""

    def __init__(
        self, decoder: IncrementalDecoder, *, stop: Sequence[str], min_tokens: int, include_stop_text: bool
    ) -> None:
        """Create a detokenizer for one sample's output. `stop` contains the stop texts: the output ends at the first of
        them. The output cannot end at a stop text within its first `min_tokens` tokens. With `include_stop_text`, the
        decoded text includes the stop text."""
        self._decoder = decoder
        self._stop = tuple(stop)
        self._min_tokens = min_tokens
        self._include_stop_text = include_stop_text
        self._num_tokens = 0
        self._held = ""

    def push(self, token_ids: Sequence[int]) -> DecodedText:
        """Decode the next output tokens. Return the new text that later tokens cannot change, and the stop text if the
        output contains one. After a stop text, the output has ended, and the caller must not push more tokens."""
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
        """Return the text that the decoder still holds back, after an output that ended without a stop text. An
        incomplete character at its end may complete a stop text. In this case the returned text ends at the stop
        text."""
        self._held += self._decoder.flush()
        text, stop_text = self._find_stop() or (self._held, None)
        self._held = ""
        return DecodedText(text, stop_text)

    def _find_stop(self) -> tuple[str, str] | None:
        """Find the earliest stop text in the text that the decoder holds back. Return a tuple: the held-back text that
        belongs to the output, and the stop text. Return None if there is no stop text."""
        if self._num_tokens <= self._min_tokens:
            return None
        matches = [(self._held.find(stop_text), stop_text) for stop_text in self._stop]
        found = min((match for match in matches if match[0] >= 0), default=None, key=lambda match: match[0])
        if found is None:
            return None
        start, stop_text = found
        return self._held[: start + len(stop_text) if self._include_stop_text else start], stop_text

    def _num_chars_to_hold(self) -> int:
        """Return the length of the longest end of the decoded text that is the beginning of a stop text. The decoder
        must hold back these characters until more tokens arrive."""
        longest = 0
        for stop_text in self._stop:
            for length in range(min(len(stop_text) - 1, len(self._held)), longest, -1):
                if self._held.endswith(stop_text[:length]):
                    longest = length
                    break
        return longest
