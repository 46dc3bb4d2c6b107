"""Graphs by size, captured from the largest down so that smaller graphs reuse its memory.

A size that does not fit the memory is skipped.
"""

import logging
import time
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import torch

from worker_service.device.cuda import is_out_of_memory

logger = logging.getLogger(__name__)

G = TypeVar("G")
# Receives the flags of one rank and returns for each flag whether any rank has set it. All ranks must call it.
Agree = Callable[[Sequence[bool]], Sequence[bool]]


class SizedGraphs(Generic[G]):
    """Captured CUDA graphs, stored by their size, such as a batch size or a number of tokens.

    `capture` creates the graphs.
    """

    def __init__(self, sizes: Sequence[int], what: str) -> None:
        """Create a collection that contains no CUDA graphs yet.

        `sizes` are the sizes to capture, for example batch sizes, in ascending order. If it is empty, `capture` does
        nothing. `what` is the unit of the sizes in log lines, for example "tokens".
        """
        self.sizes = tuple(sizes)
        self._what = what
        self._unfit: set[int] = set()  # sizes for which memory was too small in this process
        self._missing: list[int] = []  # the sizes reported by the last warning
        self._graphs: dict[int, G] = {}

    def capture(self, capture_size: Callable[[int], G], agree: Agree | None) -> None:
        """Capture a CUDA graph of every size that fits into memory, by calling `capture_size`.

        If a size does not fit, the next size to try is at most half as large. With several tensor-parallel ranks, a
        rank that runs out of memory raises the error, because the other ranks wait for it in an exchange. In the next
        session with a scheduler (epoch) all ranks skip the size that failed.

        Args:
            agree: exchanges flags between ranks that communicate during a capture; None: there are no other ranks.
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
            # outside the handler, since the exception keeps the failed capture's tensors alive
            if size not in self._graphs:
                torch.cuda.empty_cache()
        logger.info("captured graphs for %d sizes in %.1f s", len(self._graphs), time.perf_counter() - started)
        self._log_missing()

    def drop(self) -> None:
        """Discard the captured CUDA graphs. No size can be replayed before the next `capture`."""
        self._graphs.clear()

    def size_for(self, size: int) -> int | None:
        """Return the smallest size that is at least `size` and for which a CUDA graph was captured, or None."""
        return next((captured for captured in self.sizes if captured >= size and captured in self._graphs), None)

    def __getitem__(self, size: int) -> G:
        return self._graphs[size]

    def _log_missing(self) -> None:
        missing = sorted(self._unfit)
        if missing != self._missing:
            self._missing = missing
            logger.warning(
                "the GPU's memory does not hold graphs for %d of %d %s, %d to %d: steps of these sizes use the "
                "next larger graph or launch each kernel, which is slower: lower --max-graph-batch-size, "
                "--max-graph-tokens or --gpu-memory-utilization",
                len(missing),
                len(self.sizes),
                self._what,
                missing[0],
                missing[-1],
            )
