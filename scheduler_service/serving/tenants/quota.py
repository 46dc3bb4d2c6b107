"""The resource usage of each tenant, which is counted and checked against the tenant's limits."""

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial

from pagewire.common.wire.messages import WorkerCapacity
from scheduler_service.core.request import Request
from scheduler_service.serving.refusal import Reason, RefusedError, invalid
from scheduler_service.serving.tenants.tenant_file import Quota

# The names of resources in error messages, by their limit.
_KINDS = {
    "max_requests": "requests",
    "max_sequences": "sequences",
    "max_queued_tokens": "queued prompt tokens",
    "max_blocks": "blocks",
}
_PENDING = "pending"  # calls whose request is being tokenized


class Quotas:
    """The resources that each tenant's requests use now, and the check against the tenant's limits. The check takes
    place when a request is accepted."""

    def __init__(self, limits_of: Callable[[str], Quota], read_capacity: Callable[[], WorkerCapacity | None]) -> None:
        self._limits_of = limits_of
        self._read_capacity = read_capacity
        self._usages: dict[str, Counter[str]] = {}  # by tenant, then by limit

    @contextmanager
    def pending(self, tenant: str) -> Iterator[None]:
        """A context manager for the block in which a tenant's request is tokenized and checked. The request counts
        against the tenant's limit of requests until the block ends. Raise RefusedError if the tenant has reached this
        limit."""
        usage = self._usages.setdefault(tenant, Counter())
        num_requests, limit = usage[_PENDING] + usage["max_requests"], self._limits_of(tenant).max_requests
        if limit is not None and num_requests >= limit:
            self._forget_if_unused(tenant)
            raise _exhausted("requests", num_requests, 1, limit)
        usage[_PENDING] += 1
        try:
            yield
        finally:
            usage[_PENDING] -= 1
            self._forget_if_unused(tenant)

    def claim(self, request: Request) -> "Claim | None":
        """Reserve the resources that a request may use at most: requests, sequences, queued tokens and KV cache blocks.
        Return the reservation, or None if no worker has connected yet. Raise RefusedError if the tenant would exceed
        one of its limits."""
        capacity = self._read_capacity()
        if capacity is None:
            return None
        block_size = capacity.block_size
        limits = self._limits_of(request.tenant)
        num_tokens, num_sequences = len(request.prompt_token_ids), request.num_rows
        # The blocks of all rows if each row reaches its last token and shares no block.
        num_blocks = num_sequences * -(-(num_tokens + request.max_tokens) // block_size)
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
        amounts = {
            "max_requests": 1,
            "max_sequences": num_sequences,
            "max_queued_tokens": num_tokens,
            "max_blocks": num_blocks,
        }
        usage = self._usages.setdefault(request.tenant, Counter())
        for name, more in amounts.items():
            limit = getattr(limits, name)
            if limit is not None and usage[name] + more > limit:
                self._forget_if_unused(request.tenant)
                raise _exhausted(_KINDS[name], usage[name], more, limit)
        usage.update(amounts)
        return Claim(usage, amounts, request.n, partial(self._forget_if_unused, request.tenant))

    def _forget_if_unused(self, tenant: str) -> None:
        """Delete the counts of a tenant that has no requests. Otherwise memory could grow without limit, because an
        operator may send requests with any tenant names."""
        usage = self._usages.get(tenant)
        if usage is not None and not any(usage.values()):
            del self._usages[tenant]


@dataclass(slots=True)
class Claim:
    """The reservation of one request in its tenant's quota. It begins when the request is accepted, and ends when all
    samples have ended."""

    usage: Counter[str]
    amounts: dict[str, int]  # the request's usage, by limit
    num_open: int  # unfinished samples
    on_released: Callable[[], None] = field(repr=False)

    def record_output(self, has_ended: bool) -> None:
        """Record that a sample of the request has new output. `has_ended` says whether the sample has ended. The first
        output releases the request's queued tokens, and the end of the last sample releases the whole reservation."""
        self._begin()
        if has_ended:
            self.num_open -= 1
            if not self.num_open:
                self.release()

    def release(self) -> None:
        self._begin()
        self.usage.subtract(self.amounts)
        self.on_released()

    def _begin(self) -> None:
        """Release the request's queued tokens, because the request has output and is no longer in the queue. Do nothing
        if they were released before."""
        self.usage["max_queued_tokens"] -= self.amounts.pop("max_queued_tokens", 0)


def _exhausted(what: str, used: int, more: int, limit: int) -> RefusedError:
    return RefusedError(
        Reason.RESOURCE_EXHAUSTED,
        f"this tenant uses {used} {what}, the request needs {more} more, and the quota is {limit}; try again when "
        "other requests have ended",
    )
