"""One epoch with a worker of several ranks, tensor parallel: every rank gets every plan, and all must answer alike."""

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import replace

from pagewire.common.messages import StepPlan, StepResult, WorkerCapacity, WorkerProtocolError
from pagewire.common.worker_wire import encode_request
from scheduler_service.rpc.worker.worker_session import Session, SessionEnded
from scheduler_service.serving.step_loop import StepLoop

logger = logging.getLogger(__name__)

# What the ranks of a worker must have in common, and what all of them can do.
_EQUAL = ("vocab_size", "block_size", "dtype", "sliding_window", "tables_digest")
_LEAST = (
    "max_model_len",
    "max_num_seqs",
    "max_num_batched_tokens",
    "num_device_blocks",
    "num_host_blocks",
    "swap_bandwidth",
)


class RankedSession:
    """The step loop's way to all ranks; it ends when any of the ranks' sessions does.

    A result counts when all ranks have given it, so that none has more plans than it takes; they compute in step, and
    none waits for long. The tokens are rank 0's.
    """

    def __init__(self, step_loop: StepLoop, epoch: int, on_plan_sent: Callable[[int], None], num_ranks: int) -> None:
        self.sessions = [Session(_RankEvents(self, rank), epoch, on_plan_sent) for rank in range(num_ranks)]
        self._step_loop = step_loop
        self._epoch = epoch
        self._on_plan_sent = on_plan_sent
        self._capacities: dict[int, WorkerCapacity] = {}  # by rank
        self._results: list[deque[StepResult]] = [deque() for _ in range(num_ranks)]  # that others have yet to give
        self._moved_steps = [0] * num_ranks
        self._last_moved_step = 0
        self._silent_ranks: dict[int, set[int]] = {}  # that have yet to tell of a grammar, by its id
        self._failed_grammars: set[int] = set()  # of those; all but the first rank to say so are not listened to

    def send(self, plan: StepPlan) -> None:
        for grammar_id in plan.released_grammar_ids:
            self._silent_ranks.pop(grammar_id, None)
            self._failed_grammars.discard(grammar_id)
        for added in plan.added_grammars:
            self._silent_ranks[added.grammar_id] = set(range(len(self.sessions)))
        message = encode_request(plan)
        self._on_plan_sent(message.ByteSize())
        for session in self.sessions:
            session.pass_on(plan, message)

    def close(self, reason: str) -> None:
        self.sessions[0].close(reason)

    def rank_ready(self, rank: int, capacity: WorkerCapacity) -> None:
        """Raises SessionEnded if the ranks do not fit together."""
        self._capacities[rank] = capacity
        if len(self._capacities) == len(self.sessions):
            self._step_loop.worker_ready(self._capacity(), self._epoch, self)

    def rank_moved(self, rank: int, step: int) -> None:
        self._moved_steps[rank] = step
        if min(self._moved_steps) > self._last_moved_step:
            self._last_moved_step = min(self._moved_steps)
            self._step_loop.moved(self._last_moved_step)

    def rank_grammar_ready(self, rank: int, grammar_id: int, error: str) -> None:
        """A grammar is ready when all ranks have it, and fails with the first that has not. Raises WorkerProtocolError
        for one that a rank tells of twice."""
        silent = self._silent_ranks.get(grammar_id)
        if silent is None:  # released, or never added, which the step loop knows
            self._step_loop.grammar_ready(grammar_id, error)
            return
        if rank not in silent:
            raise WorkerProtocolError(f"rank {rank} told twice of grammar {grammar_id}")
        silent.remove(rank)
        if grammar_id in self._failed_grammars:
            return
        if error:
            self._failed_grammars.add(grammar_id)
            self._step_loop.grammar_ready(grammar_id, f"rank {rank}: {error}")
        elif not silent:
            self._step_loop.grammar_ready(grammar_id, "")

    def rank_result(self, rank: int, result: StepResult) -> None:
        """Raises WorkerProtocolError if the ranks do not agree."""
        self._results[rank].append(result)
        while all(self._results):
            first, *others = (results.popleft() for results in self._results)
            for other_rank, other in enumerate(others, start=1):
                _check_equal(first, other_rank, other)
            self._step_loop.result(replace(first, last_moved_step=self._last_moved_step))

    def _capacity(self) -> WorkerCapacity:
        first, *others = (self._capacities[rank] for rank in range(len(self.sessions)))
        for rank, other in enumerate(others, start=1):
            for name in _EQUAL:
                if getattr(other, name) != getattr(first, name):
                    raise SessionEnded(
                        f"rank {rank} has {name} {getattr(other, name)}, rank 0 has {getattr(first, name)}; start all "
                        "ranks of a worker with the same flags"
                    )
        least = {name: min(getattr(capacity, name) for capacity in (first, *others)) for name in _LEAST}
        return replace(
            first,
            **least,
            grammar_version=self._grammar_version(),
            weight_bytes=sum(capacity.weight_bytes for capacity in self._capacities.values()),
            gates_grammars=any(capacity.gates_grammars for capacity in self._capacities.values()),
        )

    def _grammar_version(self) -> str:
        """Empty, so that grammars alone are refused, where the ranks' differ."""
        versions = [self._capacities[rank].grammar_version for rank in range(len(self.sessions))]
        if len(set(versions)) == 1:
            return versions[0]
        found = ", ".join(f"rank {rank} has {version or 'none'}" for rank, version in enumerate(versions))
        logger.warning("ranks read grammars by different versions of llguidance, so none are taken: %s", found)
        return ""


class _RankEvents:
    """Hears of the session with one rank, and says which rank that is."""

    def __init__(self, ranks: RankedSession, rank: int) -> None:
        self._ranks = ranks
        self._rank = rank

    def worker_ready(self, capacity: WorkerCapacity, epoch: int, link: Session) -> None:
        self._ranks.rank_ready(self._rank, capacity)

    def moved(self, step: int) -> None:
        self._ranks.rank_moved(self._rank, step)

    def grammar_ready(self, grammar_id: int, error: str) -> None:
        self._ranks.rank_grammar_ready(self._rank, grammar_id, error)

    def result(self, result: StepResult) -> None:
        self._ranks.rank_result(self._rank, result)


def _check_equal(first: StepResult, rank: int, other: StepResult) -> None:
    """Tokens that differ would be followed by different keys and values: nothing of the epoch can be trusted."""
    if other.step != first.step:
        raise WorkerProtocolError(f"rank {rank} answered step {other.step} where rank 0 answered step {first.step}")
    chosen = [
        (result.statuses, result.token_ids, result.candidates.token_ids, result.candidates.counts)
        for result in (first, other)
    ]
    if chosen[0] != chosen[1]:
        raise WorkerProtocolError(f"rank {rank} chose other tokens in step {first.step} than rank 0")
