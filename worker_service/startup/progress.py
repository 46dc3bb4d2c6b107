"""The progress of a worker's start. Clients that ask get it at once; the log gets it at intervals in a long start."""

import logging
import time
from collections.abc import Callable

logger = logging.getLogger(__name__)

_INTERVAL = 10.0  # seconds


class LoadProgress:
    """A receiver of progress reports while a model loads. It forwards them to a callback and, at intervals, to the log.

    Calling the object reports how many of the model's tensors have been loaded.
    """

    def __init__(self, on_doing: Callable[[str], object], clock: Callable[[], float] = time.monotonic) -> None:
        """Create a receiver.

        `on_doing` is called with the text of every report. `clock` returns the time in seconds.
        """
        self._on_doing = on_doing
        self._clock = clock
        self._started_at = self._logged_at = clock()
        self._verb, self._to = "load", ""

    def tell(self, doing: str) -> None:
        """Report the current phase of the worker's start as a text. If the start takes long, the text is logged too."""
        self._on_doing(doing)
        now = self._clock()
        if now - self._logged_at >= _INTERVAL:
            self._logged_at = now
            # A warning, so that it appears at any usual log level: an operator may be waiting for the server.
            logger.warning("%s", doing)

    def begin_tensors(self, quantization: str | None) -> None:
        """Report that the loading of the model's tensors begins.

        The tensors are quantised to `quantization` ("int8" or "int4") while they load, unless it is None.
        """
        self._verb, self._to = ("load", "") if quantization is None else ("quantis", f" to {quantization}")
        self._started_at = self._clock()
        self.tell(f"{self._verb}ing the model{self._to}")

    def __call__(self, num_loaded: int, num_tensors: int) -> None:
        seconds = self._clock() - self._started_at
        if num_loaded == num_tensors:
            logger.info("%sed the model's %d tensors%s in %.1f s", self._verb, num_tensors, self._to, seconds)
            self.tell("packing the weights, making room for the KV cache")
        else:
            self.tell(
                f"{self._verb}ing the model{self._to}: {num_loaded} of {num_tensors} tensors "
                f"({100 * num_loaded // num_tensors} %) in {seconds:.0f} s"
            )
