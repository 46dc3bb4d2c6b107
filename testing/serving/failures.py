"""Errors of RPCs, for tests."""

import contextlib
from collections.abc import Awaitable

import grpc.aio
import pytest


async def failure_of(call: Awaitable[object], code: grpc.StatusCode | None = None, *texts: str) -> grpc.aio.AioRpcError:
    """Return the error of an RPC that must fail with this status code, and with these texts in its details."""
    with pytest.raises(grpc.aio.AioRpcError) as caught:
        await call
    assert code is None or caught.value.code() is code, caught.value
    assert all(text in caught.value.details() for text in texts), (texts, caught.value)
    return caught.value


async def code_at_end(call: grpc.aio.UnaryStreamCall | grpc.aio.StreamStreamCall) -> grpc.StatusCode:
    """Return the status code of a stream after reading all its messages. gRPC has no status code earlier."""
    with contextlib.suppress(grpc.aio.AioRpcError):
        while await call.read() is not grpc.aio.EOF:
            pass
    return await call.code()
