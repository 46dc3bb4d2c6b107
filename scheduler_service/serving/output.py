"""The output of one sample, with its tokens, text, log-probabilities and end, and the position of a reader in it.

Publishing a token only appends it to a list, whatever the readers do. The published tokens are processed later on the
event loop: they are decoded to text, and the text is searched for stop texts.

An output that is not kept has one reader, and the part that was read is discarded. The unread part accumulates, so a
slow reader gets longer responses. The unread part is never larger than the sample itself.

An output that is kept can be read from any token on, any number of times. Its tokens are decoded one by one, so that
each token has its own text: the text that the token completed. Text that is released only at the end belongs to no
token, and follows the text of the last token.
"""

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, overload

from scheduler_service.core.request import EndReason, SequenceEnd, TokenLogprobs
from scheduler_service.serving.observer import NON_FAILURES

# The maximum number of tokens, or of prompt log-probabilities, in one delta. It keeps the delta's message far below a
# client's limit of 4 MiB.
MAX_DELTA_TOKENS = 2048
_BASE_BYTES = 4096  # estimated size of a sample without tokens
_BLOCK_CHARS = 1024  # length from which on a block of text is full


class Delta(NamedTuple):
    """A piece of the output of one sample: the tokens and text that are new since the previous delta. If the output did
    not fail, its last delta contains the field `end`.

    A delta is a tuple because one is created for every token. Creating a frozen dataclass takes four times as long.
    """

    sample_index: int
    first_token: int  # index in the output of the first of token_ids
    token_ids: Sequence[int]
    text: str = ""
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    cumulative_logprob: float | None = None  # up to the last token
    end: SequenceEnd | None = None
    stop_text: str | None = None  # set with `end`, if a stop text ended the output


class OutputDecoder(Protocol):
    """The interface of a detokenizer for the output of one sample. It receives the output tokens in order and returns
    their text."""

    def push(self, token_ids: Sequence[int]) -> tuple[str, str | None, int]:
        """Decode the next output tokens of the sample.

        Return a tuple: the new text, which later tokens cannot change; the stop text that ended the output, or None;
        and the number of given tokens that belong to the output.
        """

    def flush(self) -> tuple[str, str | None, int]:
        """Decode the text that the decoder still held back at the end of an output. Return a tuple: this text; the stop
        text that it contains, or None; and an unused number."""


class TextBlocks:
    """The text of an output, stored as a list of string blocks that can be appended to and sliced like one string.

    The cost of an append or a slice depends only on the length of the appended or sliced text. A single string would be
    copied as a whole at every append.
    """

    def __init__(self) -> None:
        self._blocks = [""]
        self._starts = [0]  # where each block begins
        self.num_chars = 0

    @property
    def num_bytes(self) -> int:
        return sum(map(sys.getsizeof, self._blocks))

    def append(self, text: str) -> None:
        self._blocks[-1] += text
        self.num_chars += len(text)
        if len(self._blocks[-1]) >= _BLOCK_CHARS:
            self._blocks.append("")
            self._starts.append(self.num_chars)

    def __getitem__(self, span: slice) -> str:
        if len(self._blocks) == 1:
            return self._blocks[0][span]
        start, stop, _ = span.indices(self.num_chars)
        first = bisect_right(self._starts, start) - 1
        begin = self._starts[first]
        return "".join(self._blocks[first : bisect_left(self._starts, stop)])[start - begin : stop - begin]

    def clear(self) -> None:
        if self.num_chars:
            self._blocks, self._starts, self.num_chars = [""], [0], 0


class LogprobColumns(Sequence[TokenLogprobs]):
    """A sequence of token log-probabilities that is stored compactly in arrays of numbers. It is used for outputs that
    remain in memory for a long time. An entry takes a few bytes; as Python objects it would take hundreds of bytes."""

    def __init__(self) -> None:
        self._ranks = array("I")  # one per position
        self._starts = array("I", [0])  # index below of each position's first entry, and the end
        self._token_ids = array("I")  # per position: its own token, then the most likely tokens
        self._logprobs = array("d")

    def __len__(self) -> int:
        return len(self._ranks)

    @property
    def num_bytes(self) -> int:
        return 8 * len(self._ranks) + 12 * len(self._token_ids)

    def extend(self, entries: Iterable[TokenLogprobs]) -> None:
        for entry in entries:
            self._ranks.append(entry.rank)
            self._token_ids.append(entry.token_id)
            self._logprobs.append(entry.logprob)
            for token_id, logprob in entry.top:
                self._token_ids.append(token_id)
                self._logprobs.append(logprob)
            self._starts.append(len(self._token_ids))

    @overload
    def __getitem__(self, position: int) -> TokenLogprobs: ...

    @overload
    def __getitem__(self, position: slice) -> list[TokenLogprobs]: ...

    def __getitem__(self, position: int | slice) -> TokenLogprobs | list[TokenLogprobs]:
        entries = map(self._entry, range(len(self))[position] if isinstance(position, slice) else (position,))
        return list(entries) if isinstance(position, slice) else next(entries)

    def _entry(self, position: int) -> TokenLogprobs:
        start, end = self._starts[position], self._starts[position + 1]
        (token_id, *top_token_ids), (logprob, *top_logprobs) = self._token_ids[start:end], self._logprobs[start:end]
        top = tuple(zip(top_token_ids, top_logprobs, strict=True))
        return TokenLogprobs(token_id, logprob, self._ranks[position], top)


class SampleRecord:
    """The output of one sample of a request so far: its tokens, text, log-probabilities and end. Invariant S6: the
    record contains each token once, in order, and exactly one end.

    If the output is kept for further readers, a token takes about 16 bytes of memory. With log-probabilities it takes
    20 bytes more, and 12 bytes for each of the most likely tokens.
    """

    def __init__(
        self,
        index: int,
        decoder: OutputDecoder | None = None,
        *,
        label: int = 0,
        with_logprobs: bool = False,
        is_hypothesis: bool = False,
        keep_stop_token_text: bool = False,
        is_kept: bool = False,
        is_whole: bool = False,
    ) -> None:
        """Create an empty record for the sample with this index in its request. Without a `decoder`, the text of the
        output is empty. `label` identifies the sample in a ready list. With `keep_stop_token_text`, the output's text
        includes the text of the token that ends the output. With `is_kept`, the output remains in memory for further
        readers. With `is_whole`, it is read only once, when it is complete."""
        self.index = index
        self.label = label
        self.sequence_id = -1  # the engine's id, once the request is queued
        self._decoder = decoder
        self._with_logprobs = with_logprobs
        self._keep_stop_token_text = keep_stop_token_text
        self._is_kept = is_kept
        # Published, but not processed yet.
        self.is_queued = False  # the record waits to be processed
        self.num_published = 0
        self.last_token_at: float | None = None
        self._new_token_ids: list[int] = []
        self.new_logprobs: list[TokenLogprobs] = []
        self.new_prompt_logprobs: list[TokenLogprobs] = []
        self.published_end: SequenceEnd | None = None
        self._num_passed = 0  # tokens that were passed to the client directly
        # Processed.
        self.stop_text: str | None = None  # ended the output
        self.num_tokens = 0
        self.end: SequenceEnd | None = None  # set if the output did not fail
        self.failure: SequenceEnd | None = None  # set if the output failed
        self.is_over = False  # ended or failed, also if its text could not be decoded
        self.num_prompt_logprobs = 0
        # The columns below begin with this token and this prompt log-probability; earlier items were discarded.
        # Lists are faster if they are short, arrays are smaller.
        self.first_token = self._first_prompt_logprob = 0
        self._token_ids: MutableSequence[int] = array("I") if is_kept else []
        self._text = TextBlocks()
        self._text_ends: MutableSequence[int] = array("I") if is_kept else []  # end of each token's text
        self._make_logprobs: Callable[[], LogprobColumns | list[TokenLogprobs]]
        self._make_logprobs = LogprobColumns if is_kept or is_whole else list
        self._logprobs: LogprobColumns | list[TokenLogprobs] = self._make_logprobs()
        self._cumulative_logprobs: MutableSequence[float] = array("d") if is_kept else []  # up to each token
        self._cumulative_logprob: float | None = 0.0 if with_logprobs or is_hypothesis else None
        self._prompt_logprobs: LogprobColumns | list[TokenLogprobs] = self._make_logprobs()

    @property
    def num_bytes(self) -> int:
        """The estimated memory of this record, in bytes, if the output is kept for further readers."""
        columns = (self._logprobs, self._prompt_logprobs)
        in_columns = sum(each.num_bytes for each in columns if isinstance(each, LogprobColumns))
        return _BASE_BYTES + 16 * len(self._token_ids) + self._text.num_bytes + in_columns

    # Publishing

    def publish(self, token_id: int, now: float) -> None:
        if self.published_end is not None:
            raise RuntimeError(f"a token for sequence {self.sequence_id} after its end")
        self._new_token_ids.append(token_id)
        self.num_published += 1
        self.last_token_at = now

    def finish(self, end: SequenceEnd) -> None:
        """Record the end of a sample's output. `end` contains the final number of output tokens. Drop published tokens
        beyond this number, which exist if a stop text ended the output. Raise RuntimeError if the output has already
        ended, or if fewer tokens than this number were published."""
        if self.published_end is not None:
            raise RuntimeError(f"sequence {end.sequence_id} ended twice")
        if end.num_output_tokens > self.num_published:
            raise RuntimeError(
                f"sequence {end.sequence_id} ended with {end.num_output_tokens} tokens, "
                f"but {self.num_published} were published"
            )
        num_taken = self.num_published - len(self._new_token_ids)
        num_kept = max(0, end.num_output_tokens - num_taken)
        del self._new_token_ids[num_kept:]
        del self.new_logprobs[num_kept:]
        self.published_end = end

    def add(
        self,
        token_ids: Sequence[int],
        logprobs: Iterable[TokenLogprobs] = (),
        prompt_logprobs: Iterable[TokenLogprobs] = (),
        cumulative_logprob: float | None = None,
        end: SequenceEnd | None = None,
    ) -> None:
        """Publish several output tokens of a sample, their log-probabilities, and optionally the end of the output. For
        a hypothesis of a beam search, `cumulative_logprob` is the total log-probability, because its tokens have no
        log-probabilities of their own."""
        self._new_token_ids += token_ids
        self.num_published += len(token_ids)
        self.new_logprobs += logprobs
        self.new_prompt_logprobs += prompt_logprobs
        if cumulative_logprob is not None:
            self._cumulative_logprob = cumulative_logprob
        if end is not None:
            self.finish(end)

    # Processing

    def pop_plain_tokens(self) -> list[int] | None:
        """Remove and return the new output tokens, so that the caller can send them to the client directly. Readers of
        this record do not receive these tokens. Return None if the record has other new output too: log-probabilities
        or the end."""
        if self.published_end is not None or self.new_logprobs or self.new_prompt_logprobs:
            return None
        token_ids, self._new_token_ids = self._new_token_ids, []
        self._num_passed = self.num_published
        self.is_queued = False
        return token_ids

    def process_output(self) -> None:
        """Decode the published tokens to text and look for stop texts, so that readers can read the new output. The end
        of the output is processed together with the last token, or alone. At the end, the decoder releases all text
        that it held back."""
        self.is_queued = False
        self.is_over = self.published_end is not None
        if self.num_tokens < self._num_passed:
            self.num_tokens = self.first_token = self._num_passed
        token_ids, self._new_token_ids = self._new_token_ids, []
        logprobs: Sequence[TokenLogprobs] = ()
        if self.new_logprobs:
            logprobs, self.new_logprobs = self.new_logprobs, []
        if self.new_prompt_logprobs:
            self._prompt_logprobs.extend(self.new_prompt_logprobs)
            self.num_prompt_logprobs += len(self.new_prompt_logprobs)
            self.new_prompt_logprobs = []
        if self._is_kept and len(token_ids) > 1:
            last = len(token_ids) - 1
            for position in range(last):
                self._add(token_ids[position : position + 1], logprobs[position : position + 1])
            token_ids, logprobs = token_ids[last:], logprobs[last:]
        self._add(token_ids, logprobs, self.published_end)

    # Reading

    def has_more(self, first_token: int) -> bool:
        """Return whether a reader has anything left to read: tokens, text or the end of the output. The reader has read
        all tokens before index `first_token`."""
        if first_token < self.num_tokens or self.end is not None:
            return True
        return self._chars_before(first_token) < self._text.num_chars

    def delta(self, first_token: int, num_tokens: int) -> Delta:
        """Return a delta of `num_tokens` output tokens, beginning with the token of index `first_token`. If the delta
        reaches the last token of an output that ended without failure, the delta also contains the end."""
        start = first_token - self.first_token
        stop = start + num_tokens
        is_last = first_token + num_tokens == self.num_tokens
        end_of_text = self._text.num_chars if is_last else self._chars_before(first_token + num_tokens)
        text = self._text[self._chars_before(first_token) : end_of_text]
        logprobs: Sequence[TokenLogprobs] = ()
        cumulative_logprob = None
        if self._with_logprobs:
            logprobs = self._logprobs[start:stop]
            cumulative_logprob = self._cumulative_logprobs[stop - 1] if stop else self._cumulative_logprob
        delta = Delta(self.index, first_token, self._token_ids[start:stop], text, logprobs, (), cumulative_logprob)
        return self._ended(delta, self.end) if is_last and self.end is not None else delta

    def prompt_delta(self, first: int, count: int) -> Delta:
        """Return a delta with the log-probabilities of `count` prompt tokens. `first` is the index of the first of them
        among all prompt log-probabilities."""
        start = first - self._first_prompt_logprob
        return Delta(self.index, self.first_token, (), prompt_logprobs=self._prompt_logprobs[start : start + count])

    def forget(self) -> None:
        """Free the memory of all output that the only reader has read. Do nothing if the output is kept for further
        readers."""
        if self._is_kept:
            return
        self.first_token = self.num_tokens
        self._text.clear()
        self._token_ids.clear()
        self._text_ends.clear()
        if self._with_logprobs:
            self._logprobs = self._make_logprobs()
            self._cumulative_logprobs.clear()
        if self._prompt_logprobs:
            self._first_prompt_logprob = self.num_prompt_logprobs
            self._prompt_logprobs = self._make_logprobs()

    def _add(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs], end: SequenceEnd | None = None) -> None:
        """Decode tokens and append them to the output. The text of all these tokens is assigned to the last of them.
        Tokens after a stop text are dropped. If `end` is given, also record the end or failure of the output."""
        if self.stop_text is None:
            num_kept, text = self._decode(token_ids, end)
            if num_kept > 1:
                self._text_ends.extend([self._text.num_chars] * (num_kept - 1))
            if text:
                self._text.append(text)
            if num_kept:
                self.num_tokens += num_kept
                self._token_ids.extend(token_ids if num_kept == len(token_ids) else token_ids[:num_kept])
                self._text_ends.append(self._text.num_chars)
            if self._with_logprobs:
                self._add_logprobs(logprobs[:num_kept])
        if end is not None:
            if self.stop_text is None and end.reason not in NON_FAILURES:
                self.failure = end
            else:
                self.end = end

    def _decode(self, token_ids: Sequence[int], end: SequenceEnd | None) -> tuple[int, str]:
        """Decode the next tokens of the output. Return a tuple: the number of these tokens that belong to the output,
        and the text that they complete."""
        if self._decoder is None:
            return len(token_ids), ""
        with_text, text = token_ids, ""
        if end is not None and end.stop_token_id is not None and not self._keep_stop_token_text:
            with_text = token_ids[:-1]
        if with_text:
            text, self.stop_text, num_kept = self._decoder.push(with_text)
            if self.stop_text is not None:
                return num_kept, text
        if end is None:
            return len(token_ids), text
        rest, self.stop_text, _ = self._decoder.flush()
        # A stop token follows all text. It does not belong to the output if a stop text ended the output earlier.
        return len(token_ids if self.stop_text is None else with_text), text + rest

    def _add_logprobs(self, entries: Sequence[TokenLogprobs]) -> None:
        assert self._cumulative_logprob is not None
        for entry in entries:
            self._cumulative_logprob += entry.logprob
            self._cumulative_logprobs.append(self._cumulative_logprob)
        self._logprobs.extend(entries)

    def _chars_before(self, token: int) -> int:
        """Return the position in the stored text at which the text of a token begins. `token` is the index of the token
        in the output."""
        position = token - self.first_token
        return self._text_ends[position - 1] if position else 0

    def _ended(self, delta: Delta, end: SequenceEnd) -> Delta:
        """Return a copy of `delta` that also contains the end of an output that did not fail. If a stop text ended the
        output, the end reason is STOP."""
        reason, stop_token_id = (end.reason, end.stop_token_id) if self.stop_text is None else (EndReason.STOP, None)
        end = replace(end, reason=reason, stop_token_id=stop_token_id, num_output_tokens=self.num_tokens)
        return delta._replace(end=end, stop_text=self.stop_text, cumulative_logprob=self._cumulative_logprob)


class OutputReader:
    """A reader of the output of one sample. It remembers its position and returns the new output as deltas. If an
    output is not kept after reading, it has only one reader."""

    def __init__(self, output: SampleRecord, first_token: int = 0, max_tokens: int = MAX_DELTA_TOKENS) -> None:
        """Create a reader that begins at the output token of index `first_token`. Only a reader that begins at token 0
        receives the log-probabilities of the prompt's tokens. `max_tokens` is the maximum number of tokens in one
        delta."""
        self._output = output
        self._max_tokens = max_tokens
        self._next_token = first_token
        self._next_prompt_logprob = sys.maxsize if first_token else 0
        self.has_ended = False  # the output is over, and all of it was read

    def take(self) -> Iterable[Delta]:
        """Return the output that is new since the previous call as deltas, or an empty iterable if nothing is new. If
        the caller stops the iteration early, the next call returns the remaining deltas."""
        output = self._output
        self._next_token = max(self._next_token, output.first_token)  # earlier tokens bypassed the reader
        num_tokens = output.num_tokens - self._next_token
        if num_tokens > self._max_tokens or self._next_prompt_logprob < output.num_prompt_logprobs:
            return self._deltas()
        return (self._delta(num_tokens),) if num_tokens or self._is_due() else ()

    def _deltas(self) -> Iterator[Delta]:
        while self._next_prompt_logprob < self._output.num_prompt_logprobs:
            first = self._next_prompt_logprob
            self._next_prompt_logprob = min(first + self._max_tokens, self._output.num_prompt_logprobs)
            yield self._output.prompt_delta(first, self._next_prompt_logprob - first)
        while self._is_due():
            yield self._delta(min(self._output.num_tokens - self._next_token, self._max_tokens))

    def _is_due(self) -> bool:
        return not self.has_ended and self._output.has_more(self._next_token)

    def _delta(self, num_tokens: int) -> Delta:
        """Return the next delta of the output, with `num_tokens` tokens."""
        output = self._output
        delta = output.delta(self._next_token, num_tokens)
        self._next_token += num_tokens
        if self._next_token == output.num_tokens:
            self.has_ended = output.is_over
            if self._next_prompt_logprob >= output.num_prompt_logprobs:
                output.forget()
        return delta


@dataclass(slots=True, eq=False)
class ReadyList:
    """A list of samples that have new output, for one reader of many requests, such as a GenerateMany call. The reader
    empties the list when it is able to send more."""

    on_news: Callable[[], None]  # called on the event loop when `outputs` is no longer empty
    outputs: list[SampleRecord] = field(default_factory=list)  # with new items

    def take(self) -> list[SampleRecord]:
        outputs, self.outputs = self.outputs, []
        return outputs

    def put_back(self, outputs: Sequence[SampleRecord]) -> None:
        """Put back samples from which the caller has not read the new output. The next call of `take` returns them
        first."""
        self.outputs[:0] = outputs


@dataclass(slots=True)
class TokenCounts:
    """Two counters of output tokens: tokens that clients kept, and tokens that were computed but discarded, for example
    after a stop text."""

    num_kept: int = 0
    num_discarded: int = 0

    def count_kept_tokens(self, output: SampleRecord, num_kept: int) -> None:
        """Add the output tokens of an ended sample to the two counters. `num_kept` is the number of tokens that the
        client kept; the remaining tokens count as discarded."""
        num_kept = min(num_kept, output.num_published)
        self.num_kept += num_kept
        self.num_discarded += output.num_published - num_kept
