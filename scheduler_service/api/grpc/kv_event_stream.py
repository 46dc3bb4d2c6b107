"""A client's subscription to the events of the prefix cache, in SchedulerService."""

from collections.abc import AsyncGenerator, Iterator

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2
from scheduler_service.core.request import BlockRemoved, BlockStored, KvEvent, Tier
from scheduler_service.serving.kv_events import KvEventBatch, KvEvents
from scheduler_service.serving.refusal import Reason, RefusedError

# The maximum number of tokens and events in a message, which keeps it far below gRPC's default limit of 4 MiB.
_MAX_MESSAGE_VALUES = 65_536

_TIERS = {Tier.DEVICE: scheduler_pb2.KV_TIER_DEVICE, Tier.HOST: scheduler_pb2.KV_TIER_HOST}


async def kv_event_messages(
    request: scheduler_pb2.SubscribeKvEventsRequest, kv_events: KvEvents, instance_id: str
) -> AsyncGenerator[scheduler_pb2.SubscribeKvEventsResponse, None]:
    """Yield the events of the prefix cache (blocks stored and removed) as messages to a subscriber, until the server
    shuts down.

    Raise RefusedError if the server shuts down, if the log no longer contains the next batch of events, or if the
    subscriber wants to continue the events of another scheduler.
    """
    if request.instance_id and request.instance_id != instance_id:
        raise RefusedError(
            Reason.OUT_OF_RANGE,
            f"the sequence numbers are those of scheduler {request.instance_id!r}, but this is {instance_id!r}; "
            "subscribe without start_sequence_number for a snapshot",
            "instance_id",
        )
    is_snapshot, told_id = not request.HasField("start_sequence_number"), instance_id
    with kv_events.following():
        batch = kv_events.snapshot() if is_snapshot else await _after(request.start_sequence_number, kv_events)
        while True:
            for message in _messages(batch):
                message.is_snapshot, message.instance_id = is_snapshot, told_id
                told_id = ""  # only the first message has the id
                yield message
            is_snapshot, batch = False, await _after(batch.sequence_number, kv_events)


async def _after(sequence_number: int, kv_events: KvEvents) -> KvEventBatch:
    """Wait for the batch of cache events that follows batch `sequence_number`, and return it.

    Raise RefusedError if the log no longer contains the batch, or if the server has shut down.
    """
    try:
        batch = await kv_events.after(sequence_number)
    except LookupError:
        first_start, last_start = kv_events.starts
        raise RefusedError(
            Reason.OUT_OF_RANGE,
            f"the events after sequence number {sequence_number} are not available; start after {first_start} to "
            f"{last_start}, or subscribe without start_sequence_number for a snapshot",
            "start_sequence_number",
        ) from None
    if batch is None:
        raise RefusedError(Reason.UNAVAILABLE, "the server has shut down; subscribe again at its successor")
    return batch


def _messages(batch: KvEventBatch) -> Iterator[scheduler_pb2.SubscribeKvEventsResponse]:
    """Yield the messages of a batch of cache events. A large batch is divided into several messages of limited size. An
    empty batch is one message."""
    message = scheduler_pb2.SubscribeKvEventsResponse(sequence_number=batch.sequence_number)
    num_values = 0
    for event in batch.events:
        if num_values >= _MAX_MESSAGE_VALUES:
            message.is_continued = True
            yield message
            message = scheduler_pb2.SubscribeKvEventsResponse(sequence_number=batch.sequence_number)
            num_values = 0
        num_values += _encode(event, message.events.add())
    yield message


def _encode(event: KvEvent, message: scheduler_pb2.KvEvent) -> int:
    """Write one cache event into `message`. Return the approximate number of values in the message, which limits its
    size."""
    if isinstance(event, BlockStored):
        stored = message.stored
        stored.block_hash, stored.parent_hash = event.block_hash, event.parent_hash
        stored.token_ids.extend(event.token_ids)
        stored.tier, stored.block_size = _TIERS[event.tier], len(event.token_ids)
        return 4 + len(event.token_ids)
    if isinstance(event, BlockRemoved):
        message.removed.block_hash, message.removed.tier = event.block_hash, _TIERS[event.tier]
        return 2
    message.cleared.SetInParent()
    return 1
