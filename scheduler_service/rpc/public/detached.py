"""Requests that run whether or not a client is there, and are kept for a while after their end."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Sequence

import grpc

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.rpc.public.delivery import Delivery
from scheduler_service.rpc.public.history import History, HistoryReader
from scheduler_service.rpc.status import RpcError, invalid
from scheduler_service.serving.engine import RequestEngine


class DetachedRequest:
    """What its samples got so far, and who reads it."""

    def __init__(self, tenant: str, request_id: str, histories: Sequence[History], engine: RequestEngine) -> None:
        self.tenant = tenant
        self.request_id = request_id
        self.delivery = Delivery(histories, engine, self._take_news)
        self.on_end: Callable[[], None] = lambda: None
        self._histories = histories
        self._engine = engine
        self._readers: set[asyncio.Event] = set()
        self._has_ended = False

    @property
    def num_bytes(self) -> int:
        """What it takes in memory, more or less."""
        return sum(history.num_bytes for history in self._histories)

    async def result(self) -> scheduler_pb2.GetResultResponse:
        """Everything so far."""
        outputs = [await history.whole() for history in self._histories]
        state = scheduler_pb2.RESULT_STATE_FINISHED if self._has_ended else scheduler_pb2.RESULT_STATE_RUNNING
        response = scheduler_pb2.GetResultResponse(request_id=self.request_id, state=state, outputs=outputs)
        error = self.delivery.error
        if error is not None:
            response.state = scheduler_pb2.RESULT_STATE_FAILED
            response.failure.code = error.code.value[0]
            response.failure.message = str(error)
        return response

    def responses(self, message: scheduler_pb2.AttachRequest) -> AsyncGenerator[scheduler_pb2.GenerateResponse, None]:
        """From the tokens that the message names on, until every sample has ended. Raises RpcError, at once for tokens
        that are not there, in the course of it if the request fails."""
        return self._read([HistoryReader(*place) for place in self._places(message)])

    async def _read(self, readers: list[HistoryReader]) -> AsyncGenerator[scheduler_pb2.GenerateResponse, None]:
        wake = asyncio.Event()
        wake.set()
        self._readers.add(wake)
        try:
            num_open = len(readers)
            while num_open:
                await wake.wait()
                wake.clear()
                for reader in readers:
                    for response in reader.take():
                        num_open -= response.HasField("usage")
                        yield response
                if self.delivery.error is not None:
                    raise self.delivery.error
        finally:
            self._readers.discard(wake)

    def _places(self, message: scheduler_pb2.AttachRequest) -> list[tuple[History, int]]:
        """Each history and the first token to read of it. Raises RpcError."""
        num_samples = len(self._histories)
        if len(message.from_tokens) > num_samples:
            raise invalid(
                "from_tokens",
                f"from_tokens has {len(message.from_tokens)} entries, but the request has {num_samples} samples; send "
                "at most one for each",
            )
        first_tokens = [*message.from_tokens, *[message.from_token] * (num_samples - len(message.from_tokens))]
        for index, (history, first_token) in enumerate(zip(self._histories, first_tokens, strict=True)):
            if first_token > history.num_tokens:
                raise RpcError(
                    grpc.StatusCode.OUT_OF_RANGE,
                    f"sample {index} has {history.num_tokens} tokens, but the stream was to begin at token "
                    f"{first_token}; begin at {history.num_tokens} or before",
                    f"from_tokens[{index}]" if index < len(message.from_tokens) else "from_token",
                )
        return list(zip(self._histories, first_tokens, strict=True))

    def _take_news(self) -> None:
        for reader in self._readers:
            reader.set()
        if self._has_ended:
            return
        if self.delivery.error is not None:
            self._engine.cancel(self.delivery.sequence_ids)
        self._has_ended = self.delivery.error is not None or all(
            history.transcript.end is not None for history in self._histories
        )
        if self._has_ended:
            self.on_end()
            self.delivery.close()


class DetachedRequests:
    """The detached requests of all tenants. Those that have ended are kept for a time, up to a number and a size."""

    def __init__(self, *, retention: float, max_ended: int, max_bytes: int) -> None:
        """`retention` in seconds. One alone is kept however many bytes it has."""
        self._retention = retention
        self._max_ended = max_ended
        self._max_bytes = max_bytes
        self._requests: dict[tuple[str, str], DetachedRequest] = {}
        self._ended: dict[tuple[str, str], asyncio.TimerHandle] = {}  # oldest first
        self._num_ended: Counter[str] = Counter()  # by tenant; none is 0
        self._sizes: dict[tuple[str, str], int] = {}  # bytes of each that has ended
        self._ended_bytes: Counter[str] = Counter()  # by tenant; none is 0
        self.num_bytes = 0  # of all that have ended

    def add(self, request: DetachedRequest) -> None:
        """A request that runs, of a name that is not here."""
        key = (request.tenant, request.request_id)
        self._requests[key] = request
        request.on_end = lambda: self._keep(key)

    def has(self, tenant: str, request_id: str) -> bool:
        return (tenant, request_id) in self._requests

    def find(self, tenant: str, request_id: str) -> DetachedRequest:
        """Raises RpcError if there is none: whether it never was, is another tenant's or has expired is not told."""
        try:
            return self._requests[tenant, request_id]
        except KeyError:
            message = f"no detached request {request_id!r} is known for this tenant; results are kept for a while only"
            raise RpcError(grpc.StatusCode.NOT_FOUND, message, "request_id") from None

    def _keep(self, key: tuple[str, str]) -> None:
        self._ended[key] = asyncio.get_running_loop().call_later(self._retention, self._forget, key)
        self._num_ended[key[0]] += 1
        num_bytes = self._sizes[key] = self._requests[key].num_bytes
        self._ended_bytes[key[0]] += num_bytes
        self.num_bytes += num_bytes
        if len(self._ended) > self._max_ended:
            self._forget(self._dispensable(self._num_ended))
        while self.num_bytes > self._max_bytes and len(self._ended) > 1:
            self._forget(self._dispensable(self._ended_bytes))

    def _dispensable(self, amounts: Counter[str]) -> tuple[str, str]:
        """The oldest of the tenant that has most: nobody can push out what others keep."""
        most = max(amounts.values())
        return next(key for key in self._ended if amounts[key[0]] == most)

    def _forget(self, key: tuple[str, str]) -> None:
        self._ended.pop(key).cancel()
        del self._requests[key]
        num_bytes = self._sizes.pop(key)
        self.num_bytes -= num_bytes
        for amounts, amount in ((self._num_ended, 1), (self._ended_bytes, num_bytes)):
            amounts[key[0]] -= amount
            if not amounts[key[0]]:
                del amounts[key[0]]
