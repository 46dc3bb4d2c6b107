"""A worker's liveness, judged by the messages that arrive from it and never by TCP.

The module has no clock: every event has its time `now`, in seconds.
"""

from collections import deque

MAX_SILENCE = 2.5  # seconds without any message; a worker sends a heartbeat every second
MIN_STEP_LIMIT = 30.0  # seconds; every step may take at least this long
PREDICTION_FACTOR = 10.0
NEW_SHAPE_FACTOR = 4.0  # the first step of a larger shape may compile kernels, allocate memory and load code
MAX_OWN_GAP = 1.0  # seconds; after a longer pause of this process itself, the worker is not to blame


class Liveness:
    """A judge of whether one rank of the worker is alive. The judgement depends on the plans (steps to compute) that
    the scheduler sent to the rank, and on the messages that arrived from it."""

    def __init__(self, now: float) -> None:
        self._heard_at = now
        self._judged_at = now
        self._unacknowledged: deque[tuple[int, int]] = deque()  # step, shape
        self._progress_at = now  # when the current oldest unacknowledged step became the oldest
        self._longest_step = 0.0
        self._biggest_shape = 0
        self._unfinished_moves: deque[int] = deque()  # steps
        self._moves_progress_at = now  # when the oldest unfinished moves became the oldest, or could begin
        self._last_finished_step = 0
        self._is_suspected = False

    def heard(self, now: float) -> None:
        self._heard_at = now

    def sent(self, step: int, num_tokens: int, now: float, *, has_moves: bool = False) -> None:
        """Record that the plan of a step was sent to the rank. `num_tokens` is the number of tokens of the sequences
        that the plan lists; sequences that just continue to decode are not listed. `has_moves` means that the plan
        moves KV cache blocks between device and host memory."""
        if has_moves:
            self._unfinished_moves.append(step)
        if not self._unacknowledged:
            self._progress_at = now
        self._unacknowledged.append((step, num_tokens.bit_length()))

    def finished(self, step: int, duration: float, now: float) -> None:
        """Record that the result of a step arrived. `duration` is the duration of the step in seconds, as the worker
        measured it."""
        while self._unacknowledged and self._unacknowledged[0][0] <= step:
            self._biggest_shape = max(self._biggest_shape, self._unacknowledged.popleft()[1])
        self._longest_step = max(self._longest_step, duration)
        self._progress_at = now
        if self._unfinished_moves and self._last_finished_step < self._unfinished_moves[0] <= step:
            self._moves_progress_at = now
        self._last_finished_step = step

    def moved(self, step: int, now: float) -> None:
        """Record that the worker has finished moving KV cache blocks between device and host memory, for all plans up
        to `step`."""
        while self._unfinished_moves and self._unfinished_moves[0] <= step:
            self._unfinished_moves.popleft()
        self._moves_progress_at = now

    def judge(self, now: float) -> str:
        """Return the reason why the scheduler must give up the worker as dead, or an empty string while it is alive.
        The caller must call this method several times a second.

        The method returns a reason only if the previous call found one too. So the event loop can read messages that
        have already arrived before the worker is given up.
        """
        gap = now - self._judged_at
        self._judged_at = now
        if gap > MAX_OWN_GAP:
            self._heard_at = self._progress_at = self._moves_progress_at = now
        verdict = self._verdict(now)
        confirmed = verdict if self._is_suspected else ""
        self._is_suspected = bool(verdict)
        return confirmed

    def _verdict(self, now: float) -> str:
        silence = now - self._heard_at
        if silence > MAX_SILENCE:
            return f"the worker has been silent for {silence:.1f} s, the limit is {MAX_SILENCE} s"
        limit = max(MIN_STEP_LIMIT, PREDICTION_FACTOR * self._longest_step)
        # Moves begin with their step. Until the step has finished, only the step is judged.
        can_move = bool(self._unfinished_moves) and self._unfinished_moves[0] <= self._last_finished_step
        if can_move and now - self._moves_progress_at > limit:
            return f"the worker has not finished the moves of step {self._unfinished_moves[0]} in {limit:.0f} s"
        if not self._unacknowledged:
            return ""
        step, shape = self._unacknowledged[0]
        if shape > self._biggest_shape:
            limit *= NEW_SHAPE_FACTOR
        if now - self._progress_at > limit:
            return f"the worker has not finished step {step} in {limit:.0f} s"
        return ""
