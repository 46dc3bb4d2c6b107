"""A comparison of the responses to a request with the expected output (S6).

Each token must arrive once, in order, with its text and log-probabilities. One end must follow with its reason, and
nothing after it.
"""

from collections.abc import Sequence

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from scheduler_service.api.grpc.generate_response import FINISH_REASONS
from scheduler_service.core.request import EndReason
from tests.sim.outputs.request import Output, SimulatedRequest
from tests.sim.outputs.toy_tokenizer import text_of

_REASONS = {number: reason for reason, number in FINISH_REASONS.items()}


class SampleView:
    """One sample, read from `first_token`."""

    def __init__(self, request: SimulatedRequest, index: int, first_token: int, *, has_text: bool) -> None:
        self._request = request
        self._index = index
        self._has_text = has_text
        self.first_token = first_token
        self.token_ids: list[int] = []
        self.text = ""
        self._num_logprobs = 0
        self._num_prompt_logprobs = 0
        self.end: EndReason | None = None

    @property
    def num_tokens(self) -> int:
        return self.first_token + len(self.token_ids)

    def take(self, response: pb.GenerateResponse) -> None:
        assert self.end is None, "S6: something comes after the end"
        if response.token_ids or response.HasField("usage"):
            assert response.first_token == self.num_tokens, "S6: a token is missing, or came twice"
        self.token_ids += response.token_ids
        self.text += response.text
        self._take_logprobs(response)
        self._take_prompt_logprobs(response.prompt_logprobs)
        if response.HasField("usage"):
            self.end = _REASONS[response.finish_reason]
            self._check_end(response)
        else:
            assert not response.finish_reason, "a reason without an end"
            self.check_so_far()

    def check_so_far(self) -> None:
        """Check that the received tokens and text are the beginning of the expected output."""
        output = self._output
        assert tuple(self.token_ids) == output.token_ids[self.first_token : self.num_tokens], "other tokens"
        assert not self._request.beam_width or not self.token_ids, "a token of a search that goes on"
        if self.first_token:
            assert self.text in self._whole_text, "text that is not the output's"
        else:
            assert self._whole_text.startswith(self.text), f"other text: {self.text!r}, not {output.text!r}"

    @property
    def _output(self) -> Output:
        return self._request.outputs[self._index]

    @property
    def _whole_text(self) -> str:
        return self._output.text if self._has_text else ""

    def begin_again(self) -> None:
        """Continue with another reader.

        A reader that begins with the first token receives the prompt's log-probabilities again.
        """
        if not self.num_tokens:
            self._num_prompt_logprobs = 0

    def _take_logprobs(self, response: pb.GenerateResponse) -> None:
        """Check the log-probabilities, in which the simulated worker encodes the number of tokens."""
        num_prompt_tokens = len(self._request.prompt_ids)
        if self._request.has_logprobs:
            assert len(response.logprobs) == len(response.token_ids), (
                "S6: log-probabilities are not those of the tokens"
            )
            for number, entry in enumerate(response.logprobs, self.num_tokens - len(response.logprobs) + 1):
                assert entry.logprob == -float(num_prompt_tokens + number), "S6: log-probabilities are of other tokens"
            count = self.num_tokens
            expected = -float(num_prompt_tokens * count + count * (count + 1) // 2)
            if response.token_ids or response.HasField("usage"):
                assert response.cumulative_logprob == expected, "a sum of other log-probabilities"
        else:
            assert not response.logprobs

    def _take_prompt_logprobs(self, entries: Sequence[pb.TokenLogprobs]) -> None:
        """Check that the log-probability of each prompt token but the first arrives once and in order."""
        if entries:
            assert self._request.has_prompt_logprobs
            assert not self.first_token, "the prompt is told to one who begins later"
            assert self._index == 0
            first = self._num_prompt_logprobs + 1
            tokens = self._request.prompt_ids[first : first + len(entries)]
            found = [(entry.token_id, entry.logprob) for entry in entries]
            assert found == [(token_id, -float(first + i)) for i, token_id in enumerate(tokens)], "S6: of other tokens"
            self._num_prompt_logprobs += len(entries)

    def _check_end(self, response: pb.GenerateResponse) -> None:
        request, output = self._request, self._output
        assert response.usage.prompt_tokens == len(request.prompt_ids)
        assert response.usage.completion_tokens == self.num_tokens, "the end counts other tokens"
        if self.end is EndReason.ABORT:
            assert tuple(self.token_ids) == output.token_ids[self.first_token : self.num_tokens], "other tokens"
            whole = text_of(output.token_ids[: self.num_tokens]) if self._has_text else ""
            assert whole.endswith(self.text), f"other text: {self.text!r}, not the end of {whole!r}"
            return
        assert self.end is output.reason, f"ended by {self.end}, not {output.reason}"
        assert tuple(self.token_ids) == output.token_ids[self.first_token :], "S6: tokens are missing at the end"
        if self.first_token:
            assert self._whole_text.endswith(self.text), f"other text: {self.text!r}, not the end of {output.text!r}"
        else:
            assert self.text == self._whole_text, f"other text: {self.text!r}, not {output.text!r}"
        stop = response.WhichOneof("stop")
        assert (response.stop_token_id if stop == "stop_token_id" else None) == output.stop_token_id
        assert (response.stop_text if stop == "stop_text" else None) == output.stop_text
        if output.cumulative_logprob is not None:
            assert response.cumulative_logprob == output.cumulative_logprob
        if request.has_prompt_logprobs and self._index == 0 and not self.first_token:
            assert self._num_prompt_logprobs == len(request.prompt_ids) - 1, "prompt log-probabilities are missing"


class View:
    """All samples of a request."""

    def __init__(
        self, request: SimulatedRequest, first_tokens: Sequence[int] | None = None, *, has_text: bool = True
    ) -> None:
        self.request = request
        self.samples = [
            SampleView(request, index, first_token, has_text=has_text)
            for index, first_token in enumerate(first_tokens or [0] * request.n)
        ]
        self.is_over = False

    def take(self, response: pb.GenerateResponse) -> None:
        assert not self.is_over, "S6: something comes when all has ended"
        assert response.request_id == self.request.name, "S6: a response to another request"
        self.samples[response.index].take(response)

    def begin_again(self) -> None:
        """Continue with another reader, from the position of the previous one."""
        for sample in self.samples:
            sample.begin_again()

    @property
    def has_ended_well(self) -> bool:
        return all(sample.end is not None for sample in self.samples)

    @property
    def num_tokens(self) -> list[int]:
        """The number of tokens of each sample, including the tokens before its first one."""
        return [sample.num_tokens for sample in self.samples]

    def finish(self, *, is_well: bool) -> None:
        """Check that the request has ended as expected, and expect no further response."""
        assert not self.is_over, "S6: it ended twice"
        self.is_over = True
        if is_well:
            assert self.has_ended_well, "S6: an end is missing"
            is_aborted = any(sample.end is EndReason.ABORT for sample in self.samples)
            assert is_aborted or not self.request.is_bad, "it ended well, though its logits are no numbers"
            assert not self.request.is_invalid, "it was taken"
