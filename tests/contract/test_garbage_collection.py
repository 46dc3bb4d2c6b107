"""Objects of ended requests are freed by reference counting, and collections are short however much is cached."""

import asyncio
import gc
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from pagewire.common.wire.transport.otlp import tracer_provider
from pagewire.hosting.supervisor import free_port
from scheduler_service.metrics import Metrics
from testing.scheduler_stack import Stack, serve
from tests.thorough import thorough

ROOT = Path(__file__).parents[2]
# Objects that gRPC itself leaves for every RPC before the RPC is served.
OF_GRPC = {"_Metadatum", "tuple", "__pyx_scope_struct_35__find_method_handler", "cython_function_or_method"}
OF_GRPC |= {"_HandlerCallDetails"}


async def send(stack: Stack, number: int) -> None:
    command = [sys.executable, "-m", "tests.contract.mixed_traffic", stack.url.removeprefix("grpc://"), str(number)]
    process = await asyncio.create_subprocess_exec(*command, cwd=ROOT)
    assert await process.wait() == 0
    await stack.until_idle()


def unreachable() -> Counter[str]:
    """Return the number of objects of each type that only a garbage collection would free."""
    gc.set_debug(gc.DEBUG_SAVEALL)
    gc.collect()
    gc.set_debug(0)
    found = Counter(type(each).__name__ for each in gc.garbage)
    gc.garbage.clear()
    return found


@pytest.mark.parametrize("num_requests", [300, *thorough(2000)])
async def test_requests_of_every_kind_leave_nothing_to_collect(checkpoint: Path, num_requests: int) -> None:
    async with serve(checkpoint, detached_retention=0.01) as stack:
        await send(stack, 100)  # objects that are created only once, and objects of this process's client
        gc.collect()
        gc.disable()
        try:
            await send(stack, num_requests)
            left = unreachable()
            await stack.worker.kill()
            await stack.until(lambda loads: not loads.worker_connected)
            await stack.worker.start()
            await stack.until(lambda loads: loads.worker_connected)
            left_by_worker = unreachable()
        finally:
            gc.enable()
        print(left, left_by_worker)
        assert {name for name, count in left.items() if count > 20} <= OF_GRPC
        # At most one set for each lost worker: the frames that raised the error of its broken stream.
        assert {name for name, count in left_by_worker.items() if count > 50} <= OF_GRPC


def test_survivors_are_hidden_from_the_next_collection() -> None:
    """Objects that survive a collection are not scanned again, even if a process keeps a million objects.

    No collection scans more objects than were created since the last full collection. No full collection runs if
    equally many objects are freed as created, which Python does not count as growth.
    """
    program = """
import collections, gc
from pagewire.common.process import garbage_collection
garbage_collection.keep_short()
most = 0
def count(phase, info):
    global most
    if phase == "start":
        most = max(most, sum(len(gc.get_objects(generation)) for generation in range(info["generation"] + 1)))
gc.callbacks.append(count)
kept = [[] for _ in range(1_000_000)]
assert gc.get_freeze_count() > 900_000, gc.get_freeze_count()
assert 0 < most < 5_000, most
turned_over = collections.deque(([] for _ in range(50_000)), maxlen=50_000)
for _ in range(5):
    turned_over.extend([] for _ in range(50_000))
    burst = [[] for _ in range(1_000)]
assert most < 10_000, most
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def test_imported_objects_are_not_scanned() -> None:
    program = """
import gc
from pagewire.common.process import garbage_collection
sizes = []
def count(phase, info):
    if phase == "start":
        sizes.append(sum(len(gc.get_objects(generation)) for generation in range(info["generation"] + 1)))
gc.callbacks.append(count)
garbage_collection.keep_short()
assert max(sizes) < 100, sizes
"""
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True)


def run_in_service(program: str) -> None:
    """Run a program in a separate process.

    The program can create `Call` objects, which contain reference cycles as a library leaves them.
    """
    calls = """
import collections, gc
from pagewire.common.process import garbage_collection

class Call:
    num_alive = 0
    def __init__(self):
        Call.num_alive += 1
        self.itself = [self] * 10
        self.parts = [[], {}, [[]]]
    def __del__(self):
        Call.num_alive -= 1

garbage_collection.keep_short()
"""
    subprocess.run([sys.executable, "-c", calls + program], cwd=ROOT, check=True)


@pytest.mark.parametrize("num_remembered", [0, *thorough(100_000)])
def test_cycles_are_collected_in_a_busy_service(num_remembered: int) -> None:
    """Garbage cycles of a busy service are collected, however many objects it remembers, even if they were frozen
    before the call ended.

    Few collections scan all objects.
    """
    run_in_service(f"""
garbage_collection.MAX_HIDDEN_GARBAGE = 100_000
sizes = []
def count(phase, info):
    if phase == "start":
        sizes.append(sum(len(gc.get_objects(number)) for number in range(info["generation"] + 1)))

remembered = [{{number: [number]}} for number in range({num_remembered})]
gc.callbacks.append(count)
in_use, most = collections.deque(maxlen=5000), 0
for number in range(100_000):
    in_use.append(Call())
    most = max(most, Call.num_alive)
# A call has six objects, and one that is remembered two.
alive = 2 * {num_remembered} + 6 * in_use.maxlen
assert 2 * {num_remembered} + 6 * most < 2 * alive + 3 * garbage_collection.MAX_HIDDEN_GARBAGE, most
assert most < 100_000, "nothing has gone"
num_large = sum(size > 10_000 for size in sizes)
assert 0 < num_large < 8, num_large
""")


@pytest.mark.thorough
def test_remembered_objects_are_not_scanned() -> None:
    """Collections do not scan the objects that a service remembers, even if they are most of the memory."""
    run_in_service("""
garbage_collection.MAX_HIDDEN_GARBAGE = 100_000
remembered = []
garbage_collection.discount(lambda: 2 * len(remembered))
sizes = []
def count(phase, info):
    if phase == "start":
        sizes.append(sum(len(gc.get_objects(number)) for number in range(info["generation"] + 1)))

gc.callbacks.append(count)
for number in range(1_000_000):
    remembered.append([])
assert 0 < max(sizes) < 10_000, max(sizes)
""")


def test_frozen_garbage_is_collected_when_idle() -> None:
    run_in_service("""
in_use, remembered = collections.deque(maxlen=64), []
for number in range(10_000):
    in_use.append(Call())
    remembered += [[] for _ in range(10)]
assert Call.num_alive > 64, "nothing was hidden"
garbage_collection.collect_hidden()
assert Call.num_alive == 64, Call.num_alive
""")


def test_the_metric_times_collections() -> None:
    metrics = Metrics()
    gc.callbacks.append(metrics.collection)
    try:
        gc.collect()
        gc.collect()
    finally:
        gc.callbacks.remove(metrics.collection)
    pauses, cpu_times = (metrics.histograms[f"pagewire:gc_{kind}_seconds"] for kind in ("pause", "cpu"))
    assert pauses.buckets()[-1][1] == cpu_times.buckets()[-1][1] >= 2
    assert pauses.sum > 0
    assert cpu_times.sum > 0


def test_spans_that_were_not_exported_are_freed() -> None:
    """Spans that were not exported are freed by reference counting, although gRPC's connection error refers to the
    frames that it passed.
    """
    provider = tracer_provider(f"http://127.0.0.1:{free_port('127.0.0.1')}", "service", "1")
    gc.collect()
    gc.disable()
    try:
        for _ in range(50):
            provider.get_tracer("test").start_span("request").end()
        provider.force_flush()
        left = unreachable()
    finally:
        gc.enable()
        provider.shutdown()
    assert left["ReadableSpan"] == 0, left
