"""Helpers that submit detached requests and attach to them, over a scheduler or a front end."""

import asyncio
from collections.abc import Callable

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from testing.scheduler_stack import Stack, request
from testing.serving.front_end import DEADLINE, FrontEnd

Server = Stack | FrontEnd
Metadata = tuple[tuple[str, str], ...]


async def submit(
    server: Server,
    prompt: list[int] | str,
    *,
    name: str = "",
    tenant: str = "",
    metadata: Metadata = (),
    **sampling: object,
) -> str:
    message = request(prompt, **sampling)
    message.tenant = tenant
    if name:
        message.request_id = name
    return (await server.stub.Submit(pb.SubmitRequest(request=message), metadata=metadata)).request_id


class Attached:
    """The deltas that one attachment received.

    Each sample is checked to arrive from its first token on, once and in order.
    """

    def __init__(self, first_tokens: list[int]) -> None:
        self.first_tokens = first_tokens
        self.token_ids: list[list[int]] = [[] for _ in first_tokens]
        self.texts = [""] * len(first_tokens)
        self.last: dict[int, pb.GenerateResponse] = {}
        self.prompt_logprobs: list[int] = []

    def add(self, response: pb.GenerateResponse) -> None:
        index = response.index
        assert index not in self.last, "a delta after the last"
        if response.prompt_logprobs:
            assert (index, list(response.token_ids), response.text) == (0, [], "")
            self.prompt_logprobs += (entry.token_id for entry in response.prompt_logprobs)
            return
        assert response.first_token == self.first_tokens[index] + len(self.token_ids[index])
        self.token_ids[index] += response.token_ids
        self.texts[index] += response.text
        if response.HasField("usage"):
            self.last[index] = response


async def attach(
    server: Server, request_id: str, from_token: int = 0, *, n: int = 1, tenant: str = "", metadata: Metadata = ()
) -> Attached:
    attached = Attached([from_token] * n)
    message = pb.AttachRequest(request_id=request_id, tenant=tenant, from_token=from_token)
    async for response in server.stub.Attach(message, metadata=metadata):
        attached.add(response)
    return attached


async def until_ended(server: Server, request_id: str, tenant: str = "") -> pb.GetResultResponse:
    async with asyncio.timeout(20):
        while True:
            result = await server.stub.GetResult(pb.GetResultRequest(request_id=request_id, tenant=tenant))
            if result.state != pb.RESULT_STATE_RUNNING:
                return result
            await asyncio.sleep(0.01)  # a client that polls has no event to wait for


async def until(holds: Callable[[], object]) -> None:
    async with asyncio.timeout(DEADLINE):
        while True:
            if holds():
                return
            await asyncio.sleep(0.01)  # no event reports the change
