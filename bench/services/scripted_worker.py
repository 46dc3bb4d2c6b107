"""A simulated worker, which answers every plan after a fixed time with random tokens.

    python -m bench.services.scripted_worker MODEL [--step-ms 4]

It follows the wire protocol, so that a real scheduler can be measured without a model and at almost no cost per step.
It supports rows, work and samples. It refuses forks, beams and log-probabilities.
"""

import argparse
import asyncio
import random
import secrets
import time

import grpc.aio

from pagewire.protos.gen.pagewire.worker.v1 import worker_pb2, worker_pb2_grpc
from scheduler_service.serving.checkpoint.model_info import read_model_info

MAX_MESSAGE_BYTES = 64 * 1024 * 1024
HEARTBEAT_INTERVAL_S = 0.5
# Token ids of the bundled tokenizer after single bytes and special tokens, so that every token is text.
FIRST_TOKEN_ID, NUM_TOKEN_IDS = 300, 700


class Rows:
    """The distance of every slot from its next sample."""

    def __init__(self) -> None:
        self._num_left: dict[int, int] = {}  # tokens to compute before the slot samples
        self._work: dict[int, int] = {}
        self._num_steady = 0  # rows that sample in each step until a plan changes them
        self._is_steady = False

    def execute(self, plan: worker_pb2.StepPlan) -> int:
        """Apply a plan. Return the number of rows that sample in this step."""
        if plan.fork_target_slots or plan.append_token_slots:
            raise NotImplementedError("the scripted worker does not support forks and beams")
        if self._is_steady and not (plan.released_slots or plan.openings or plan.work_slots):
            return self._num_steady
        for slot in plan.released_slots:
            del self._num_left[slot], self._work[slot]
        for opening in plan.openings:
            self._num_left[opening.slot] = len(opening.token_ids) - opening.num_computed_tokens
            self._work[opening.slot] = 0
        self._work.update(zip(plan.work_slots, plan.work_num_tokens, strict=True))
        num_samples = 0
        for slot, work in self._work.items():
            if work and work == self._num_left[slot]:
                self._num_left[slot] = self._work[slot] = 1
                num_samples += 1
            else:
                self._num_left[slot] -= work
        self._num_steady = sum(1 for work in self._work.values() if work)
        self._is_steady = all(self._num_left[slot] == 1 for slot, work in self._work.items() if work)
        return num_samples


class ScriptedWorker(worker_pb2_grpc.WorkerServiceServicer):
    def __init__(self, model: str, step_s: float, num_device_blocks: int) -> None:
        info = read_model_info(model)
        self._step_s = step_s
        self._rng = random.Random(0)
        self._ready = worker_pb2.WorkerCapacity(
            worker_id=secrets.token_hex(4),
            model_digest=info.digest,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            block_size=16,
            num_device_blocks=num_device_blocks,
            block_bytes=1,
            max_num_seqs=4096,
            max_num_batched_tokens=65_536,
            device="none",
            dtype="none",
            attention_backend="scripted",
            tensor_parallel_size=1,
            layer_groups=[worker_pb2.LayerGroup()],
        )

    async def Execute(self, requests: object, context: grpc.aio.ServicerContext) -> None:
        hello = (await context.read()).hello
        await context.write(worker_pb2.ExecuteResponse(ready=self._ready))
        outbox: asyncio.Queue[worker_pb2.ExecuteResponse] = asyncio.Queue()
        tasks = [asyncio.create_task(each) for each in (_write(outbox, context), _beat(outbox, hello.epoch))]
        try:
            await self._serve(context, outbox)
        finally:
            for task in tasks:
                task.cancel()

    async def _serve(self, context: grpc.aio.ServicerContext, outbox: asyncio.Queue) -> None:
        rows, free_at = Rows(), 0.0
        while (request := await context.read()) is not grpc.aio.EOF:
            num_samples = rows.execute(request.plan)
            token_ids = self._rng.choices(range(FIRST_TOKEN_ID, FIRST_TOKEN_ID + NUM_TOKEN_IDS), k=num_samples)
            # Steps follow one another without gaps if plans arrive in time.
            free_at = max(free_at, time.monotonic()) + self._step_s
            await asyncio.sleep(free_at - time.monotonic())
            result = worker_pb2.StepResult(
                epoch=request.plan.epoch,
                step=request.plan.step,
                token_ids=token_ids,
                duration_us=round(self._step_s * 1e6),
            )
            outbox.put_nowait(worker_pb2.ExecuteResponse(result=result))


async def _write(outbox: asyncio.Queue, context: grpc.aio.ServicerContext) -> None:
    while True:
        await context.write(await outbox.get())


async def _beat(outbox: asyncio.Queue, epoch: int) -> None:
    while True:
        await asyncio.sleep(HEARTBEAT_INTERVAL_S)
        outbox.put_nowait(worker_pb2.ExecuteResponse(heartbeat=worker_pb2.Heartbeat(epoch=epoch)))


async def serve(model: str, step_s: float, num_device_blocks: int) -> None:
    options = [
        ("grpc.so_reuseport", 0),
        ("grpc.max_receive_message_length", MAX_MESSAGE_BYTES),
        ("grpc.http2.max_ping_strikes", 0),
    ]
    server = grpc.aio.server(options=options)
    worker_pb2_grpc.add_WorkerServiceServicer_to_server(ScriptedWorker(model, step_s, num_device_blocks), server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    print(f"ready on grpc://127.0.0.1:{port}", flush=True)
    await server.wait_for_termination()


def run_program() -> None:
    parser = argparse.ArgumentParser(description="A simulated worker without a model.")
    parser.add_argument("model", help="checkpoint directory, of which only config.json and tokenizer.json are read")
    parser.add_argument("--step-ms", type=float, default=4.0, help="duration of a step (default: 4)")
    parser.add_argument("--num-device-blocks", type=int, default=65_536, help="blocks of 16 tokens (default: 65536)")
    arguments = parser.parse_args()
    asyncio.run(serve(arguments.model, arguments.step_ms / 1000, arguments.num_device_blocks))


if __name__ == "__main__":
    run_program()
