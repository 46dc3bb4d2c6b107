"""The seconds that a modelled worker takes.

Rates are in tokens of the trace; steps and blocks in tokens of the core, of which each stands for `scale` of the trace.
"""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerSpeed:
    """The rates of a worker that computes prompts one after another, and beside them decodes any number of rows at one
    rate. Moves between device and host go beside both."""

    prefill_rate: float  # prompt tokens per second
    decode_rate: float  # tokens per second of each row
    transfer_rate: float  # tokens per second, each way
    scale: int

    @property
    def max_step_tokens(self) -> int:
        """The token budget of a step: the prompt tokens that can be computed in the time in which every row decodes one
        token. Decoding rows take theirs from it too."""
        return max(1, round(self.prefill_rate / self.decode_rate))

    def step_s(self, num_prompt_tokens: int, num_decoding_rows: int) -> float:
        """The seconds of a step: those of its prompts, but where rows decode at least those of a token."""
        prompt_s = num_prompt_tokens * self.scale / self.prefill_rate
        return max(prompt_s, self.scale / self.decode_rate) if num_decoding_rows else prompt_s

    def transfer_s(self, num_tokens: int) -> float:
        """The seconds that so many tokens of the core take between device and host, one way."""
        return num_tokens * self.scale / self.transfer_rate

    def alone_s(self, num_prompt_tokens: int, num_output_tokens: int) -> float:
        """The seconds of a request that has the worker for itself, in tokens of the trace. The first token comes with
        the last of the prompt."""
        return num_prompt_tokens / self.prefill_rate + (num_output_tokens - 1) / self.decode_rate
