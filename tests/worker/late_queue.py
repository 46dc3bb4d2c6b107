"""Grammar masks that are late at random, from a seed, independent of the machine's speed."""

import random
from collections.abc import Sequence

from pagewire.common.grammars import MaskJob, MaskQueue


class LateQueue(MaskQueue):
    """A queue that computes masks on request, but randomly skips masks that have a deadline."""

    def __init__(self, seed: int, rate: float) -> None:
        super().__init__(has_threads=False)
        self._rng = random.Random(seed)
        self._rate = rate

    def finish(self, jobs: Sequence[MaskJob], deadline: float | None) -> None:
        in_time = [job for job in jobs if deadline is None or self._rng.random() >= self._rate]
        super().finish(in_time, None)
