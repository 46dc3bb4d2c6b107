"""Requests that run at the same time, each with a fate of its own, over connections that are cut and restored."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator, Sequence
from typing import Any

import httpx2 as httpx

from pagewire import AsyncClient
from pagewire.client.completion import Output
from pagewire.client.errors import Cancelled, DeadlineExceeded, NotFound, PagewireError
from testing.serving.over_http import outputs_over_http
from testing.serving.received import Received
from testing.streams import Progress
from tests.fuzz.drawn_request import DrawnRequest, Way


class Company:
    """A runner of one round's requests, which all run at the same time.

    Attributes:
        received: the outputs of each request.
        is_interrupted: whether a request was ended by an event outside itself.
    """

    def __init__(self, url: str, http_url: str, requests: Sequence[DrawnRequest], num_at_once: int) -> None:
        """`http_url`: the URL of a front end."""
        self._requests = requests
        self._http = httpx.AsyncClient(base_url=http_url, timeout=None)
        self._client, self._cut = AsyncClient(url), AsyncClient(url)  # a client whose connection is cut repeatedly
        self._places = asyncio.Semaphore(num_at_once)
        self._progress = Progress()  # of all requests together
        self.received = [Received() for _ in requests]
        self.is_interrupted = [False] * len(requests)
        self._ended = [asyncio.Event() for _ in requests]

    async def run(self) -> None:
        """Return when all requests have ended in some way."""
        try:
            await asyncio.gather(*(self._one(number) for number in range(len(self._requests))))
        finally:
            await self._client.aclose()
            await self._cut.aclose()
            await self._http.aclose()

    async def _one(self, number: int) -> None:
        request, own = self._requests[number], Progress()
        if request.follows is not None:
            await self._ended[request.follows].wait()
        progress = self._progress if request.is_embedding else own
        async with self._places:
            running = asyncio.create_task(self._receive(number, own))
            reached = asyncio.create_task(progress.until(progress.num_tokens + request.after))
            await asyncio.wait({running, reached}, return_when=asyncio.FIRST_COMPLETED)
            reached.cancel()
            if not running.done():
                await self._interrupt(number, running)
            await asyncio.wait({running})
            with contextlib.suppress(asyncio.CancelledError):
                running.result()
        self._ended[number].set()

    async def _interrupt(self, number: int, running: asyncio.Task[None]) -> None:
        fate = self._requests[number].fate
        self.is_interrupted[number] = fate in ("cancelled", "aborted")
        if fate == "cancelled":
            running.cancel()
        elif fate == "disconnected":
            for each, other in enumerate(self._requests):
                self.is_interrupted[each] |= other.fate == "disconnected"
            await self._cut.aclose()
        elif fate == "aborted" and self._requests[number].way is Way.GRPC:
            with contextlib.suppress(NotFound):
                await self._client.abort(f"aborted-{number}")
        elif fate == "aborted":
            response = await self._http.delete(f"/v1/requests/aborted-{number}")
            assert response.status_code in (200, 404), response.text

    async def _receive(self, number: int, own: Progress) -> None:
        received, is_late = self.received[number], self._requests[number].fate == "expires"
        try:
            async with contextlib.aclosing(self._outputs(number)) as outputs:
                async for output in outputs:
                    received.add(output)
                    own.add(len(output.token_ids))
                    self._progress.add(len(output.token_ids))
        except PagewireError as error:
            if isinstance(error, Cancelled) and self._requests[number].fate == "aborted":
                return  # before its first output
            received.fail(
                error if self._requests[number].way is Way.GRPC else type(error)("")
            )  # HTTP messages name fields differently
            self.is_interrupted[number] |= is_late and isinstance(error, DeadlineExceeded)

    async def _outputs(self, number: int) -> AsyncGenerator[Output, None]:
        """Yield the deltas of a request as its fate determines."""
        request = self._requests[number]
        if request.way is not Way.GRPC:
            outputs = self._outputs_over_http(number)
            async with contextlib.aclosing(outputs):
                async for output in outputs:
                    yield output
            return
        match request.fate:
            case "detached" | "left":
                name = await self._client.submit(**request.arguments)
                if request.fate == "detached":
                    await self._look(name, request.after)
                outputs = self._client.attach(name)
            case "disconnected":
                outputs = outputs_of(self._cut, request)
            case "expires":
                outputs = outputs_of(self._client, request, timeout=request.timeout)
            case "aborted":
                outputs = outputs_of(self._client, request, request_id=f"aborted-{number}")
            case _:
                outputs = outputs_of(self._client, request)
        async with contextlib.aclosing(outputs):
            async for output in outputs:
                yield output

    def _outputs_over_http(self, number: int) -> AsyncGenerator[Output, None]:
        request = self._requests[number]
        fields: dict[str, Any] = {}
        if request.fate == "expires":
            fields["timeout"] = request.timeout
        elif request.fate == "aborted":
            fields["request_id"] = f"aborted-{number}"
        is_streamed = request.way is Way.STREAMED
        return outputs_over_http(self._http, request.arguments, is_streamed=is_streamed, **fields)

    async def _look(self, name: str, num_tokens: int) -> None:
        """Attach to a request, and leave after `num_tokens` tokens or when the connection is lost."""

        async def look() -> None:
            seen = Received()
            async with contextlib.aclosing(self._cut.attach(name)) as outputs:
                async for output in outputs:
                    seen.add(output)
                    if seen.num_tokens >= num_tokens:
                        return

        (found,) = await asyncio.gather(look(), return_exceptions=True)
        if isinstance(found, AssertionError):
            raise found


async def outputs_of(client: AsyncClient, request: DrawnRequest, **arguments: Any) -> AsyncGenerator[Output, None]:
    """Yield the deltas of a request; an embedding is one delta."""
    arguments |= request.arguments
    if request.is_embedding:
        found = await client.embed(**arguments)
        yield Output(found.request_id, 0, (), "", "stop", None, None, None, found.usage, 0, None, found.values)
        return
    async with contextlib.aclosing(client.stream(**arguments)) as outputs:
        async for output in outputs:
            yield output
