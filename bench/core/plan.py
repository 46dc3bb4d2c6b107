"""Measures a steady plan on the wire: its size in bytes, and the time to encode and decode it."""

import statistics
import time

from pagewire.common.wire.messages import SamplingParams, StepPlan, StepResult, WorkerCapacity
from pagewire.common.wire.worker_wire import decode_request, encode_request
from pagewire.protos.gen.pagewire.worker.v1 import worker_pb2
from scheduler_service.core.request import Request
from scheduler_service.core.scheduler import Scheduler
from scheduler_service.core.scheduler_options import SchedulerOptions

NUM_STEPS = 1000
VOCAB_SIZE = 32000


def steady_plans(num_sequences: int) -> list[StepPlan]:
    """Return the plans of sequences that only decode, some of which begin a new block.

    The prompts have 1 to 16 tokens, and a block has 16 tokens.
    """
    options = SchedulerOptions(max_num_seqs=num_sequences, max_num_batched_tokens=16384, max_model_len=8192)
    scheduler = Scheduler(options)
    capacity = WorkerCapacity(
        worker_id="bench",
        model_digest=b"",
        vocab_size=VOCAB_SIZE,
        max_model_len=8192,
        block_size=16,
        num_device_blocks=num_sequences * 512,
        block_bytes=1,
        max_num_seqs=num_sequences,
        max_num_batched_tokens=16384,
        device="",
        dtype="",
        attention_backend="",
    )
    scheduler.worker_joined(capacity, (time.time_ns() // 1_000_000) << 20, 0.0)
    for i in range(num_sequences):
        scheduler.add(Request(str(i), "", (i,) * (1 + i % 16), SamplingParams(), NUM_STEPS + 100), 0.0)
    plans = []
    for _ in range(NUM_STEPS):
        plan = scheduler.schedule(0.0)
        scheduler.complete(StepResult(plan.epoch, plan.step, token_ids=(7,) * num_sequences), 0.0)
        plans.append(plan)
    return plans[8:]  # skip the first plans, which allocate rows and fill the working set


def measure(num_sequences: int = 256) -> dict[str, float]:
    """Return the size of the largest steady plan in bytes, and median durations in microseconds."""
    sizes, encode_us, decode_us = [], [], []
    for plan in steady_plans(num_sequences):
        start = time.perf_counter_ns()
        data = encode_request(plan).SerializeToString()
        encoded = time.perf_counter_ns()
        decoded = decode_request(worker_pb2.ExecuteRequest.FromString(data))
        done = time.perf_counter_ns()
        assert decoded.step == plan.step
        sizes.append(len(data))
        encode_us.append((encoded - start) / 1000)
        decode_us.append((done - encoded) / 1000)
    return {
        "num_sequences": num_sequences,
        "max_bytes": max(sizes),
        "median_bytes": statistics.median(sizes),
        "encode_us": statistics.median(encode_us),
        "decode_us": statistics.median(decode_us),
    }
