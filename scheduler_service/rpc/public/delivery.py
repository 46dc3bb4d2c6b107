"""The way of a request's output from the step loop to whatever keeps it for the client."""

import logging
from collections.abc import Callable, Sequence
from typing import Protocol

import grpc

from scheduler_service.core.request import EndReason
from scheduler_service.rpc.public.transcript import Transcript
from scheduler_service.rpc.status import RpcError
from scheduler_service.serving.engine import RequestEngine
from scheduler_service.serving.token_stream import Delta

logger = logging.getLogger(__name__)

_FAILURES = {
    EndReason.NAN_LOGITS: grpc.StatusCode.INTERNAL,
    EndReason.OUT_OF_MEMORY: grpc.StatusCode.RESOURCE_EXHAUSTED,
    EndReason.CRASHES_WORKER: grpc.StatusCode.INTERNAL,
    EndReason.NO_LONGER_FITS: grpc.StatusCode.RESOURCE_EXHAUSTED,
    EndReason.NO_WORKER: grpc.StatusCode.UNAVAILABLE,
}


class SampleSink(Protocol):
    """What keeps the output of one sample."""

    @property
    def transcript(self) -> Transcript: ...

    def add(self, delta: Delta) -> None: ...


class Delivery:
    def __init__(self, samples: Sequence[SampleSink], engine: RequestEngine, on_news: Callable[[], None]) -> None:
        """`on_news` is called after every delta."""
        self._samples = samples
        self._engine = engine
        self._on_news = on_news
        self.error: RpcError | None = None  # the request failed
        self.sequence_ids: list[int] = []  # known before the first delta

    def close(self) -> None:
        """Nobody waits for news any more. Whoever did and this no longer refer to each other, so that both are freed
        without a garbage collection."""
        self._on_news = _ignore

    def fail(self, error: RpcError) -> None:
        """The request ends with this."""
        self.error = error
        self._on_news()

    def deliver(self, delta: Delta) -> None:
        """Take what a sequence got. A stop text in it ends the sequence, whether or not the client reads."""
        sample, sequence_id = self._samples[delta.index], self.sequence_ids[delta.index]
        try:
            sample.add(delta)
            if sample.transcript.is_stopped and delta.end is None:
                self._engine.stop(sequence_id, sample.transcript.num_tokens)
        except Exception:
            logger.exception("a delta of sequence %d cannot be delivered", sequence_id)
            self.error = RpcError(grpc.StatusCode.INTERNAL, "the output cannot be delivered; see the server's log")
        failure = sample.transcript.failure
        if failure is not None:
            self.error = RpcError(_FAILURES[failure.reason], failure.message)
        self._on_news()


def _ignore() -> None:
    """News that nobody waits for."""
