"""Tells how far the model has loaded: one line for a load that is quick, one now and then for one that takes long."""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_INTERVAL = 10.0  # seconds


class LoadProgress:
    """A callback for `load_worker`, from the moment it is made."""

    def __init__(self, on_percent: Callable[[int], object], clock: Callable[[], float] = time.monotonic) -> None:
        """`on_percent` hears of every tensor; `clock` is in seconds."""
        self._on_percent = on_percent
        self._clock = clock
        self._started_at = self._told_at = clock()
        self._verb, self._to = "load", ""

    def tell_quantization(self, quantization: str) -> None:
        """Say from now on that the model is quantised while it loads."""
        self._verb, self._to = "quantis", f" to {quantization}"

    def __call__(self, num_loaded: int, num_tensors: int) -> None:
        now = self._clock()
        percent = 100 * num_loaded // max(num_tensors, 1)
        self._on_percent(percent)
        seconds = now - self._started_at
        if num_loaded == num_tensors:
            logger.info("%sed the model's %d tensors%s in %.1f s", self._verb, num_tensors, self._to, seconds)
        elif now - self._told_at >= _INTERVAL:
            self._told_at = now
            logger.info(
                "%sing the model%s: %d of %d tensors (%d %%) in %.0f s",
                self._verb,
                self._to,
                num_loaded,
                num_tensors,
                percent,
                seconds,
            )
