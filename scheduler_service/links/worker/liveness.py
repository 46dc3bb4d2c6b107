"""Whether a worker is alive, judged by what arrives from it, never by TCP. Pure: every event brings its `now`."""

from collections import deque

MAX_SILENCE = 2.5  # seconds without any message; a worker sends a heartbeat every second
MIN_STEP_LIMIT = 30.0  # seconds a step may take, however short it was expected to be
PREDICTION_FACTOR = 10.0
NEW_SHAPE_FACTOR = 4.0  # first steps of a bigger shape compile, allocate and load
MAX_OWN_GAP = 1.0  # seconds: if the judge itself was not running for longer, it has no case


class Liveness:
    def __init__(self, now: float) -> None:
        self._heard_at = now
        self._judged_at = now
        self._unacknowledged: deque[tuple[int, int]] = deque()  # step, shape
        self._progress_at = now  # when the oldest unacknowledged step became that
        self._longest_step = 0.0
        self._biggest_shape = 0
        self._unfinished_moves: deque[int] = deque()  # steps
        self._moves_progress_at = now  # when the oldest unfinished moves became that, or could begin
        self._last_finished_step = 0
        self._is_suspected = False

    def heard(self, now: float) -> None:
        self._heard_at = now

    def sent(self, step: int, num_tokens: int, now: float, *, has_moves: bool = False) -> None:
        """A plan went out. `num_tokens` are those its patches of the working set ask for."""
        if has_moves:
            self._unfinished_moves.append(step)
        if not self._unacknowledged:
            self._progress_at = now
        self._unacknowledged.append((step, num_tokens.bit_length()))

    def finished(self, step: int, duration: float, now: float) -> None:
        """A result came in; `duration` in seconds, as the worker measured it."""
        while self._unacknowledged and self._unacknowledged[0][0] <= step:
            self._biggest_shape = max(self._biggest_shape, self._unacknowledged.popleft()[1])
        self._longest_step = max(self._longest_step, duration)
        self._progress_at = now
        if self._unfinished_moves and self._last_finished_step < self._unfinished_moves[0] <= step:
            self._moves_progress_at = now
        self._last_finished_step = step

    def moved(self, step: int, now: float) -> None:
        """The moves of all plans up to this step are done."""
        while self._unfinished_moves and self._unfinished_moves[0] <= step:
            self._unfinished_moves.popleft()
        self._moves_progress_at = now

    def judge(self, now: float) -> str:
        """Why the worker must be given up, or nothing. Call it several times a second.

        A verdict takes two calls, so that between them whatever has arrived is read.
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
        # Moves begin with their step, so until that has finished it alone is judged.
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
