"""All that one sample has got, its tokens, text and log-probabilities, and how it ended; and a reader's place in it.

Publishing a token is an append, whatever the readers do. What was published is taken in later, when its turn comes:
then text is made of it, and stop texts are looked for.

An output that is not kept has one reader, and what that one has read is forgotten: deltas that come before it reads
again wait here together, so that a slow reader gets longer responses, and what waits is at most the sample itself. An
output that is kept can be read from any token on, any number of times: its tokens are decoded one by one, so that each
has a text of its own, which is what it completed. Text that comes with the end alone belongs to no token and follows
the last.
"""

import sys
from array import array
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable, Iterator, MutableSequence, Sequence
from dataclasses import dataclass, field, replace
from typing import NamedTuple, Protocol, overload

from scheduler_service.core.request import EndReason, SequenceEnd, TokenLogprobs
from scheduler_service.serving.observer import ENDED_WELL

# Tokens, or prompt log-probabilities, of one delta: keeps a message of it far below a client's limit of 4 MiB.
MAX_DELTA_TOKENS = 2048
_BASE_BYTES = 4096  # of a sample without a token, and of what stands around it
_BLOCK_CHARS = 1024  # of a text that is appended to, after which a new block begins


class Delta(NamedTuple):
    """What one sample got since the last delta. The last one of an output that ended well has `end`.

    A tuple, because there is one for every token, and a frozen dataclass takes four times as long to make.
    """

    sample_index: int
    first_token: int  # index in the output of the first of token_ids
    token_ids: Sequence[int]
    text: str = ""
    logprobs: Sequence[TokenLogprobs] = ()
    prompt_logprobs: Sequence[TokenLogprobs] = ()
    cumulative_logprob: float | None = None  # up to the last token
    end: SequenceEnd | None = None
    stop_text: str | None = None  # with its end, which it is the reason for


class OutputDecoder(Protocol):
    """Makes the text of one output."""

    def push(self, token_ids: Sequence[int]) -> tuple[str, str | None, int]:
        """Return the text that is certain to stay, the stop text that ended the output, and how many of the tokens
        belong to it."""

    def flush(self) -> tuple[str, str | None, int]:
        """Return the text that was held back, and a stop text in it."""


class TextBlocks:
    """The text of an output, in blocks.

    The cost of an append or a slice depends on its own length alone, where a string would be copied whole.
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
    """Log-probabilities that are kept for long: a few bytes each, where objects would take hundreds."""

    def __init__(self) -> None:
        self._ranks = array("I")  # by position
        self._starts = array("I", [0])  # where those of each position begin below, and where the last end
        self._token_ids = array("I")  # of a position, its own token comes first
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
    """The output of one sample so far: each token once, in order, and exactly one end (S6). A token that is kept takes
    some 16 bytes; with log-probabilities 20 more, and 12 for each of the most likely tokens."""

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
        """Without a `decoder` all text is empty. `label` is its name in a ready list. `keep_stop_token_text`: the token
        that ends the output leaves text. `is_whole`: it is read once, at its end."""
        self.index = index
        self.label = label
        self.sequence_id = -1  # in the engine, once the request is queued
        self._decoder = decoder
        self._with_logprobs = with_logprobs
        self._keep_stop_token_text = keep_stop_token_text
        self._is_kept = is_kept
        # What was published, and is to be taken in.
        self.is_queued = False  # it waits for that
        self.num_published = 0
        self.last_token_at: float | None = None
        self._new_token_ids: list[int] = []
        self.new_logprobs: list[TokenLogprobs] = []
        self.new_prompt_logprobs: list[TokenLogprobs] = []
        self.published_end: SequenceEnd | None = None
        self._num_passed = 0  # tokens that went to the client past all readers
        # What was taken in.
        self.stop_text: str | None = None  # that ended the output
        self.num_tokens = 0
        self.end: SequenceEnd | None = None  # the output ended well
        self.failure: SequenceEnd | None = None  # the output ended, but not well
        self.is_over = False  # one of them, or its text could not be made
        self.num_prompt_logprobs = 0
        # What was forgotten is in none of the columns below, which begin with this token and prompt log-probability.
        # Lists are faster where little is in them, arrays smaller.
        self.first_token = self._first_prompt_logprob = 0
        self._token_ids: MutableSequence[int] = array("I") if is_kept else []
        self._text = TextBlocks()
        self._text_ends: MutableSequence[int] = array("I") if is_kept else []  # where in the text each token's own ends
        self._make_logprobs: Callable[[], LogprobColumns | list[TokenLogprobs]]
        self._make_logprobs = LogprobColumns if is_kept or is_whole else list
        self._logprobs: LogprobColumns | list[TokenLogprobs] = self._make_logprobs()
        self._cumulative_logprobs: MutableSequence[float] = array("d") if is_kept else []  # up to each token
        self._cumulative_logprob: float | None = 0.0 if with_logprobs or is_hypothesis else None
        self._prompt_logprobs: LogprobColumns | list[TokenLogprobs] = self._make_logprobs()

    @property
    def num_bytes(self) -> int:
        """Estimate the memory that an output which is kept takes."""
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
        """Take the end, which says how many tokens the output has; those published past a stop text are dropped."""
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
        """Publish all of this. The `cumulative_logprob` is that of a hypothesis, whose tokens have none of their
        own."""
        self._new_token_ids += token_ids
        self.num_published += len(token_ids)
        self.new_logprobs += logprobs
        self.new_prompt_logprobs += prompt_logprobs
        if cumulative_logprob is not None:
            self._cumulative_logprob = cumulative_logprob
        if end is not None:
            self.finish(end)

    # Taking in

    def take_tokens(self) -> list[int] | None:
        """Take what is new past all readers, if that is nothing but tokens; None otherwise."""
        if self.published_end is not None or self.new_logprobs or self.new_prompt_logprobs:
            return None
        token_ids, self._new_token_ids = self._new_token_ids, []
        self._num_passed = self.num_published
        self.is_queued = False
        return token_ids

    def take_in(self) -> None:
        """Take in what is new. The end comes with the last token, or alone; with it comes all text there is."""
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
        """Say whether there is anything to tell from a token on."""
        if first_token < self.num_tokens or self.end is not None:
            return True
        return self._chars_before(first_token) < self._text.num_chars

    def delta(self, first_token: int, num_tokens: int) -> Delta:
        """Make a delta of so many tokens from one on. With the last token comes the end, if the output has ended
        well."""
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
        """Make a delta of so many log-probabilities of prompt tokens from one on."""
        start = first - self._first_prompt_logprob
        return Delta(self.index, self.first_token, (), prompt_logprobs=self._prompt_logprobs[start : start + count])

    def forget(self) -> None:
        """Forget everything so far, which has been read, unless the output is kept."""
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
        """Take tokens whose text comes with the last of them. Those after a stop text do not belong to the output."""
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
            if self.stop_text is None and end.reason not in ENDED_WELL:
                self.failure = end
            else:
                self.end = end

    def _decode(self, token_ids: Sequence[int], end: SequenceEnd | None) -> tuple[int, str]:
        """Return how many of the next tokens belong to the output, and the text that they complete."""
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
        # A token that ended the output stands behind all text.
        return len(token_ids if self.stop_text is None else with_text), text + rest

    def _add_logprobs(self, entries: Sequence[TokenLogprobs]) -> None:
        assert self._cumulative_logprob is not None
        for entry in entries:
            self._cumulative_logprob += entry.logprob
            self._cumulative_logprobs.append(self._cumulative_logprob)
        self._logprobs.extend(entries)

    def _chars_before(self, token: int) -> int:
        """Return where in the text that of a token begins."""
        position = token - self.first_token
        return self._text_ends[position - 1] if position else 0

    def _ended(self, delta: Delta, end: SequenceEnd) -> Delta:
        """Make a delta the last one of an output that ended well."""
        reason, stop_token_id = (end.reason, end.stop_token_id) if self.stop_text is None else (EndReason.STOP, None)
        end = replace(end, reason=reason, stop_token_id=stop_token_id, num_output_tokens=self.num_tokens)
        return delta._replace(end=end, stop_text=self.stop_text, cumulative_logprob=self._cumulative_logprob)


class OutputReader:
    """One reader's place in an output: the only one, if the output is not kept."""

    def __init__(self, output: SampleRecord, first_token: int = 0, max_tokens: int = MAX_DELTA_TOKENS) -> None:
        """Prompt log-probabilities are for those who read from the beginning. `max_tokens` are of one delta."""
        self._output = output
        self._max_tokens = max_tokens
        self._next_token = first_token
        self._next_prompt_logprob = sys.maxsize if first_token else 0
        self.has_ended = False  # everything was read of an output that is over

    def take(self) -> Iterable[Delta]:
        """Make the deltas that are due, none if there is nothing new. Each is made when it is taken: those that are
        left are due the next time."""
        output = self._output
        self._next_token = max(self._next_token, output.first_token)  # those before have passed
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
        """Make the next delta, of so many tokens."""
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
    """The place where outputs of many requests wait together for one reader, who takes them when it likes."""

    on_news: Callable[[], None]  # called on the event loop when `outputs` is no longer empty
    outputs: list[SampleRecord] = field(default_factory=list)  # those with something new

    def take(self) -> list[SampleRecord]:
        outputs, self.outputs = self.outputs, []
        return outputs

    def put_back(self, outputs: Sequence[SampleRecord]) -> None:
        """Give back outputs that were taken, but not read: they come first the next time."""
        self.outputs[:0] = outputs


@dataclass(slots=True)
class TokenCounts:
    """How many output tokens clients got, and how many were computed beyond what they got."""

    num_kept: int = 0
    num_discarded: int = 0

    def settle(self, output: SampleRecord, num_kept: int) -> None:
        """An output is over of which it was not known what is kept."""
        num_kept = min(num_kept, output.num_published)
        self.num_kept += num_kept
        self.num_discarded += output.num_published - num_kept
