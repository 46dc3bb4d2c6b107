"""Tenants in configuration files, and the API keys of their requests."""

import hashlib
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import yaml

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from testing.scheduler_stack import Result, Stack, serve
from testing.serving.front_end import FrontEnd, serve_front_end

KEYS = {"acme": "key-of-acme", "globex": "key-of-globex", "root": "key-of-root"}
PROMPT = list(range(1, 41))


def digest(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def write_tenants(path: Path, **changes: dict[str, object]) -> None:
    tenants: dict[str, dict[str, object]] = {name: {"api_keys": [digest(key)]} for name, key in KEYS.items()}
    tenants["root"]["operator"] = True
    for name, entry in changes.items():
        tenants.setdefault(name, {}).update(entry)
    path.write_text(yaml.safe_dump({"tenants": tenants}))


def remove_tenant(path: Path, name: str) -> None:
    document = yaml.safe_load(path.read_text())
    del document["tenants"][name]
    path.write_text(yaml.safe_dump(document))


def credentials(tenant: str) -> tuple[tuple[str, str], ...]:
    return (("authorization", f"Bearer {KEYS[tenant]}"),)


@asynccontextmanager
async def slow_stack(checkpoint: Path, tenants: Path) -> AsyncIterator[Stack]:
    """Yield a stack whose worker is slow, so that requests are still running when a test examines them."""
    async with serve(checkpoint, tenants=str(tenants)) as stack:
        stack.worker.step_seconds = 0.02
        yield stack


async def code_of(call: object) -> grpc.StatusCode | None:
    try:
        await call
    except grpc.aio.AioRpcError as error:
        return error.code()
    return None


def key_file(folder: Path, tenant: str) -> str:
    path = folder / f"{tenant}.key"
    path.write_text(KEYS[tenant] + "\n")
    return str(path)


async def generate(server: Stack | FrontEnd, message: pb.GenerateRequest, tenant: str) -> Result:
    result = Result()
    async for response in server.stub.Generate(message, metadata=credentials(tenant)):
        result.add(response)
    return result


async def read_to_end(stream: grpc.aio.UnaryStreamCall) -> None:
    while await stream.read() is not grpc.aio.EOF:
        pass


@asynccontextmanager
async def serve_tenants(
    checkpoint: Path, folder: Path, tenants: Path, own: Path | None = None, operator: str = "root"
) -> AsyncIterator[tuple[Stack, FrontEnd]]:
    """Yield a scheduler with tenants and its front end.

    `own` is the tenants file of the front end, if it differs from the scheduler's. `operator` is the tenant whose API
    key the front end uses.
    """
    options = {"tenants": str(own or tenants), "scheduler_api_key_file": key_file(folder, operator)}
    async with (
        serve(checkpoint, tenants=str(tenants)) as stack,
        serve_front_end(checkpoint, stack.url, **options) as front,
    ):
        stack.worker.step_seconds = 0.01
        yield stack, front
