"""One Generate call: what its samples got, on its way to the client."""

import asyncio
from collections.abc import AsyncGenerator

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.rpc.delivery import Delivery, SequenceStopper
from scheduler_service.rpc.sample import Sample


class Call:
    def __init__(self, samples: list[Sample], stopper: SequenceStopper) -> None:
        self._samples = samples
        # An event for one waiter, which is half the price of asyncio's.
        self._has_news = False
        self._waiter: asyncio.Future[None] | None = None
        self.delivery = Delivery(samples, stopper, self._take_news)

    async def responses(self) -> AsyncGenerator[scheduler_pb2.GenerateResponse, None]:
        """Until every sample has ended. Raises RpcError."""
        num_open = len(self._samples)
        while num_open:
            if not self._has_news:
                self._waiter = asyncio.get_running_loop().create_future()
                await self._waiter
            self._has_news = False
            for sample in self._samples:
                for response in sample.take():
                    num_open -= response.HasField("usage")
                    yield response
            if self.delivery.error is not None:
                raise self.delivery.error

    def _take_news(self) -> None:
        self._has_news = True
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)
