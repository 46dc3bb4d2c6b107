"""A trace of some steps by torch's profiler, for `--profile`. The file is Chrome trace JSON and opens in Perfetto."""

import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile, record_function, schedule

from pagewire.common.wire.messages import StepPlan

logger = logging.getLogger(__name__)

# The profiler range of a step's launch is named with this prefix and the step's number.
STEP_PREFIX = "launch step "
NUM_STEPS_BEFORE = 20  # the first steps compile kernels and allocate memory
_NUM_TRACED_UNKEPT = 3  # the last of them, which the profiler warms up on so that its own start-up is not in the trace


class StepProfile:
    """A torch profiler that records the first steps after a warm-up and writes them to one trace.

    Use it on the thread that launches steps.
    """

    def __init__(self, num_steps: int, directory: Path) -> None:
        """Create the profiler, and the directory for its trace if it does not exist.

        Raises ValueError if the directory cannot be created.
        """
        try:
            directory.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ValueError(f"--profile-dir is {str(directory)!r}, which cannot be created: {error}") from error
        self._directory = directory
        self._num_steps = num_steps
        self.num_steps_left = NUM_STEPS_BEFORE + num_steps  # steps to launch before the trace is written
        self._profile: profile | None = None

    @contextmanager
    def around_launch(self, plan: StepPlan) -> Iterator[None]:
        """Return a context in which to launch a plan's step. If the step is to be traced, the launch is profiled."""
        if not self.num_steps_left:
            yield
            return
        if self._profile is None:
            self._profile = self._start()
        with record_function(f"{STEP_PREFIX}{plan.step}"):
            yield
        self.num_steps_left -= 1
        if not self.num_steps_left and torch.cuda.is_available():
            torch.cuda.synchronize()  # the remaining work must be in the trace
        self._profile.step()
        if not self.num_steps_left:
            self._profile.stop()
            self._profile = None

    def _start(self) -> profile:
        activities = [ProfilerActivity.CPU]
        if torch.cuda.is_available():
            activities.append(ProfilerActivity.CUDA)
        wait = NUM_STEPS_BEFORE - _NUM_TRACED_UNKEPT
        phases = schedule(wait=wait, warmup=_NUM_TRACED_UNKEPT, active=self._num_steps, repeat=1)
        profiler = profile(activities=activities, schedule=phases, on_trace_ready=self._write)
        profiler.start()
        return profiler

    def _write(self, profiler: profile) -> None:
        name = f"pagewire-worker-{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}.trace.json"
        path = self._directory / name
        profiler.export_chrome_trace(str(path))
        logger.info("--profile: wrote a trace of %d steps to %s", self._num_steps, path.resolve())
