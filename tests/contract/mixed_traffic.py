"""A client that sends every kind of request, run by `python -m tests.contract.mixed_traffic ADDRESS NUMBER`.

It is a separate process, so that objects of the gRPC client are not counted as objects of the server.
"""

import asyncio
import contextlib
import random
import sys
from collections.abc import AsyncIterator

import grpc.aio
from smg_grpc_proto.generated import vllm_engine_pb2, vllm_engine_pb2_grpc

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2_grpc as pb_grpc

ROUND = 20  # requests in parallel


class Traffic:
    def __init__(self, channel: grpc.aio.Channel) -> None:
        self._rng = random.Random(1)
        self._stub = pb_grpc.SchedulerServiceStub(channel)
        self._vllm = vllm_engine_pb2_grpc.VllmEngineStub(channel)

    async def send(self, number: int) -> None:
        """Send one request, of the kind that `number` selects. Errors and lost streams are expected and ignored."""
        kinds = (self._generate, self._cancel, self._expire, self._many, self._detached, self._engine, self._refused)
        with contextlib.suppress(grpc.aio.AioRpcError):
            await kinds[number % len(kinds)]()

    def _request(self, **sampling: object) -> pb.GenerateRequest:
        rng = self._rng
        settings = {"max_tokens": rng.randrange(1, 20), "n": rng.choice([1, 1, 2]), "seed": rng.randrange(1000)}
        request = pb.GenerateRequest(sampling=pb.SamplingParams(**(settings | sampling)))
        kind = rng.randrange(4)
        if kind == 0:
            request.text = "once upon a time"
            request.sampling.stop.append("e")
        else:
            request.token_ids.ids.extend(rng.randrange(299) for _ in range(rng.randrange(1, 40)))
        if kind == 1:
            request.sampling.logprobs = 2
        return request

    async def _generate(self) -> None:
        async for _ in self._stub.Generate(self._request()):
            pass

    async def _cancel(self) -> None:
        call = self._stub.Generate(self._request(max_tokens=100, n=1))
        await call.read()
        call.cancel()

    async def _expire(self) -> None:
        async for _ in self._stub.Generate(self._request(max_tokens=150, n=1), timeout=0.01):
            pass

    async def _many(self) -> None:
        async def submissions() -> AsyncIterator[pb.GenerateManyRequest]:
            for index in range(8):
                request = self._request(n=1) if index % 4 else self._request(n=1, temperature=-1)
                yield pb.GenerateManyRequest(submit=pb.Submission(stream_id=index, request=request))
            yield pb.GenerateManyRequest(abort=pb.StreamAbort(stream_id=7))

        async for _ in self._stub.GenerateMany(submissions()):
            pass

    async def _detached(self) -> None:
        submitted = await self._stub.Submit(pb.SubmitRequest(request=self._request()))
        async for _ in self._stub.Attach(pb.AttachRequest(request_id=submitted.request_id)):
            pass

    async def _engine(self) -> None:
        request = vllm_engine_pb2.GenerateRequest(
            request_id=str(self._rng.random()), stream=self._rng.random() < 0.5, tokenized={"input_ids": [1, 2, 3]}
        )
        request.sampling_params.max_tokens = self._rng.choice([5, 100_000])
        async for _ in self._vllm.Generate(request):
            pass

    async def _refused(self) -> None:
        async for _ in self._stub.Generate(self._request(temperature=-1)):
            pass


async def run(address: str, number: int) -> None:
    async with grpc.aio.insecure_channel(address) as channel:
        traffic = Traffic(channel)
        for first in range(0, number, ROUND):
            await asyncio.gather(*(traffic.send(each) for each in range(first, first + ROUND)))


if __name__ == "__main__":
    asyncio.run(run(sys.argv[1], int(sys.argv[2])))
