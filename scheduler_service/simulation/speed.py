"""The seconds that a modelled worker takes.

Rates are in tokens of the trace; steps and blocks in tokens of the core, of which each stands for `scale` of the trace.
"""

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class WorkerSpeed:
    """The rates of a worker that computes prompts one after another, and beside them decodes any number of rows at one
    rate. Moves between device and host go beside both."""

    prefill_rate: float  # prompt tokens per second
    decode_rate: float  # tokens per second of each row
    transfer_rate: float  # tokens per second, each way
    scale: int
    step_overhead_s: float = 0.0  # of a step that computes prompts, beside what their tokens take
    max_num_batched_tokens: int | None = None  # of a step; None: as many as keep it as short as one that decodes

    @property
    def max_step_tokens(self) -> int:
        """The token budget of a step. Decoding rows take theirs from it too. Unless it is given: the prompt tokens that
        can be computed in the time in which every row decodes one token."""
        if self.max_num_batched_tokens is not None:
            return self.max_num_batched_tokens
        return max(1, round((1 / self.decode_rate - self.step_overhead_s) * self.prefill_rate))

    def prompt_s(self, num_tokens: float) -> float:
        """The seconds that prompts take of so many tokens of the trace, in steps that are as full as can be."""
        return num_tokens / self.prefill_rate + math.ceil(num_tokens / self.max_step_tokens) * self.step_overhead_s

    def step_s(self, num_prompt_tokens: int, num_decoding_rows: int) -> float:
        """The seconds of a step: those of its prompts, but where rows decode at least those of a token."""
        prompt_s = self.prompt_s(num_prompt_tokens * self.scale)
        return max(prompt_s, self.scale / self.decode_rate) if num_decoding_rows else prompt_s

    def transfer_s(self, num_tokens: int) -> float:
        """The seconds that so many tokens of the core take between device and host, one way."""
        return num_tokens * self.scale / self.transfer_rate

    def alone_s(self, num_prompt_tokens: int, num_output_tokens: int) -> float:
        """The seconds of a request that has the worker for itself, in tokens of the trace. The first token comes with
        the last of the prompt."""
        return self.prompt_s(num_prompt_tokens) + (num_output_tokens - 1) / self.decode_rate
