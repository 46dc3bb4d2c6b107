"""The front end's state of its scheduler: the latest report, and the reason for a missing connection."""

import asyncio

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from scheduler_service.core.request import OutputMode
from scheduler_service.links.scheduler.scheduler_availability import SchedulerAvailability

NO_CONNECTION = "no connection to the scheduler at there: {}; try again later"
DRAINING = "the front end is shutting down; send the request to another one"
NAMES = {"served_model_name": "a", "served_model_aliases": ["b"]}


def state(availability: SchedulerAvailability) -> tuple[bool, bool, bool, str, str]:
    """Return whether a change was signaled, and the state after it.

    The state is: whether connected, whether serving, the refusal text, and the reason for a missing connection.
    """
    has_changed = availability.changed.is_set()
    availability.changed.clear()
    reasons = (availability.refusal(), availability.unreachable_reason)
    return (has_changed, availability.is_connected, availability.is_serving, *reasons)


async def test_the_state_follows_the_schedulers_reports() -> None:
    availability = SchedulerAvailability("there")
    first = asyncio.create_task(availability.wait_for_first_worker(OutputMode.STREAMED))
    availability.disconnected("refused")
    refused = NO_CONNECTION.format("refused")
    assert state(availability) == (False, False, False, refused, refused)
    await asyncio.sleep(0)
    assert not first.done()
    info = pb.GetServerInfoResponse(max_sequence_tokens=9, worker=pb.WorkerInfo(block_size=16), **NAMES)
    availability.reported(info)
    await first
    assert state(availability) == (True, True, True, "", "")
    assert (availability.served_model_names(), availability.max_sequence_tokens) == (("a", "b"), 9)
    assert availability.server_info() == info
    availability.reported(pb.GetServerInfoResponse(unavailable_reason="no worker", **NAMES))
    assert state(availability) == (True, True, False, "no worker", "")
    assert availability.capacity == info.worker, "the last one is described"
    availability.disconnected("gone")
    gone = NO_CONNECTION.format("gone")
    assert state(availability) == (False, False, False, gone, gone)
    assert availability.server_info() == pb.GetServerInfoResponse(unavailable_reason=gone, **NAMES)


async def test_a_draining_scheduler_refuses_at_once() -> None:
    availability = SchedulerAvailability("there")
    first = asyncio.create_task(availability.wait_for_first_worker(OutputMode.STREAMED))
    availability.drain()
    await asyncio.wait_for(first, 10)
    assert state(availability) == (True, False, False, DRAINING, DRAINING)
    availability.reported(pb.GetServerInfoResponse(worker=pb.WorkerInfo()))
    assert state(availability) == (True, True, False, DRAINING, DRAINING)
    availability.drain()
    assert state(availability)[0] is False, "it is known already"
