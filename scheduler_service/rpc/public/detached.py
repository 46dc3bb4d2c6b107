"""Requests that run whether or not a client is there, and are kept for a while after their end."""

import asyncio
from collections import Counter
from collections.abc import AsyncGenerator
from functools import partial

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.rpc.public.generation import Generation
from scheduler_service.serving.refusal import Reason, RefusedError, invalid

MAX_ENDED = 4096


class DetachedRequests:
    """The detached requests of all tenants. Those that have ended are kept for a time, up to a number and a size."""

    def __init__(self, *, retention: float, max_bytes: int, max_ended: int = MAX_ENDED) -> None:
        """`retention` is in seconds. One request alone is kept however many bytes it has."""
        self._retention = retention
        self._max_ended = max_ended
        self._max_bytes = max_bytes
        self._generations: dict[tuple[str, str], Generation] = {}  # by tenant and request id
        self._ended: dict[tuple[str, str], tuple[asyncio.TimerHandle, int]] = {}  # and bytes; oldest first
        self._num_ended: Counter[str] = Counter()  # by tenant; none is 0
        self._ended_bytes: Counter[str] = Counter()  # by tenant; none is 0
        self.num_bytes = 0  # of all that have ended

    def add(self, generation: Generation) -> None:
        """Take a request that runs, of a name that is not here."""
        key = (generation.request.tenant, generation.request.request_id)
        self._generations[key] = generation
        generation.on_end = partial(self._keep, key)

    def has(self, tenant: str, request_id: str) -> bool:
        return (tenant, request_id) in self._generations

    def find(self, tenant: str, request_id: str) -> Generation:
        """Return the request of that name. Raises RefusedError if there is none, but not whether it never was, is
        another tenant's or has expired."""
        try:
            return self._generations[tenant, request_id]
        except KeyError:
            raise RefusedError(
                Reason.NOT_FOUND,
                f"no detached request {request_id!r} is known for this tenant; results are kept for a while only",
                "request_id",
            ) from None

    def _keep(self, key: tuple[str, str]) -> None:
        """Keep a request for a while that has ended, or that has failed: then what is left of it ends now."""
        generation = self._generations[key]
        generation.cancel()
        num_bytes = sum(output.num_bytes for output in generation.outputs)
        timer = asyncio.get_running_loop().call_later(self._retention, self._forget, key)
        self._ended[key] = timer, num_bytes
        self._num_ended[key[0]] += 1
        self._ended_bytes[key[0]] += num_bytes
        self.num_bytes += num_bytes
        if len(self._ended) > self._max_ended:
            self._forget(self._dispensable(self._num_ended))
        while self.num_bytes > self._max_bytes and len(self._ended) > 1:
            self._forget(self._dispensable(self._ended_bytes))

    def _dispensable(self, amounts: Counter[str]) -> tuple[str, str]:
        """Choose the oldest of the tenant that has most: no tenant can push out what others keep."""
        most = max(amounts.values())
        return next(key for key in self._ended if amounts[key[0]] == most)

    def _forget(self, key: tuple[str, str]) -> None:
        timer, num_bytes = self._ended.pop(key)
        timer.cancel()
        del self._generations[key]
        self.num_bytes -= num_bytes
        for amounts, amount in ((self._num_ended, 1), (self._ended_bytes, num_bytes)):
            amounts[key[0]] -= amount
            if not amounts[key[0]]:
                del amounts[key[0]]


async def result_of(generation: Generation) -> scheduler_pb2.GetResultResponse:
    """Return everything that came of a request so far, and whether it has ended."""
    # Before the outputs, which others may add to while they are put together: one that has ended has all.
    state = scheduler_pb2.RESULT_STATE_FINISHED if generation.has_ended else scheduler_pb2.RESULT_STATE_RUNNING
    outputs = [await output.whole() for output in generation.outputs]
    response = scheduler_pb2.GetResultResponse(request_id=generation.request.request_id, state=state, outputs=outputs)
    if (error := generation.error) is not None:
        failure = scheduler_pb2.Failure(code=error.reason.grpc_code, message=str(error))
        response.MergeFrom(scheduler_pb2.GetResultResponse(state=scheduler_pb2.RESULT_STATE_FAILED, failure=failure))
    return response


def responses_from(
    message: scheduler_pb2.AttachRequest, generation: Generation
) -> AsyncGenerator[scheduler_pb2.GenerateResponse, None]:
    """Yield the samples' responses from the tokens on that the message names. Raises RefusedError: at once for tokens
    that are not there, in the course of it if the request fails."""
    num_samples = len(generation.outputs)
    if len(message.from_tokens) > num_samples:
        raise invalid(
            "from_tokens",
            f"from_tokens has {len(message.from_tokens)} entries, but the request has {num_samples} samples; send "
            "at most one for each",
        )
    first_tokens = [*message.from_tokens, *[message.from_token] * (num_samples - len(message.from_tokens))]
    for index, (output, first_token) in enumerate(zip(generation.outputs, first_tokens, strict=True)):
        if first_token > output.num_tokens:
            raise RefusedError(
                Reason.OUT_OF_RANGE,
                f"sample {index} has {output.num_tokens} tokens, but the stream was to begin at token "
                f"{first_token}; begin at {output.num_tokens} or before",
                f"from_tokens[{index}]" if index < len(message.from_tokens) else "from_token",
            )
    return generation.responses(first_tokens)
