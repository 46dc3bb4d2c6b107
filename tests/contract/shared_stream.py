"""A client of the GenerateMany RPC that joins and checks the deltas of each request (invariant S6 of
ARCHITECTURE.md).
"""

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field

import grpc.aio

from pagewire.common.wire.sampling_rules import MAX_SAMPLES
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from testing.scheduler_stack import Stack


@dataclass
class Stream:
    token_ids: list[int] = field(default_factory=list)
    text: str = ""
    deltas: list[pb.GenerateResponse] = field(default_factory=list)
    last: pb.GenerateResponse | None = None
    failure: pb.StreamFailure | None = None
    ended: asyncio.Event = field(default_factory=asyncio.Event)

    def add(self, delta: pb.GenerateResponse) -> None:
        assert self.last is None, "a delta after the last"
        assert self.failure is None, "a delta after the failure"
        assert delta.first_token == len(self.token_ids), "a token was lost or repeated"
        self.token_ids.extend(delta.token_ids)
        self.text += delta.text
        self.deltas.append(delta)
        if delta.finish_reason:
            assert delta.usage.completion_tokens == len(self.token_ids)
            self.last = delta
            self.ended.set()


class SharedStream:
    """One GenerateMany RPC with several requests.

    If `reads` is false, the client reads no message before `read` is called.
    """

    def __init__(self, stack: Stack, *, reads: bool = True, metadata: Sequence[tuple[str, str]] = ()) -> None:
        self.call: grpc.aio.StreamStreamCall = stack.stub.GenerateMany(metadata=metadata)
        self.streams: dict[int, Stream] = {}
        self.messages: list[pb.GenerateManyResponse] = []
        self.infos: asyncio.Queue[pb.GetServerInfoResponse] = asyncio.Queue()
        self._next = 0
        self._writing = asyncio.Lock()  # an RPC allows one write at a time
        self._reading = asyncio.create_task(self.read()) if reads else None

    async def submit(self, request: pb.GenerateRequest, **options: object) -> list[Stream]:
        """Send a request. Return one stream for each of its samples."""
        first = self._next
        self._next += max(1, request.sampling.n)
        made = [self.streams.setdefault(id, Stream()) for id in range(first, self._next)]
        submission = pb.Submission(stream_id=first, request=request, **options)
        await self._write(pb.GenerateManyRequest(submit=submission))
        return made

    async def submit_resolved(self, resolved: pb.ResolvedRequest, **options: object) -> list[Stream]:
        """Send a request that a front end has resolved. Return one stream for each of its samples."""
        first = self._next
        self._next += resolved.n if 1 <= resolved.n <= MAX_SAMPLES else 1
        made = [self.streams.setdefault(id, Stream()) for id in range(first, self._next)]
        submission = pb.Submission(stream_id=first, resolved=resolved, **options)
        await self._write(pb.GenerateManyRequest(submit=submission))
        return made

    async def generate(self, request: pb.GenerateRequest, **options: object) -> list[Stream]:
        made = await self.submit(request, **options)
        async with asyncio.timeout(30):
            for stream in made:
                await stream.ended.wait()
        return made

    async def _write(self, message: pb.GenerateManyRequest) -> None:
        async with self._writing:
            await self.call.write(message)

    def id_of(self, stream: Stream) -> int:
        return next(id for id, each in self.streams.items() if each is stream)

    async def abort(self, stream: Stream) -> None:
        await self._write(pb.GenerateManyRequest(abort=pb.StreamAbort(stream_id=self.id_of(stream))))

    async def stop(self, stream: Stream, num_tokens: int) -> None:
        command = pb.StreamStop(stream_id=self.id_of(stream), num_tokens=num_tokens)
        await self._write(pb.GenerateManyRequest(stop=command))

    async def read(self) -> None:
        async for message in self.call:
            self.messages.append(message)
            if message.HasField("server_info"):
                self.infos.put_nowait(message.server_info)
            counts = message.num_tokens or [1] * len(message.stream_ids)
            assert sum(counts) == len(message.token_ids)
            start = 0
            for stream_id, count in zip(message.stream_ids, counts, strict=True):
                stream = self.streams[stream_id]
                assert stream.last is None
                stream.token_ids.extend(message.token_ids[start : start + count])
                start += count
            for entry in message.deltas:
                self.streams[entry.stream_id].add(entry.delta)
            for failure in message.failures:
                stream = self.streams[failure.stream_id]
                assert stream.failure is None
                stream.failure = failure
                stream.ended.set()

    async def close(self) -> None:
        """Half-close the RPC, and check that it ends with status OK."""
        await self.call.done_writing()
        async with asyncio.timeout(30):
            await self._reading
        assert await self.call.code() is grpc.StatusCode.OK
