"""What the tokens of one sequence mean: which belong to the output, what text they make, and how the output ended."""

from collections.abc import Sequence

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.core.request import EndReason, SequenceEnd
from scheduler_service.serving.tokenizer import TextDecoder

_FINISH_REASONS = {
    EndReason.STOP: scheduler_pb2.FINISH_REASON_STOP,
    EndReason.LENGTH: scheduler_pb2.FINISH_REASON_LENGTH,
    EndReason.ABORT: scheduler_pb2.FINISH_REASON_ABORT,
}


class Transcript:
    """Takes the tokens of a sequence as they come, and says what is new in the output."""

    def __init__(self, decoder: TextDecoder | None, *, keep_stop_token_text: bool) -> None:
        """`decoder` None: all text is empty. `keep_stop_token_text`: the token that ends the output leaves text."""
        self._decoder = decoder
        self._keep_stop_token_text = keep_stop_token_text
        self._stop_text: str | None = None
        self.num_tokens = 0  # of the output so far
        self.end: SequenceEnd | None = None  # the output ended well
        self.failure: SequenceEnd | None = None  # the output ended, but not well

    @property
    def is_stopped(self) -> bool:
        """A stop text ended the output."""
        return self._stop_text is not None

    def add(self, first_token: int, token_ids: Sequence[int], end: SequenceEnd | None) -> tuple[int, str]:
        """How many of the next tokens belong to the output, and the text that they complete.

        Tokens after a stop text do not. The end comes with the last token, or alone; with it comes all text there is.
        """
        num_kept, text = 0, ""
        if self._stop_text is None:
            if first_token != self.num_tokens:
                raise RuntimeError(f"a delta begins at token {first_token}, but token {self.num_tokens} is next")
            num_kept, text = self._decode(token_ids, end)
            self.num_tokens += num_kept
        if end is not None and self._stop_text is None and end.reason not in _FINISH_REASONS:
            self.failure = end
        elif end is not None:
            self.end = end
        return num_kept, text

    def skip_to(self, num_tokens: int) -> None:
        """The output has this many tokens, which nobody wants the text of."""
        self.num_tokens = num_tokens

    def finish(self, response: scheduler_pb2.GenerateResponse, cumulative_logprob: float | None) -> None:
        """Make a response the last one of an output that ended well."""
        assert self.end is not None
        if self._stop_text is not None:
            response.finish_reason = scheduler_pb2.FINISH_REASON_STOP
            response.stop_text = self._stop_text
        else:
            response.finish_reason = _FINISH_REASONS[self.end.reason]
            if self.end.stop_token_id is not None:
                response.stop_token_id = self.end.stop_token_id
        if cumulative_logprob is not None:
            response.cumulative_logprob = cumulative_logprob
        response.usage.prompt_tokens = self.end.num_prompt_tokens
        response.usage.cached_tokens = self.end.num_cached_tokens
        response.usage.completion_tokens = self.num_tokens

    def _decode(self, token_ids: Sequence[int], end: SequenceEnd | None) -> tuple[int, str]:
        if self._decoder is None:
            return len(token_ids), ""
        num_with_text = len(token_ids)
        if end is not None and end.stop_token_id is not None and not self._keep_stop_token_text:
            num_with_text = max(0, num_with_text - 1)
        text = ""
        if num_with_text:
            decoded = self._decoder.push(token_ids[:num_with_text])
            text, self._stop_text = decoded.text, decoded.stop_text
            if decoded.stop_text is not None:
                return decoded.num_tokens, text
        return len(token_ids), text if end is None else text + self._decoder.flush()
