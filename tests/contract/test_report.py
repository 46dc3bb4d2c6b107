"""The scheduler's reports about itself: each field of a record reaches the message, and no other field is set."""

import random
from dataclasses import fields
from typing import get_args

from pagewire.common.wire.messages import LayerGroup, WorkerCapacity
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from scheduler_service.api.grpc.report import decode_stats, encode_loads, encode_report, encode_worker
from scheduler_service.core.request import BlockHolder, RequestReport, SchedulerStats
from scheduler_service.metrics import NUM_RECENT, Metrics

LATENCIES = {"time_to_first_token", "time_per_output_token", "queue_time"}


def values(record: type, rng: random.Random) -> dict[str, object]:
    """Return a distinct random value for each plain field of a record type."""
    makers = {"int": lambda: rng.randrange(1, 2**31), "int | None": lambda: rng.randrange(1, 2**31)}
    makers |= {"str": lambda: f"text {rng.random()}", "bytes": lambda: rng.randbytes(4), "float": rng.random}
    makers["tuple[int, ...]"] = lambda: tuple(rng.randrange(1, 2**31) for _ in range(5))
    kinds = {
        field.name: str(field.type) if get_args(field.type) else getattr(field.type, "__name__", str(field.type))
        for field in fields(record)
    }
    return {name: makers[kind]() for name, kind in kinds.items() if kind in makers}


def names(message: type) -> set[str]:
    return set(message.DESCRIPTOR.fields_by_name)


def test_loads_are_all_statistics() -> None:
    stats = SchedulerStats(**values(SchedulerStats, random.Random(1)))
    loads = encode_loads(stats)
    assert decode_stats(loads) == stats
    told = {field.name for field, _ in loads.ListFields()}
    others = {"generation_throughput", "worker_connected", "num_worker_losses", *LATENCIES}
    assert names(pb.GetLoadsResponse) - told == others


def test_latencies_are_those_of_the_last_observations() -> None:
    metrics = Metrics()
    assert metrics.latencies() == {}
    queue_times = metrics.histograms["vllm:request_queue_time_seconds"]
    seconds = [float(value) for value in range(1, NUM_RECENT + 1)]
    random.Random(4).shuffle(seconds)
    for value in [1e6, *seconds]:  # the first is forgotten
        queue_times.observe(value)
    metrics.first_token_after(0.25)
    loads = encode_loads(SchedulerStats(**values(SchedulerStats, random.Random(1))), **metrics.latencies())
    assert loads.queue_time == pb.Latency(num_sequences=1000, mean=500.5, p50=501, p99=991)
    assert loads.time_to_first_token == pb.Latency(num_sequences=1, mean=0.25, p50=0.25, p99=0.25)
    assert not loads.HasField("time_per_output_token")


def test_a_report_is_told_in_full() -> None:
    record = values(RequestReport, random.Random(2)) | {
        "state": "swapped",
        "holders": (BlockHolder("first", 3), BlockHolder(None, 2)),
        "arrived_at": 10.0,
    }
    response = encode_report(RequestReport(**record), 12.5)
    assert {field.name for field, _ in response.ListFields()} == names(pb.GetRequestResponse)
    assert response.age_seconds == 2.5
    assert response.state == pb.REQUEST_STATE_SWAPPED
    held = [(each.request_id if each.HasField("request_id") else None, each.num_blocks) for each in response.holders]
    assert held == [("first", 3), (None, 2)]
    for name in set(record) - {"state", "holders", "arrived_at"}:
        assert getattr(response, name) == record[name]


def test_a_worker_is_told_in_full() -> None:
    groups = (LayerGroup(9, 2), LayerGroup(5, 4))
    record = values(WorkerCapacity, random.Random(3)) | {"layer_groups": groups}
    info = encode_worker(WorkerCapacity(**record), 7)
    assert {field.name for field, _ in info.ListFields()} == names(pb.WorkerInfo)
    assert (info.epoch, info.sliding_window, list(info.layer_group_windows)) == (7, 9, [9, 5])
    for name in names(pb.WorkerInfo) - {"epoch", "sliding_window", "layer_group_windows"}:
        assert getattr(info, name) == record[name]
