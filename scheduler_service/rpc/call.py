"""One Generate call: what its samples got, on its way to the client."""

import asyncio
import logging
from collections.abc import AsyncIterator
from typing import Protocol

import grpc

from protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.core.request import EndReason, SequenceEnd, TokenLogprobs
from scheduler_service.rpc.sample import Sample
from scheduler_service.rpc.status import RpcError

logger = logging.getLogger(__name__)

_FAILURES = {
    EndReason.NAN_LOGITS: grpc.StatusCode.INTERNAL,
    EndReason.CRASHES_WORKER: grpc.StatusCode.INTERNAL,
    EndReason.NO_LONGER_FITS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    EndReason.NO_WORKER: grpc.StatusCode.UNAVAILABLE,
}


class Delta(Protocol):
    """What one sequence got since its last delta."""

    @property
    def index(self) -> int: ...

    @property
    def first_token(self) -> int: ...

    @property
    def token_ids(self) -> list[int]: ...

    @property
    def logprobs(self) -> list[TokenLogprobs]: ...

    @property
    def prompt_logprobs(self) -> list[TokenLogprobs]: ...

    @property
    def end(self) -> SequenceEnd | None: ...


class SequenceStopper(Protocol):
    def stop(self, sequence_id: int, num_output_tokens: int) -> None: ...


class Call:
    def __init__(self, samples: list[Sample], stopper: SequenceStopper) -> None:
        self._samples = samples
        self._stopper = stopper
        self._wake = asyncio.Event()
        self._error: RpcError | None = None
        self.sequence_ids: list[int] = []  # known before the first delta

    def deliver(self, delta: Delta) -> None:
        """Take what a sequence got. A stop text in it ends the sequence, whether or not the client reads."""
        sample = self._samples[delta.index]
        try:
            sample.add(delta.first_token, delta.token_ids, delta.logprobs, delta.prompt_logprobs, delta.end)
            if sample.is_stopped and delta.end is None:
                self._stopper.stop(self.sequence_ids[delta.index], sample.num_tokens)
        except Exception:
            logger.exception("a delta of sequence %d cannot be delivered", self.sequence_ids[delta.index])
            self._error = RpcError(grpc.StatusCode.INTERNAL, "the output cannot be delivered; see the server's log")
        if sample.failure is not None:
            self._error = RpcError(_FAILURES[sample.failure.reason], sample.failure.message)
        self._wake.set()

    async def responses(self) -> AsyncIterator[scheduler_pb2.GenerateResponse]:
        """Until every sample has ended. Raises RpcError."""
        num_open = len(self._samples)
        while num_open:
            await self._wake.wait()
            self._wake.clear()
            for sample in self._samples:
                for response in sample.take():
                    num_open -= response.HasField("usage")
                    yield response
            if self._error is not None:
                raise self._error
