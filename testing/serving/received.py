"""The output that a client has received for a request: all of it, the beginning of it, or an error."""

from dataclasses import dataclass, field
from typing import Any

from pagewire.client.completion import Output
from pagewire.client.errors import PagewireError


@dataclass(slots=True)
class Sample:
    """The deltas of one sample, put together."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[Any] = field(default_factory=list)
    text: str = ""
    end: tuple[Any, ...] | None = None  # finish reason, stop reason, cumulative log-probability, embedding


@dataclass(slots=True)
class Received:
    """The output received for a request so far."""

    samples: dict[int, Sample] = field(default_factory=dict)
    prompt_logprobs: list[Any] = field(default_factory=list)
    error: tuple[str, str] | None = None  # its type, and its message

    def add(self, output: Output) -> None:
        sample = self.samples.setdefault(output.index, Sample())
        assert output.first_token == len(sample.token_ids), "tokens are lost or come twice"
        assert sample.end is None, "data follows the end of a sample"
        sample.token_ids += output.token_ids
        sample.logprobs += output.logprobs or ()
        sample.text += output.text
        self.prompt_logprobs += output.prompt_logprobs or ()
        if output.finish_reason is not None:
            cumulative = output.cumulative_logprob
            sample.end = (output.finish_reason, output.stop_reason, cumulative, output.embedding)

    def fail(self, error: PagewireError) -> None:
        self.error = (type(error).__name__, str(error))

    @property
    def num_tokens(self) -> int:
        return sum(len(sample.token_ids) for sample in self.samples.values())

    def begins(self, whole: "Received") -> bool:
        """Return whether this output is a beginning of the output `whole`."""
        return (
            all(
                index in whole.samples and _begins(sample, whole.samples[index])
                for index, sample in self.samples.items()
            )
            and self.prompt_logprobs == whole.prompt_logprobs[: len(self.prompt_logprobs)]
        )


def _begins(sample: Sample, whole: Sample) -> bool:
    if sample.end is not None and sample.end[0] != "abort":
        return sample == whole
    num = len(sample.token_ids)
    return sample.token_ids == whole.token_ids[:num] and sample.logprobs == whole.logprobs[: len(sample.logprobs)]
