"""The numbers of this scheduler's epochs: milliseconds of Unix time, shifted by 20 bits.

So they rise from process to process by the time of its start, and within one by the low bits.
"""

from collections.abc import Callable

_SHIFT = 20
_MAX = 2**64 - 1
_MAX_LEAD_S = 24 * 3600.0  # that another scheduler's clock may have


class EpochsExhausted(Exception):
    """There is no number left for a higher epoch."""


class Epochs:
    def __init__(self, clock: Callable[[], float]) -> None:
        """`clock` gives seconds of Unix time."""
        self._clock = clock
        self._last = int(clock() * 1000) << _SHIFT

    def next(self) -> int:
        """Give an epoch above all that were given and heard of. Raises EpochsExhausted."""
        if self._last >= _MAX:
            raise EpochsExhausted(
                f"there is no epoch above {self._last}, which is {self._last >> _SHIFT} ms of Unix time; set this "
                "machine's clock"
            )
        self._last += 1
        return self._last

    def hear_of(self, epoch: int) -> bool:
        """Count on from an epoch of another scheduler. False if no clock leads to it: then it is left aside."""
        if epoch >> _SHIFT > int((self._clock() + _MAX_LEAD_S) * 1000):
            return False
        self._last = max(self._last, epoch)
        return True
