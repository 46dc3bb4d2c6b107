"""Makes token ids for a trace: equal blocks have equal tokens, and outputs are what the next prompt shows of them."""

from collections.abc import Iterable
from itertools import accumulate

from scheduler_service.simulation.trace import BlockRuns, Trace, TraceRequest, common_blocks, num_blocks


class TraceContent:
    """Makes prompts and outputs of a trace's block ids.

    Every content has a number, and all tokens of a block are that number. Whatever no block id names is the request's
    own: one number for each request.
    """

    def __init__(self, trace: Trace, scale: int) -> None:
        """`scale`: tokens of the trace that one token stands for. It divides the trace's block size."""
        self._trace = trace
        self._scale = scale
        self._num_block_tokens = trace.block_size // scale
        num_ids = [_num_ids(request.block_runs for request in session.requests) for session in trace.sessions]
        if trace.shares_blocks:
            self._num_contents = max(num_ids)
            self._bases = [0] * len(num_ids)
        else:
            *self._bases, self._num_contents = accumulate(num_ids, initial=0)

    def tokens(self, session: int, index: int) -> tuple[list[int], list[int]]:
        """Make the prompt and the output of a request of a session, both by index. Neither is empty."""
        requests = self._trace.sessions[session].requests
        request, base = requests[index], self._bases[session]
        num_prompt = max(1, round(request.num_prompt_tokens / self._scale))
        # The first token comes with the prompt; the others are as many as take the time of the trace's.
        num_output = 1 + round((request.num_output_tokens - 1) / self._scale)
        tokens = self._tokens_of(base, request.block_runs)
        num_known = len(tokens)
        if index + 1 < len(requests) and _goes_on(request, requests[index + 1]):
            tokens = self._tokens_of(base, requests[index + 1].block_runs)
            num_known = len(tokens)
        num_fresh = num_prompt + num_output - num_known
        if num_fresh > 0:
            self._num_contents += 1
            tokens += [self._num_contents] * num_fresh
        return tokens[:num_prompt], tokens[num_prompt : num_prompt + num_output]

    def _tokens_of(self, base: int, runs: BlockRuns) -> list[int]:
        repeats = range(self._num_block_tokens)
        return [
            number for first, count in runs for number in range(base + first, base + first + count) for _ in repeats
        ]


def _num_ids(prompts: Iterable[BlockRuns]) -> int:
    """Count the ids from 0 to the greatest."""
    return max((first + count for runs in prompts for first, count in runs), default=0)


def _goes_on(request: TraceRequest, following: TraceRequest) -> bool:
    """Whether the next prompt begins with all blocks of this one: then it shows what came behind them."""
    return common_blocks(request.block_runs, following.block_runs) == num_blocks(request.block_runs)
