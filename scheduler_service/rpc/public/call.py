"""One Generate call: what its samples got, on its way to the client."""

from collections.abc import AsyncGenerator

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.rpc.public.delivery import Delivery
from scheduler_service.rpc.public.news import News
from scheduler_service.rpc.public.sample import Sample
from scheduler_service.serving.engine import RequestEngine


class Call:
    def __init__(self, samples: list[Sample], engine: RequestEngine) -> None:
        self._samples = samples
        self._news = News()
        self.delivery = Delivery(samples, engine, self._news.tell)

    async def responses(self) -> AsyncGenerator[scheduler_pb2.GenerateResponse, None]:
        """Until every sample has ended. Raises RpcError."""
        num_open = len(self._samples)
        while num_open:
            await self._news.wait()
            for sample in self._samples:
                for response in sample.take():
                    num_open -= response.HasField("usage")
                    yield response
            if self.delivery.error is not None:
                raise self.delivery.error
