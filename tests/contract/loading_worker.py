"""A worker service whose engine never finishes loading."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import grpc
import grpc.aio

from worker_service.engine import Engine, LoadedWorker
from worker_service.rpc.servicer import WorkerServicer


@asynccontextmanager
async def loading_worker(credentials: grpc.ServerCredentials | None = None, **options: Any) -> AsyncIterator[str]:
    """Start the service, without TLS if `credentials` is None. Yield its address."""
    server = grpc.aio.server()

    def load() -> LoadedWorker:
        raise AssertionError("nothing is loaded here")

    WorkerServicer(Engine(load), **options).add_to(server)
    if credentials is None:
        port = server.add_insecure_port("localhost:0")
    else:
        port = server.add_secure_port("localhost:0", credentials)
    await server.start()
    try:
        yield f"localhost:{port}"
    finally:
        await server.stop(0)
