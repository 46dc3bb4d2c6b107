"""Each tenant's use of the server is counted here, and held against its limits."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

import grpc

from pagewire.common.messages import WorkerCapacity
from scheduler_service.core.request import Request
from scheduler_service.rpc.status import RpcError, invalid
from scheduler_service.rpc.tenants.tenant_file import Quota
from scheduler_service.serving.token_stream import Delta


@dataclass(slots=True)
class _Usage:
    num_pending: int = 0  # calls whose request is being tokenized
    num_requests: int = 0
    num_sequences: int = 0
    num_queued_tokens: int = 0
    num_blocks: int = 0

    @property
    def is_nothing(self) -> bool:
        return not (self.num_pending or self.num_requests)


class Quotas:
    def __init__(self, limits_of: Callable[[str], Quota], read_capacity: Callable[[], WorkerCapacity | None]) -> None:
        self._limits_of = limits_of
        self._read_capacity = read_capacity
        self._usages: dict[str, _Usage] = {}

    @contextmanager
    def pending(self, tenant: str) -> Iterator[None]:
        """Count a request as one of the tenant's inside the block, in which it is made ready. Raises RpcError."""
        usage = self._usages.setdefault(tenant, _Usage())
        limit = self._limits_of(tenant).max_requests
        if limit is not None and usage.num_pending + usage.num_requests >= limit:
            self._forget_if_unused(tenant)
            raise _exhausted("requests", usage.num_pending + usage.num_requests, 1, limit)
        usage.num_pending += 1
        try:
            yield
        finally:
            usage.num_pending -= 1
            self._forget_if_unused(tenant)

    def claim(self, request: Request) -> "Claim | None":
        """Take what the request can come to use; nothing as long as no worker has ever been there. Raises RpcError."""
        capacity = self._read_capacity()
        if capacity is None:
            return None
        block_size = capacity.block_size
        limits = self._limits_of(request.tenant)
        num_tokens, num_blocks = len(request.prompt_token_ids), num_blocks_at_most(request, block_size)
        num_sequences = _num_sequences(request)
        if limits.max_queued_tokens is not None and num_tokens > limits.max_queued_tokens:
            raise invalid(
                "prompt",
                f"the prompt has {num_tokens} tokens, this tenant may queue {limits.max_queued_tokens}; shorten it",
            )
        if limits.max_sequences is not None and num_sequences > limits.max_sequences:
            what, field = ("samples", "sampling.n") if request.beam is None else ("beams", "sampling.beam_width")
            raise invalid(
                field,
                f"the request has {num_sequences} {what}, this tenant may have {limits.max_sequences}; ask for fewer",
            )
        if limits.max_blocks is not None and num_blocks > limits.max_blocks:
            raise invalid(
                "sampling.max_tokens",
                f"prompt and max_tokens may take {num_blocks} blocks of {block_size} tokens, this tenant may hold "
                f"{limits.max_blocks}; lower max_tokens, or send fewer samples",
            )
        usage = self._usages.setdefault(request.tenant, _Usage())
        for what, used, more, limit in (
            ("requests", usage.num_requests, 1, limits.max_requests),
            ("sequences", usage.num_sequences, num_sequences, limits.max_sequences),
            ("queued prompt tokens", usage.num_queued_tokens, num_tokens, limits.max_queued_tokens),
            ("blocks", usage.num_blocks, num_blocks, limits.max_blocks),
        ):
            if limit is not None and used + more > limit:
                self._forget_if_unused(request.tenant)
                raise _exhausted(what, used, more, limit)
        usage.num_requests += 1
        usage.num_sequences += num_sequences
        usage.num_queued_tokens += num_tokens
        usage.num_blocks += num_blocks
        on_released = partial(self._forget_if_unused, request.tenant)
        return Claim(usage, num_sequences, num_tokens, num_blocks, request.n, on_released)

    def _forget_if_unused(self, tenant: str) -> None:
        """Forget a tenant that uses nothing: names are the clients' to choose where an operator acts for others."""
        usage = self._usages.get(tenant)
        if usage is not None and usage.is_nothing:
            del self._usages[tenant]


@dataclass(slots=True)
class Claim:
    """The share of a tenant's quota that one request has until all its samples have ended."""

    usage: _Usage
    num_sequences: int
    num_queued_tokens: int
    num_blocks: int
    num_open: int  # samples
    on_released: Callable[[], None] = field(repr=False)

    def take_news(self, delta: Delta) -> None:
        """Count on, since a sample got something."""
        self._begin()
        if delta.end is not None:
            self.num_open -= 1
            if not self.num_open:
                self.release()

    def release(self) -> None:
        self._begin()
        self.usage.num_requests -= 1
        self.usage.num_sequences -= self.num_sequences
        self.usage.num_blocks -= self.num_blocks
        self.on_released()

    def _begin(self) -> None:
        """Give back the queued tokens, since the request is not queued any more."""
        self.usage.num_queued_tokens -= self.num_queued_tokens
        self.num_queued_tokens = 0


def num_blocks_at_most(request: Request, block_size: int) -> int:
    """Count the device blocks that a request's rows hold if each comes to its last token and none shares any."""
    return _num_sequences(request) * -(-(len(request.prompt_token_ids) + request.max_tokens) // block_size)


def _num_sequences(request: Request) -> int:
    """Count the rows that a request can come to take in a step, which are its samples or beams."""
    return request.n if request.beam is None else request.beam.beam_width


def _exhausted(what: str, used: int, more: int, limit: int) -> RpcError:
    return RpcError(
        grpc.StatusCode.RESOURCE_EXHAUSTED,
        f"this tenant uses {used} {what}, the request needs {more} more, and the quota is {limit}; try again when "
        "others have ended",
    )
