"""All ranks of a worker on this machine, for a `pagewire worker` without --tensor-parallel-address.

The ranks are child processes. Each listens on its own port, and they communicate over loopback. When one rank ends, all
ranks are stopped and restarted, since a worker cannot run without all of its ranks.
"""

import asyncio
import dataclasses
import logging
import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from pagewire.common.process.child_process import announce_ready, exit_with_parent, python_command
from pagewire.common.process.shutdown import stop_at_signals
from pagewire.common.wire.transport.addresses import join
from pagewire.hosting.supervisor import Exit, RestartPolicy, Restarts, Supervisor, child_environ, free_port
from worker_service.config import WorkerConfig
from worker_service.startup.resources import num_usable_cpus

log = logging.getLogger(__name__)

_LOOPBACK = "127.0.0.1"
# The timeout gives a rank time to finish its step.
_POLICY = RestartPolicy(stop_timeout_s=30.0)


def rank_configs(config: WorkerConfig) -> list[WorkerConfig]:
    """Return the configuration of each tensor-parallel rank of a worker, with consecutive ports and an equal share of
    the CPUs.

    Raise ValueError for an invalid configuration, and OSError if no port is free.
    """
    size = config.tensor_parallel_size
    if config.port == 0:
        raise ValueError("--port is 0; the ranks of a worker listen on ports that follow --port, so name one")
    own = {first + rank for first in (config.port, config.health_port) for rank in range(size)}
    shared: dict[str, Any] = {
        "tensor_parallel_address": f"{_LOOPBACK}:{free_port(_LOOPBACK, own)}",
        "num_threads": config.num_threads or max(1, num_usable_cpus() // size),
    }
    configs = [
        dataclasses.replace(
            config,
            port=config.port + rank,
            health_port=config.health_port + rank if config.health_port else 0,
            tensor_parallel_rank=rank,
            **shared,
        )
        for rank in range(size)
    ]
    for rank in configs:
        rank.validate()
    return configs


def serve(config: WorkerConfig, arguments: Sequence[str], refuse: Callable[[str], int]) -> int:
    """Run all tensor-parallel ranks of a worker as child processes until a signal arrives, and return the exit code.

    Each rank gets the command's `arguments` and flags of its own, such as its port. If a rank can never start, `refuse`
    is called with the reason and returns the exit code. Raise the errors of `rank_configs`.
    """
    exit_with_parent()
    starting: set[int] = set()

    def note(rank: int, url: str) -> None:
        """Record that one rank of the worker is ready. After the last rank, announce that the worker is ready."""
        starting.discard(rank)
        if not starting:
            announce_ready(f"grpc://{join(config.host, config.port)}")

    def supervisor_of(own: WorkerConfig) -> Supervisor:
        command = python_command("pagewire", "worker", *arguments, *_own_flags(own))
        name, on_ready = f"worker's rank {own.tensor_parallel_rank}", partial(note, own.tensor_parallel_rank)
        return Supervisor(command, child_environ(os.environ, []), _POLICY, name=name, on_ready=on_ready)

    # A new address at every start, in case another process has taken the previous port.
    return asyncio.run(_until_signalled(lambda: [*map(supervisor_of, rank_configs(config))], starting, refuse))


def _own_flags(config: WorkerConfig) -> list[str]:
    names = ("port", "health_port", "tensor_parallel_rank", "tensor_parallel_address", "num_threads")
    return [f"--{name.replace('_', '-')}={getattr(config, name)}" for name in names]


async def _until_signalled(
    make_ranks: Callable[[], Sequence[Supervisor]], starting: set[int], refuse: Callable[[str], int]
) -> int:
    """Run the tensor-parallel ranks of a worker, and restart them after a failure. Return 0 after SIGTERM or SIGINT, or
    the exit code if the ranks cannot start.

    Before every start, the numbers of all ranks are added to the set `starting`.
    """
    stopping = asyncio.create_task(stop_at_signals(lambda number: None).wait())
    restarts = Restarts(_POLICY)
    while True:
        ranks = make_ranks()
        starting.update(range(len(ranks)))
        ended = await _run_once(ranks, stopping)
        if ended is None:
            return 0
        delay_s = restarts.delay_after(ended)
        if delay_s is None and ended.refusal:
            return refuse(ended.refusal)
        if delay_s is None:
            log.critical("a rank failed to start %d times in a row (%s): giving up", _POLICY.max_failed_starts, ended)
            return 1
        log.warning("a rank ended (%s) after %.1f s; all start again in %.1f s", ended, ended.ran_s, delay_s)
        await asyncio.wait({stopping}, timeout=delay_s)


async def _run_once(ranks: Sequence[Supervisor], stopping: "asyncio.Task[bool]") -> Exit | None:
    """Start all tensor-parallel ranks of a worker and run them until one of them ends or `stopping` is done. Then stop
    the other ranks.

    Return how the first rank ended, or None if `stopping` was done.
    """
    if stopping.done():
        return None
    runs = [asyncio.create_task(rank.run_once()) for rank in ranks]
    try:
        await asyncio.wait({stopping, *runs}, return_when=asyncio.FIRST_COMPLETED)
        return None if stopping.done() else next(run.result() for run in runs if run.done())
    finally:
        for run in runs:
            run.cancel()
        await asyncio.wait(runs)
