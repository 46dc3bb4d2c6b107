"""A task that kills the worker repeatedly, each time while rows run."""

import asyncio
import random

from pagewire import AsyncClient
from pagewire.client.server_info import HELD
from testing.services import System
from testing.streams import until_connected, until_lost

POLL_S = 0.005
MIN_REQUESTS = 2  # the scheduler fails a request that was alone in two crashes: see `core/quarantine.py`


class Killer:
    """A killer of one system's worker.

    Attributes:
        num_kills: the number of kills so far. Each happened while the scheduler reported running rows, and after the
            worker had generated tokens since the previous kill.
    """

    def __init__(self, system: System, rng: random.Random, name: str) -> None:
        """`name`: the beginning of the lines that report progress."""
        self._system, self._rng, self._name = system, rng, name
        self.num_kills = 0

    async def kill(self, num_kills: int) -> None:
        """Kill the worker `num_kills` times, and return when the last new worker has connected."""
        async with AsyncClient(self._system.url) as client:
            while self.num_kills < num_kills:
                num_rows, num_requests = await self._until_running(client)
                self._system.worker.kill()
                self._system.restart_worker()
                self.num_kills += 1
                await until_lost(client, self.num_kills)
                await until_connected(client, True)
                running = f"{num_rows} rows of {num_requests} requests ran"
                print(f"    {self._name}: kill {self.num_kills} of {num_kills}, while {running}", flush=True)

    async def _until_running(self, client: AsyncClient) -> tuple[int, int]:
        """Wait until some more tokens have been generated and several requests run. Return the number of running rows,
        and the number of requests that hold blocks on the device."""
        goal = (await client.loads()).num_generation_tokens + self._rng.randint(1, 200)
        while True:
            loads = await client.loads()
            if loads.worker_connected and loads.num_running and loads.num_generation_tokens >= goal:
                uses = (await client.blocks()).device_blocks
                num_requests = len({use for use in uses if use >= HELD})
                if num_requests >= MIN_REQUESTS:
                    return loads.num_running, num_requests
            await asyncio.sleep(POLL_S)  # the server is another process
