"""The scheduler server around its RPCs: configuration, ports, certificates, health and metrics."""

import asyncio
import json
import logging
import socket
import time
import urllib.request
from dataclasses import MISSING, fields, replace
from pathlib import Path

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase
from prometheus_client.parser import text_string_to_metric_families

from pagewire.hosting.supervisor import free_port
from pagewire.options import options_of
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from scheduler_service import server
from scheduler_service.config import SchedulerConfig
from scheduler_service.core.request import SchedulerStats
from scheduler_service.metrics import Histogram
from scheduler_service.serving.activity import Activity
from scheduler_service.serving.checkpoint.model_info import read_model_info
from testing.fake_worker import FakeWorker
from testing.scheduler_stack import config_of, expected_tokens, make_checkpoint, request, serve
from testing.serving.certificates import Authority, self_signed
from testing.serving.failures import failure_of

PROMPT = [5, 6, 7, 8, 9]


async def run_and_fail(caplog: pytest.LogCaptureFixture, *, exit_code: int = 78, **options: object) -> str:
    """Start a server that must fail. Return its only log line."""
    config = config_of({"port": 0, "metrics_port": 0} | options)
    caplog.clear()  # discard the lines of earlier servers
    with caplog.at_level(logging.ERROR):
        assert await asyncio.wait_for(server.run(config, stop=asyncio.Event(), ready=print), 10) == exit_code
    (record,) = [record for record in caplog.records if record.name.startswith("scheduler_service")]
    assert "\n" not in record.getMessage()
    return record.getMessage()


def test_every_option_has_a_help_text() -> None:
    assert all(option.help for option in options_of(SchedulerConfig).values())


@pytest.mark.parametrize(
    ("option", "flag"),
    [
        ({"model": ""}, "--model"),
        ({"port": 65536}, "--port"),
        ({"metrics_port": -1}, "--metrics-port"),
        ({"worker": "nowhere"}, "--worker"),
        ({"max_num_seqs": 0}, "--max-num-seqs"),
        ({"pipeline_depth": 0}, "--pipeline-depth"),
        ({"worker_timeout": float("nan")}, "--worker-timeout"),
        ({"worker_grace": -1.0}, "--worker-grace"),
        ({"worker_grace": float("nan")}, "--worker-grace"),
        ({"max_model_len": 1}, "--max-model-len"),
        ({"watermark": 1.0}, "--watermark"),
        ({"watermark": float("nan")}, "--watermark"),
        ({"policy": "random"}, "--policy"),
        ({"preemption": "kill"}, "--preemption"),
        ({"max_tenant_waiting_requests": 0}, "--max-tenant-waiting-requests"),
        ({"detached_retention": -1.0}, "--detached-retention"),
        ({"max_retention_seconds": -1}, "--max-retention-seconds"),
        ({"max_kv_event_bytes": -1}, "--max-kv-event-bytes"),
        ({"tls_cert": "x"}, "--tls-key"),
        ({"tls_client_ca": "x"}, "--tls-cert"),
        ({"worker_tls_cert": "x", "worker_tls_key": "x"}, "--worker-tls-ca"),
    ],
)
def test_bad_options_are_named(option: dict[str, object], flag: str) -> None:
    with pytest.raises(ValueError, match=flag):
        config_of({"model": "somewhere"} | option).validate()
    SchedulerConfig(model="somewhere").validate()


def test_model_info(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "story", top_k=20, temperature=0.6, eos_token_id=[7, 3])
    (path / "tokenizer_config.json").write_text(json.dumps({"chat_template": "{{ messages }}"}))
    info = read_model_info(str(path))
    assert (info.name, info.vocab_size, info.max_model_len, info.eos_token_ids) == ("story", 300, 256, (3, 7))
    assert (info.sampling_defaults.top_k, info.sampling_defaults.temperature) == (20, 0.6)
    assert info.chat_template == "{{ messages }}"
    (path / "chat_template.jinja").write_text("other")
    assert read_model_info(str(path)).chat_template == "other"
    (path / "tokenizer.json").unlink()
    without = read_model_info(str(path))
    assert without.tokenizer_path is None
    assert without.digest != info.digest


def test_model_info_length_of_gpt2(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps({"vocab_size": 9, "n_positions": 12, "eos_token_id": 4}))
    info = read_model_info(str(tmp_path))
    assert (info.max_model_len, info.eos_token_ids) == (12, (4,))


@pytest.mark.parametrize("generation_config", [{"top_p": -1}, {"temperature": "hot"}, {"eos_token_id": "end"}])
async def test_a_bad_checkpoint_is_one_clear_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, generation_config: dict[str, object]
) -> None:
    path = make_checkpoint(tmp_path / "bad", **generation_config)
    assert next(iter(generation_config)) in await run_and_fail(caplog, model=str(path))


async def test_a_missing_checkpoint_is_one_clear_line(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    assert "--model" in await run_and_fail(caplog, model=str(tmp_path / "nowhere"))


async def test_a_taken_port_is_one_clear_line(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    async with serve(checkpoint) as stack:
        port = int(stack.url.rpartition(":")[2])
        assert "--port" in await run_and_fail(caplog, exit_code=1, model=str(checkpoint), port=port)


async def test_a_taken_metrics_port_is_one_clear_line(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    with socket.socket() as holder:
        holder.bind(("127.0.0.1", 0))
        holder.listen()
        port = holder.getsockname()[1]
        assert "--metrics-port" in await run_and_fail(caplog, exit_code=1, model=str(checkpoint), metrics_port=port)


async def test_health_and_reflection(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        stub = health_pb2_grpc.HealthStub(stack.channel)
        for name in ("", "pagewire.scheduler.v1.SchedulerService", "liveness"):
            answer = await stub.Check(health_pb2.HealthCheckRequest(service=name))
            assert answer.status == health_pb2.HealthCheckResponse.SERVING
        services = await asyncio.to_thread(_reflected_services, stack.url.removeprefix("grpc://"))
        assert "pagewire.scheduler.v1.SchedulerService" in services


def _reflected_services(target: str) -> list[str]:
    with grpc.insecure_channel(target) as channel:
        return list(ProtoReflectionDescriptorDatabase(channel).get_services())


async def test_metrics(checkpoint: Path) -> None:
    port = free_port("127.0.0.1")
    worker = await FakeWorker.started(checkpoint, num_host_blocks=7, swap_bandwidth=1e9)
    began_at = time.monotonic()
    async with serve(checkpoint, worker=worker, metrics_port=port, served_model_name="story") as stack:
        await stack.generate(request(PROMPT, max_tokens=20, n=2))
        await stack.generate(request(PROMPT, max_tokens=7))
        text = await asyncio.to_thread(_scrape, f"http://127.0.0.1:{port}/metrics")
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    assert {sample.labels["model_name"] for sample in samples} == {"story"}
    assert {sample.labels["engine"] for sample in samples} == {"0"}

    def value(name: str, **labels: str) -> float:
        (found,) = [sample for sample in samples if sample.name == name and labels.items() <= sample.labels.items()]
        return found.value

    seconds = time.monotonic() - began_at
    for sample in samples:
        if sample.name.endswith("_seconds_sum"):
            assert 0 <= sample.value <= seconds * value(sample.name.removesuffix("sum") + "count"), sample.name
    assert value("vllm:generation_tokens_total") == 47
    assert value("vllm:prompt_tokens_total") == 15
    assert value("vllm:prefix_cache_hits_total") >= 4
    assert value("vllm:num_requests_running") == 0
    assert value("vllm:kv_cache_usage_perc") == 0
    assert value("vllm:request_success_total", finished_reason="length") == 3
    assert value("vllm:time_to_first_token_seconds_count") == 3
    assert value("vllm:inter_token_latency_seconds_count") == 44
    assert value("vllm:e2e_request_latency_seconds_count") == 3
    assert value("vllm:request_generation_tokens_sum") == 47
    assert value("vllm:iteration_tokens_total_sum") >= 47
    assert value("pagewire:epochs_total") == 1
    num_steps = value("vllm:iteration_tokens_total_count")
    assert value("pagewire:step_duration_seconds_count") == num_steps > 0
    # The fake worker reports one millisecond for each step.
    assert value("pagewire:step_duration_seconds_sum") == pytest.approx(num_steps * 0.001)
    assert value("pagewire:plan_bytes_count") > 0
    assert value("vllm:cache_config_info", block_size="4", num_gpu_blocks="400", num_cpu_blocks="7") == 1
    assert value("vllm:num_requests_swapped") == 0
    assert value("vllm:cpu_cache_usage_perc") == 0
    assert (value("pagewire:device_blocks"), value("pagewire:host_blocks")) == (400, 7)
    assert value("pagewire:cached_device_blocks") > 0
    assert value("pagewire:cached_prompt_tokens_total", tier="device") == value("vllm:prefix_cache_hits_total")
    assert value("pagewire:cached_prompt_tokens_total", tier="host") == 0
    # Two blocks with the same content are stored once.
    assert 0 < value("pagewire:kv_events_total", kind="stored") <= value("pagewire:cached_device_blocks")
    assert value("pagewire:kv_events_total", kind="removed") == 0
    assert value("pagewire:invariant_failures_total") == 0


async def test_metrics_of_a_worker_that_is_lost(checkpoint: Path) -> None:
    port = free_port("127.0.0.1")
    async with serve(checkpoint, metrics_port=port) as stack:
        for num_losses in range(2):
            text = await asyncio.to_thread(_scrape, f"http://127.0.0.1:{port}/metrics")
            samples = {
                sample.name: sample for family in text_string_to_metric_families(text) for sample in family.samples
            }
            assert samples["pagewire:worker_losses_total"].value == num_losses
            assert samples["pagewire:device_blocks"].value == (0 if num_losses else 400)
            await stack.worker.kill()
            await stack.until(lambda loads: not loads.worker_connected)


async def test_metrics_of_a_full_cache(checkpoint: Path) -> None:
    port = free_port("127.0.0.1")
    digest = read_model_info(str(checkpoint)).digest
    worker = FakeWorker(digest, num_device_blocks=64, num_host_blocks=300, swap_bandwidth=1e12)
    await worker.start()
    async with serve(checkpoint, worker=worker, metrics_port=port, preemption="swap") as stack:
        prompts = [[index, *PROMPT] for index in range(20)]
        await asyncio.gather(*(stack.generate(request(prompt, max_tokens=100)) for prompt in prompts))
        loads = await stack.loads()
        text = await asyncio.to_thread(_scrape, f"http://127.0.0.1:{port}/metrics")
    values = {
        (sample.name, *(sample.labels[name] for name in ("kind", "direction") if name in sample.labels)): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }
    assert values["vllm:num_preemptions_total",] == loads.num_preemptions > 0
    assert values["pagewire:preemptions_total", "swap"] == loads.num_swap_preemptions > 0
    assert values["pagewire:preemptions_total", "recompute"] == loads.num_preemptions - loads.num_swap_preemptions
    assert values["pagewire:moved_blocks_total", "out"] == loads.num_moved_blocks_out > 0
    assert values["pagewire:moved_blocks_total", "in"] == loads.num_moved_blocks_in > 0
    assert values["pagewire:kv_events_total", "removed"] > 0


def _scrape(url: str) -> str:
    with urllib.request.urlopen(url, timeout=5) as response:
        return response.read().decode()


def test_a_histogram_takes_many_equal_observations_at_once() -> None:
    histogram = Histogram((1, 2, 5))
    histogram.observe(1, 3)
    histogram.observe(1.5)
    histogram.observe(9, 2)
    assert histogram.buckets() == [("1.0", 3), ("2.0", 4), ("5.0", 4), ("+Inf", 6)]
    assert histogram.sum == 3 + 1.5 + 18


async def test_loads_and_info_need_no_worker(checkpoint: Path) -> None:
    config = SchedulerConfig(model=str(checkpoint), worker="127.0.0.1:1", port=free_port("127.0.0.1"), metrics_port=0)
    stop = asyncio.Event()
    running = asyncio.create_task(server.run(config, stop=stop, ready=lambda url: pytest.fail("was ready")))
    async with grpc.aio.insecure_channel(f"127.0.0.1:{config.port}") as channel:
        stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
        info = await stub.GetServerInfo(scheduler_pb2.GetServerInfoRequest(), wait_for_ready=True)
        assert (info.vocab_size, info.max_model_len, info.has_tokenizer) == (300, 256, True)
        assert not info.HasField("worker")
        loads = await stub.GetLoads(scheduler_pb2.GetLoadsRequest())
        assert not loads.worker_connected
        health = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest())
        assert health.status == health_pb2.HealthCheckResponse.NOT_SERVING
        early = stub.Generate(request(PROMPT))
        reading = asyncio.create_task(early.read())
        await asyncio.sleep(0.1)
        assert not reading.done()
        stop.set()
        await failure_of(reading, grpc.StatusCode.UNAVAILABLE)
    assert await running == 0


async def test_the_load_has_the_latencies_of_ended_sequences(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        names = ("time_to_first_token", "time_per_output_token", "queue_time")
        before = await stack.loads()
        assert not any(before.HasField(name) for name in names)
        await stack.generate(request(PROMPT, n=2, max_tokens=5))
        after = await stack.loads()
        latencies = [getattr(after, name) for name in names]
        assert all(each.num_sequences == 2 and 0 <= each.mean <= each.p50 <= each.p99 < 60 for each in latencies)
        assert after.time_to_first_token.p50 > after.queue_time.p50


# Certificates


async def test_mutual_tls_on_the_public_port(checkpoint: Path, tmp_path: Path) -> None:
    authority = Authority("ca")
    here, stranger = authority.issue("localhost"), self_signed("stranger")
    certificate, key = here.write(tmp_path, "here")
    client_ca = authority.write(tmp_path)
    async with serve(checkpoint, tls_cert=certificate, tls_key=key, tls_client_ca=client_ca) as stack:
        target = "localhost:" + stack.url.rpartition(":")[2]
        for client, is_welcome in ((here, True), (None, False), (stranger, False)):
            own = (client.key, client.cert) if client else (None, None)
            credentials = grpc.ssl_channel_credentials(authority.cert, *own)
            async with grpc.aio.secure_channel(target, credentials) as channel:
                stub = scheduler_pb2_grpc.SchedulerServiceStub(channel)
                call = stub.GetServerInfo(scheduler_pb2.GetServerInfoRequest(), timeout=5)
                if is_welcome:
                    assert (await call).vocab_size == 300
                else:
                    with pytest.raises(grpc.aio.AioRpcError):
                        await call
        with pytest.raises(grpc.aio.AioRpcError):
            await stack.loads()  # in plaintext


async def test_mutual_tls_to_the_worker(checkpoint: Path, tmp_path: Path) -> None:
    authority = Authority("ca")
    here = authority.issue("localhost")
    certificate, key = here.write(tmp_path, "here")
    worker = FakeWorker(read_model_info(str(checkpoint)).digest)
    await worker.start(grpc.ssl_server_credentials([(here.key, here.cert)], authority.cert, require_client_auth=True))
    files = {"worker_tls_ca": authority.write(tmp_path), "worker_tls_cert": certificate, "worker_tls_key": key}
    async with serve(checkpoint, worker=worker, worker_tls_name="localhost", **files) as stack:
        assert (await stack.generate(request(PROMPT, max_tokens=3))).token_ids[0] == expected_tokens(PROMPT, 3)


def test_throughput_is_of_the_last_ten_seconds_and_a_rest_comes_after_them() -> None:
    now, num_tokens = 0.0, 0
    stats = SchedulerStats(**{field.name: 0 for field in fields(SchedulerStats) if field.default is MISSING})
    rested: list[float] = []
    activity = Activity(
        lambda: replace(stats, num_generation_tokens=num_tokens), lambda: now, lambda: rested.append(now)
    )
    lines = []
    for second in range(1, 41):
        now, num_tokens = float(second), num_tokens + (100 if second <= 20 else 0)
        lines.append(activity.sample())
    assert activity.generation_throughput == 0
    # Two lines while tokens arrived, then no more lines.
    assert [second for second, line in enumerate(lines, 1) if line] == [10, 20]
    assert rested == [30.0]
    assert "Avg generation throughput: 100.0 tokens/s" in lines[9]
    now, num_tokens = 45.0, num_tokens + 150
    assert activity.generation_throughput == 10
