"""A server that several tenants share, and helpers for their requests."""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from testing.serving.http_server import HttpServer, serve_http
from testing.serving.tenants import KEYS, key_file, write_tenants

CHAT, COMPLETION = "/v1/chat/completions", "/v1/completions"
MIB = 1 << 20


@asynccontextmanager
async def shared_server(model: Path, folder: Path, **front: Any) -> AsyncIterator[HttpServer]:
    """Start a server with several tenants, each with an API key."""
    tenants = folder / "tenants.yaml"
    write_tenants(tenants)
    front |= {"tenants": str(tenants), "scheduler_api_key_file": key_file(folder, "root")}
    async with serve_http(model, tenants=str(tenants), front=front, key=KEYS["acme"]) as server:
        yield server


def of(tenant: str) -> dict[str, str]:
    return {"authorization": f"Bearer {KEYS[tenant]}"}


def chat(text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": text}], "max_tokens": 2}
