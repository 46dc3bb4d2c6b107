"""One Generate call whose client wants no deltas: nobody is woken before all samples have ended."""

import asyncio
from collections.abc import AsyncGenerator

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.rpc.public.delivery import Delivery
from scheduler_service.rpc.public.sample import Sample
from scheduler_service.serving.engine import RequestEngine


class UnreadCall:
    def __init__(self, samples: list[Sample], engine: RequestEngine) -> None:
        self._samples = samples
        self._end = asyncio.Event()
        self.delivery = Delivery(samples, engine, self._take_news)

    async def responses(self) -> AsyncGenerator[scheduler_pb2.GenerateResponse, None]:
        """All there is, in pieces. Raises RpcError."""
        await self._end.wait()
        if self.delivery.error is not None:
            raise self.delivery.error
        for sample in self._samples:
            for response in sample.take():
                yield response

    def _take_news(self) -> None:
        if self.delivery.error is not None or all(sample.transcript.end is not None for sample in self._samples):
            self._end.set()
