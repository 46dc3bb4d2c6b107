"""VllmEngine's RPCs about the server, its model, its load and its tokenizer."""

import asyncio
import hashlib
import io
import json
import logging
import re
import sys
import zipfile
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from smg_grpc_proto.generated import common_pb2

from pagewire import AsyncClient
from pagewire.common.wire.messages import WorkerCapacity
from pagewire.hosting.supervisor import free_port
from scheduler_service import api, server
from scheduler_service.api.vllm.generate_request import read_generate_request
from scheduler_service.config import SchedulerConfig
from scheduler_service.serving.checkpoint.model_info import read_model_info
from scheduler_service.serving.tenants.caller import Call, Caller
from testing.fake_worker import FakeWorker
from testing.scheduler_stack import EOS, VOCAB_SIZE, Stack, make_checkpoint, serve
from testing.serving.failures import failure_of
from testing.starting_worker import StartingWorker
from tests.contract.vllm_client import generate, request, stub_of

SERVICE = "vllm.grpc.engine.VllmEngine"
PROMPT = [5, 6, 7, 8, 9, 10, 11]


async def health_of(stub: vllm_engine_pb2_grpc.VllmEngineStub) -> vllm_engine_pb2.HealthCheckResponse:
    return await stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest())


async def test_without_its_extra_all_else_is_served(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    monkeypatch.delattr(api.vllm, "servicer", raising=False)
    monkeypatch.delitem(sys.modules, "scheduler_service.api.vllm.servicer", raising=False)
    monkeypatch.setitem(sys.modules, "smg_grpc_proto", None)
    async with serve(checkpoint) as stack, AsyncClient(stack.url) as client:
        assert (await client.complete(prompt_token_ids=PROMPT, max_tokens=2)).outputs[0].token_ids
        await failure_of(health_of(stub_of(stack)), grpc.StatusCode.UNIMPLEMENTED)
    (record,) = [record for record in caplog.records if "is not served without pagewire[router]" in record.getMessage()]
    assert record.levelno == logging.INFO


async def test_it_is_unavailable_until_a_worker_has_joined(checkpoint: Path) -> None:
    fake = FakeWorker(read_model_info(str(checkpoint)).digest)
    worker = StartingWorker(WorkerCapacity(**fake.capacity), free_port("127.0.0.1"))
    port = free_port("127.0.0.1")
    config = SchedulerConfig(model=str(checkpoint), worker=f"127.0.0.1:{worker.port}", port=port, metrics_port=0)
    stop, ready = asyncio.Event(), asyncio.Event()
    running = asyncio.create_task(server.run(config, stop=stop, ready=lambda url: ready.set()))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
        caught = await failure_of(
            stub.HealthCheck(vllm_engine_pb2.HealthCheckRequest(), wait_for_ready=True), grpc.StatusCode.UNAVAILABLE
        )
        assert re.match(r"loading: no worker has joined yet; \d+ s since the start", caught.details())
        await worker.start()
        async with asyncio.timeout(10):
            while "loading: the worker is still starting, importing torch" not in caught.details():
                caught = await failure_of(health_of(stub))
        worker.be_ready()
        await asyncio.wait_for(ready.wait(), 20)
        assert (await health_of(stub)).healthy
        stop.set()
        assert await running == 0
    await worker.stop()


async def test_a_worker_that_stays_away_makes_it_unhealthy(checkpoint: Path) -> None:
    async with serve(checkpoint, worker_timeout=0.2) as stack:
        assert (await health_of(stub_of(stack))).healthy
        await stack.worker.kill()
        async with asyncio.timeout(10):
            while (health := await health_of(stub_of(stack))).healthy:  # noqa: ASYNC110 -- there is no event to wait for
                await asyncio.sleep(0.01)
        assert "no worker has been connected for 0.2 s" in health.message


async def test_standard_health_and_reflection_know_it(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        answer = await health_pb2_grpc.HealthStub(stack.channel).Check(health_pb2.HealthCheckRequest(service=SERVICE))
        assert answer.status == health_pb2.HealthCheckResponse.SERVING

        def services() -> list[str]:
            with grpc.insecure_channel(stack.url.removeprefix("grpc://")) as channel:
                return list(ProtoReflectionDescriptorDatabase(channel).get_services())

        assert SERVICE in await asyncio.to_thread(services)


async def test_model_info(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "tiny", temperature=0.5, top_k=20, top_p=1.0)
    config = json.loads((checkpoint / "config.json").read_text())
    config |= {"model_type": "qwen3", "architectures": ["Qwen3ForCausalLM"], "bos_token_id": 7}
    (checkpoint / "config.json").write_text(json.dumps(config))
    (checkpoint / "tokenizer_config.json").write_text('{"tokenizer_class": "PreTrainedTokenizerFast"}')
    async with serve(checkpoint, served_model_name="story") as stack:
        info = await stub_of(stack).GetModelInfo(vllm_engine_pb2.GetModelInfoRequest())
    assert (info.served_model_name, info.model_path) == ("story", str(checkpoint))
    assert info.tokenizer_path == info.model_path
    assert info.is_generation
    assert not info.supports_vision
    assert (info.max_context_length, info.max_req_input_len, info.vocab_size) == (256, 255, VOCAB_SIZE)
    assert (info.model_type, list(info.architectures)) == ("qwen3", ["Qwen3ForCausalLM"])
    assert (list(info.eos_token_ids), info.bos_token_id, info.pad_token_id) == ([EOS], 7, 0)
    assert json.loads(info.default_sampling_params_json) == {"temperature": 0.5, "top_k": 20}


def test_the_checkpoints_sampling_defaults_are_the_routers_business(tmp_path: Path) -> None:
    """A filter that the router does not set is off. Otherwise "no filter" could not be distinguished from "the
    default".
    """
    defaults = {"temperature": 0.5, "top_p": 0.9, "top_k": 20, "min_p": 0.1, "repetition_penalty": 1.1}
    model = read_model_info(str(make_checkpoint(tmp_path / "tiny", **defaults)))
    assert {name: getattr(model.sampling_defaults, name) for name in defaults} == defaults
    parsed = read_generate_request(request(PROMPT), Call(Caller(None)), model)
    off = {"temperature": 1, "top_p": 1, "top_k": 0, "min_p": 0, "repetition_penalty": 1}
    assert {name: getattr(parsed.request.sampling, name) for name in off} == off
    assert (parsed.request.n, parsed.max_tokens) == (1, None)


async def test_server_info(checkpoint: Path) -> None:
    async with serve(checkpoint, max_num_seqs=7) as stack:
        stack.worker.step_seconds = 0.005
        call = asyncio.create_task(generate(stack, request(PROMPT, max_tokens=240, n=2)))
        await stack.until(lambda loads: loads.num_running == 2)
        info = await stub_of(stack).GetServerInfo(vllm_engine_pb2.GetServerInfoRequest())
        call.cancel()
    assert (info.server_type, info.data_parallel_size, info.block_size, info.max_num_seqs) == ("vllm-grpc", 1, 4, 7)
    assert (info.model_dtype, info.kv_cache_dtype, info.attention_backend) == ("float32", "float32", "fake")
    assert info.constrained_decoding_start == "first_token"
    assert info.active_requests == 2
    assert not info.is_paused
    assert 0 < info.uptime_seconds < 60
    assert info.last_receive_timestamp > 1.7e9


async def loads_of(stack: Stack) -> vllm_engine_pb2.SchedulerLoad:
    response = await stub_of(stack).GetLoads(vllm_engine_pb2.GetLoadsRequest(include=["core", "queues"]))
    assert (response.dp_rank_count, len(response.loads)) == (1, 1)
    return response.loads[0]


async def test_loads_count_what_cannot_be_evicted(checkpoint: Path) -> None:
    async with serve(checkpoint, max_num_seqs=2) as stack:
        stack.worker.step_seconds = 0.005
        calls = [asyncio.create_task(generate(stack, request([*PROMPT, i], max_tokens=200))) for i in range(3)]
        await stack.until(lambda loads: loads.num_running == 2)
        load = await loads_of(stack)
        assert (load.num_running_reqs, load.num_waiting_reqs, load.num_total_reqs) == (2, 1, 3)
        assert (load.max_running_requests, load.utilization) == (2, 1.0)
        assert load.num_waiting_uncached_tokens == len(PROMPT) + 1
        assert load.max_total_num_tokens == 1600
        assert load.token_usage == load.num_used_tokens / 1600 > 0
        stack.worker.step_seconds = 0
        await asyncio.gather(*calls)
        await stack.until_idle()
        load = await loads_of(stack)
        assert (load.token_usage, load.num_used_tokens, load.num_total_reqs) == (0, 0, 0)
        assert (await stack.loads()).num_cached_blocks > 0
        await generate(stack, request([*PROMPT, 0], max_tokens=1))
        assert (await loads_of(stack)).cache_hit_rate > 0
        await failure_of(
            stub_of(stack).GetLoads(vllm_engine_pb2.GetLoadsRequest(dp_rank=1)), grpc.StatusCode.INVALID_ARGUMENT
        )


async def tokenizer_of(stack: Stack) -> tuple[zipfile.ZipFile, int]:
    """Return the tokenizer archive, whose checksum is verified, and the number of its chunks."""
    chunks = [chunk async for chunk in stub_of(stack).GetTokenizer(common_pb2.GetTokenizerRequest())]
    data = b"".join(chunk.data for chunk in chunks)
    assert [chunk.sha256 for chunk in chunks] == [*[""] * (len(chunks) - 1), hashlib.sha256(data).hexdigest()]
    assert all(0 < len(chunk.data) <= 65536 for chunk in chunks)
    return zipfile.ZipFile(io.BytesIO(data)), len(chunks)


async def test_the_tokenizer_comes_as_its_files(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "tiny")
    extra = {"tokenizer_config.json": "{}", "chat_template.jinja": "{{ messages }}", "spiece.model": "x" * 200_000}
    for name, text in extra.items():
        (checkpoint / name).write_text(text)
    (checkpoint / "model.safetensors").write_bytes(b"not for routers")
    async with serve(checkpoint) as stack:
        archive, _ = await tokenizer_of(stack)
        again, _ = await tokenizer_of(stack)
    names = {"config.json", "tokenizer.json", *extra}
    assert set(archive.namelist()) == set(again.namelist()) == names
    assert {name: archive.read(name) for name in names} == {name: (checkpoint / name).read_bytes() for name in names}


async def test_a_big_tokenizer_comes_in_chunks(tmp_path: Path) -> None:
    checkpoint = make_checkpoint(tmp_path / "tiny")
    noise = b"".join(hashlib.sha256(bytes([i % 256, i // 256])).digest() for i in range(5000))
    (checkpoint / "spiece.model").write_bytes(noise)
    async with serve(checkpoint) as stack:
        archive, num_chunks = await tokenizer_of(stack)
    assert num_chunks >= 3
    assert archive.read("spiece.model") == noise


async def test_no_tokenizer_is_said_plainly(tmp_path: Path) -> None:
    async with serve(make_checkpoint(tmp_path / "bare", with_tokenizer=False)) as stack:
        await failure_of(tokenizer_of(stack), grpc.StatusCode.FAILED_PRECONDITION)
        output = await generate(stack, request(PROMPT, max_tokens=3))
        assert len(output.complete.output_ids) == 3


async def test_there_is_no_profiler(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        stub = stub_of(stack)
        for call in (
            stub.StartProfile(common_pb2.StartProfileRequest()),
            stub.StopProfile(common_pb2.StopProfileRequest()),
        ):
            await failure_of(call, grpc.StatusCode.UNIMPLEMENTED, "no profiler")
