"""Graphs by size, from the largest down, so that the others use its memory; what does not fit is done without."""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from worker_service.device.cuda import is_out_of_memory

logger = logging.getLogger(__name__)

G = TypeVar("G")
# Of what each rank passes: whether any does so. All ranks call it alike.
Agree = Callable[[Sequence[bool]], Sequence[bool]]


class SizedGraphs(Generic[G]):
    """What was captured for each size. Until `capture` there is nothing."""

    def __init__(self, sizes: Sequence[int], what: str) -> None:
        """`sizes`: rising; none: nothing is ever captured. `what`: they are sizes of, for logs."""
        self.sizes = tuple(sizes)
        self._what = what
        self._unfit: set[int] = set()  # memory did not suffice for them in this process
        self._missing: list[int] = []  # those that were told to be done without
        self._graphs: dict[int, G] = {}

    def capture(self, capture_size: Callable[[int], G], agree: Agree | None) -> None:
        """Capture every size that fits the memory.

        Where one does not, the next that is tried is at most half as large. A rank among others that runs out of memory
        has left them waiting in the middle of an exchange: it raises, and with the next epoch all do without that size.

        Args:
            agree: among ranks that exchange something when they capture; None: there are no others.
        """
        if not self.sizes:
            return
        if agree is not None:
            flags = agree([size in self._unfit for size in self.sizes])
            self._unfit |= {size for size, is_unfit in zip(self.sizes, flags, strict=True) if is_unfit}
        started = time.perf_counter()
        logger.info("capturing graphs for %d %s up to %d", len(self.sizes), self._what, self.sizes[-1])
        for size in reversed(self.sizes):
            if size in self._unfit:
                continue
            try:
                self._graphs[size] = capture_size(size)
            except Exception as error:
                if not is_out_of_memory(error):
                    raise
                self._unfit |= {other for other in self.sizes if other <= size < 2 * other}
                if agree is not None:
                    raise
            if size not in self._graphs:  # only now is nothing held by what was raised
                torch.cuda.empty_cache()
        logger.info("captured graphs for %d of them in %.1f s", len(self._graphs), time.perf_counter() - started)
        self._tell_missing()

    def drop(self) -> None:
        """Forget what was captured. It is not replayed again: until the next `capture` there is nothing."""
        self._graphs.clear()

    def size_for(self, size: int) -> int | None:
        """The smallest size that was captured and is no less; None: there is none."""
        return next((captured for captured in self.sizes if captured >= size and captured in self._graphs), None)

    def __getitem__(self, size: int) -> G:
        return self._graphs[size]

    def _tell_missing(self) -> None:
        missing = sorted(self._unfit)
        if missing != self._missing:
            self._missing = missing
            logger.warning(
                "the GPU's memory does not hold graphs for %d of %d %s, %d to %d: steps of these take the next larger "
                "graph or launch each kernel, which is slower: lower --max-graph-batch-size, --max-graph-tokens or "
                "--gpu-memory-utilization",
                len(missing),
                len(self.sizes),
                self._what,
                missing[0],
                missing[-1],
            )
