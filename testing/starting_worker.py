"""A worker that stays in its start until a test makes it ready. The gRPC service and its messages are real."""

import asyncio
import threading

import grpc.aio

from pagewire.common.wire.messages import WorkerCapacity
from worker_service.engine import Engine, LoadedWorker
from worker_service.rpc.servicer import WorkerServicer


class _IdleRunner:
    """A runner that can only begin epochs."""

    is_moving = False

    def reset(self, epoch: int, report_grammar: object) -> None:
        """Do nothing: there is no state."""


class StartingWorker:
    def __init__(self, capacity: WorkerCapacity, port: int = 0) -> None:
        self._capacity = capacity
        self.port = port
        self._may_load = threading.Event()
        self._engine = Engine(self._load)
        self._servicer = WorkerServicer(self._engine, heartbeat_interval_s=0.01)

    def _load(self) -> LoadedWorker:
        self._may_load.wait()
        return LoadedWorker(_IdleRunner(), self._capacity)

    async def start(self) -> None:
        self._server = grpc.aio.server(options=[("grpc.so_reuseport", 0)])
        self._servicer.add_to(self._server)
        self.port = self._server.add_insecure_port(f"127.0.0.1:{self.port}")
        await self._server.start()
        soon = asyncio.get_running_loop().call_soon_threadsafe
        self._engine.start(lambda error: soon(self._servicer.set_loaded))

    def come_further(self, doing: str) -> None:
        """Report `doing` as the phase of the start from now on."""
        self._engine.loading = doing

    def be_ready(self) -> None:
        self._may_load.set()

    async def stop(self) -> None:
        self.be_ready()
        await self._servicer.close()
        await self._server.stop(0)
        assert await asyncio.to_thread(self._engine.stop, 20)
