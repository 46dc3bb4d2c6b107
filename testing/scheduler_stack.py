"""The scheduler service, run as its own process would run it, on its own port and with a fake worker."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import grpc.aio
from google.rpc import error_details_pb2
from grpc_status import rpc_status
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

from pagewire.options import Resolved
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from scheduler_service import server
from scheduler_service.config import SchedulerConfig
from testing.core.simulated_worker import reference
from testing.fake_worker import FakeWorker

VOCAB_SIZE = 300
EOS = 299  # the simulated worker never generates the last id


def make_tokenizer(path: Path, special_tokens: Sequence[str] = ("<end>",)) -> None:
    """Write a byte-level BPE tokenizer. Any text can be tokenized, and many characters are several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(vocab_size=VOCAB_SIZE, initial_alphabet=alphabet, special_tokens=list(special_tokens))
    tokenizer.train_from_iterator(["once upon a time there was a little hello world"] * 3, trainer)
    tokenizer.save(str(path))


def make_checkpoint(path: Path, *, with_tokenizer: bool = True, **generation_config: object) -> Path:
    path.mkdir(parents=True, exist_ok=True)
    config = {"vocab_size": VOCAB_SIZE, "max_position_embeddings": 256, "eos_token_id": EOS}
    (path / "config.json").write_text(json.dumps(config))
    if generation_config:
        (path / "generation_config.json").write_text(json.dumps(generation_config))
    if with_tokenizer:
        make_tokenizer(path / "tokenizer.json")
    return path


def expected_tokens(prompt: list[int], num_tokens: int, *, seed: int = 0, sample_index: int = 0) -> list[int]:
    return reference(tuple(prompt), num_tokens, seed=seed, sample_index=sample_index, vocab_size=VOCAB_SIZE)


@dataclass
class Stack:
    worker: FakeWorker
    url: str
    stub: scheduler_pb2_grpc.SchedulerServiceStub
    channel: grpc.aio.Channel
    stop: asyncio.Event
    stop_now: asyncio.Event
    running: asyncio.Task[int]

    async def generate(self, request: scheduler_pb2.GenerateRequest, **call: float) -> "Result":
        result = Result()
        async for response in self.stub.Generate(request, **call):
            result.add(response)
        return result

    async def loads(self) -> scheduler_pb2.GetLoadsResponse:
        return await self.stub.GetLoads(scheduler_pb2.GetLoadsRequest())

    async def until(self, holds: Callable[[scheduler_pb2.GetLoadsResponse], bool]) -> scheduler_pb2.GetLoadsResponse:
        async with asyncio.timeout(10):
            loads = await self.loads()
            while not holds(loads):  # the server has no event to wait for
                await asyncio.sleep(0.01)
                loads = await self.loads()
            return loads

    async def until_idle(self) -> scheduler_pb2.GetLoadsResponse:
        return await self.until(lambda loads: not (loads.num_held_blocks or loads.num_running or loads.num_waiting))


class Result:
    """A whole stream, assembled from its responses. Each response is checked (S6)."""

    def __init__(self) -> None:
        self.token_ids: dict[int, list[int]] = {}
        self.texts: dict[int, str] = {}
        self.last: dict[int, scheduler_pb2.GenerateResponse] = {}
        self.responses: list[scheduler_pb2.GenerateResponse] = []

    def add(self, response: scheduler_pb2.GenerateResponse) -> None:
        index = response.index
        assert index not in self.last, "a delta after the last"
        token_ids = self.token_ids.setdefault(index, [])
        assert response.first_token == len(token_ids), "a token was lost or repeated"
        token_ids.extend(response.token_ids)
        self.texts[index] = self.texts.get(index, "") + response.text
        self.responses.append(response)
        if response.finish_reason:
            assert response.usage.completion_tokens == len(token_ids)
            self.last[index] = response


def config_of(options: Mapping[str, object]) -> SchedulerConfig:
    """Return a scheduler's configuration from options by their flags' names."""
    return Resolved(options, {}).build(SchedulerConfig)


@asynccontextmanager
async def serve(
    checkpoint: Path, *, worker: FakeWorker | None = None, workers: str = "", **options: object
) -> AsyncIterator[Stack]:
    """Run a scheduler until the context ends.

    `workers` are the addresses of all ranks, of which `worker` is the first.
    """
    if worker is None:
        worker = await FakeWorker.started(checkpoint)
    own = {"model": str(checkpoint), "worker": workers or f"127.0.0.1:{worker.port}", "port": 0, "metrics_port": 0}
    config = config_of(own | options)
    stop, stop_now = asyncio.Event(), asyncio.Event()
    url: asyncio.Future[str] = asyncio.get_running_loop().create_future()
    running = asyncio.create_task(server.run(config, stop=stop, ready=url.set_result, stop_now=stop_now))
    await asyncio.wait({running, url}, timeout=20, return_when=asyncio.FIRST_COMPLETED)
    assert url.done(), f"the scheduler did not become ready: {running}"
    channel = grpc.aio.insecure_channel(url.result().removeprefix("grpc://"))
    stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
    try:
        yield Stack(worker, url.result(), stub, channel, stop, stop_now, running)
    finally:
        stop.set()
        stop_now.set()
        await running
        await channel.close()
        await worker.kill()


def request(prompt: list[int] | str, **sampling: object) -> scheduler_pb2.GenerateRequest:
    message = scheduler_pb2.GenerateRequest(sampling=scheduler_pb2.SamplingParams(**({"seed": 0} | sampling)))
    if isinstance(prompt, str):
        message.text = prompt
    else:
        message.token_ids.ids.extend(prompt)
    return message


async def status_of(stack: Stack, message: scheduler_pb2.GenerateRequest, **call: float) -> grpc.aio.AioRpcError | None:
    try:
        await stack.generate(message, **call)
    except grpc.aio.AioRpcError as error:
        return error
    return None


def details(error: grpc.aio.AioRpcError) -> tuple[error_details_pb2.BadRequest, error_details_pb2.RetryInfo]:
    metadata = dict(error.trailing_metadata())
    bad_request, retry_info = error_details_pb2.BadRequest(), error_details_pb2.RetryInfo()
    status = rpc_status.status_pb2.Status.FromString(metadata["grpc-status-details-bin"])
    assert status.message == error.details()
    for detail in status.details:
        detail.Unpack(bad_request) or detail.Unpack(retry_info)
    return bad_request, retry_info
