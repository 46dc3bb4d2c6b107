"""`pagewire bench`: statistics compared with values computed by hand, and the commands with a fake worker."""

import asyncio
import io
import json
import os
import signal
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from pagewire.bench import throughput
from pagewire.bench.latency import latency_table
from pagewire.bench.profile import ServerTimes, Total, parse_times, profile, read_times, report
from pagewire.bench.run import Arrival, RequestRecord, Run, run
from pagewire.bench.statistics import percentile, summarize
from pagewire.bench.throughput import Totals, total
from pagewire.bench.workload import LengthRange, PlannedRequest, Workload
from pagewire.cli.command import main
from pagewire.cli.figures import duration, rounded
from pagewire.client.errors import CommandError, ResourceExhausted
from pagewire.client.sampling_params import SamplingParams
from pagewire.hosting.supervisor import free_port
from pagewire.progress import Progress
from tests.contract.bench_stack import bench, stack_of

# Sent at 0, 1, 2 and 3 s. The first gets tokens at 0.5 s, 1.0 s and 2.0 s (two tokens), and the second at 1.5 s. The
# third fails, and the fourth is cut off.
RECORDS = (
    RequestRecord(10, 0.0, 2.0, (Arrival(0.5, 1), Arrival(1.0, 1), Arrival(2.0, 2)), is_finished=True),
    RequestRecord(20, 1.0, 2.5, (Arrival(1.5, 1),), is_finished=True),
    RequestRecord(30, 2.0, 2.25, (), is_finished=False, error="INTERNAL: no"),
    RequestRecord(40, 3.0, 4.0, (Arrival(3.75, 1),), is_finished=False),
)


def test_totals_of_a_run() -> None:
    """The tokens of a request that was cut off are counted. A failed request is not counted."""
    totals = total(Run(RECORDS, 4.0, was_interrupted=True))
    assert totals == Totals(4.0, completed=2, failed=1, num_prompt_tokens=70, num_output_tokens=6)
    assert throughput.report(totals).split("\n") == [
        "Throughput: 0.500 requests/s, 19.0 total tokens/s, 1.50 output tokens/s",
        "Total num prompt tokens:  70",
        "Total num output tokens:  6",
    ]
    assert RECORDS[0].itls == [0.5, 1.0]
    assert [record.ttft for record in RECORDS] == [0.5, 0.5, None, 0.75]


def test_no_records() -> None:
    totals = total(Run((), 0.0, was_interrupted=True))
    assert throughput.report(totals).startswith("Throughput: 0.00 requests/s, 0.00 total tokens/s")


def test_figures_have_three_significant_digits() -> None:
    values = {
        0.0: "0.00",
        0.012345: "0.0123",
        1.0: "1.00",
        99.96: "100",
        999.4: "999",
        999.9: "1000",
        -23456.7: "-23457",
    }
    assert {value: rounded(value) for value in values} == values
    seconds = {0.0: "0.00 ms", 0.00123456: "1.23 ms", 0.99999: "1000 ms", 1.0: "1.00 s", 6543.21: "6543 s"}
    assert {value: duration(value) for value in seconds} == seconds
    summary = summarize([0.0123456789, 2.0], [50.0])
    assert summary is not None
    lines = ["Avg latency: 1.01 s", "Std latency: 994 ms", "50% percentile latency: 1.01 s"]
    assert latency_table(summary).split("\n") == lines


def test_percentiles_are_interpolated_linearly() -> None:
    assert percentile([4.0, 1.0, 3.0, 2.0], 0) == 1.0
    assert percentile([4.0, 1.0, 3.0, 2.0], 50) == 2.5
    assert percentile([4.0, 1.0, 3.0, 2.0], 90) == pytest.approx(3.7)
    assert percentile([4.0, 1.0, 3.0, 2.0], 100) == 4.0
    assert percentile([7.0], 99) == 7.0
    with pytest.raises(ValueError, match="no values"):
        percentile([], 50)
    summary = summarize([2.0, 4.0, 4.0, 4.0, 5.0, 5.0, 7.0, 9.0], [])
    assert summary is not None
    assert (summary.mean, summary.std) == (5.0, 2.0)


def test_length_ranges() -> None:
    assert LengthRange.around(160, 0.6) == LengthRange(64, 256)
    assert LengthRange.around(80, 0.6) == LengthRange(32, 128)
    assert LengthRange.around(100, 0.0) == LengthRange(100, 100)
    assert LengthRange.around(1, 0.9) == LengthRange(1, 2)
    assert LengthRange.around(10, 0.25) == LengthRange(7, 13)


def test_requests_follow_from_the_seed() -> None:
    workload = Workload(20, LengthRange(4, 9), LengthRange(2, 3), prefix_len=3, seed=5)
    requests = workload.requests(50)
    assert requests == workload.requests(50)
    assert {len(request.prompt_token_ids) for request in requests} <= set(range(7, 13))
    assert {request.num_output_tokens for request in requests} == {2, 3}
    assert len({request.prompt_token_ids[:3] for request in requests}) == 1
    assert len({request.prompt_token_ids for request in requests}) == 20
    assert all(0 <= token_id < 50 for request in requests for token_id in request.prompt_token_ids)
    assert len({request.seed for request in requests}) == 20
    assert workload.max_sequence_len == 15


def test_profile_by_hand() -> None:
    # Two requests of three tokens. One step of 10 ms computes a prompt. Two further steps of 2 ms compute one token
    # each.
    parts = {"products": 0.012, "attention": 0.008, "sampling": 0.0}
    prefill = ServerTimes(Total(0.020, 2), Total(0.030, 2), Total(), Total(60, 2), 2, parts)
    parts = {"products": 0.016, "attention": 0.012, "sampling": 0.0}
    full = ServerTimes(Total(0.028, 6), Total(0.032, 2), Total(0.012, 4), Total(120, 6), 6, parts)
    arrivals = (Arrival(0.018, 1), Arrival(0.022, 1), Arrival(0.026, 1))
    record = RequestRecord(8, 0.0, 0.026, arrivals, is_finished=True)
    found = profile(prefill, full, [record, record])
    assert found.num_prefill_steps == 1
    assert (found.prefill, found.admission, found.first_delivery) == pytest.approx((0.010, 0.006, 0.002))
    assert (found.decode_step, found.between_steps, found.delivery) == pytest.approx((0.002, 0.001, 0.001))
    assert found.plan_bytes == 20
    lines = report(found).split("\n")
    assert lines[1] == "  worker (1 step)                                 10.000    55.6"
    assert lines[9] == "  at the client                                    4.000   100.0"
    assert found.prefill_parts == pytest.approx({"products": 0.006, "attention": 0.004, "sampling": 0.0})
    assert found.decode_parts == pytest.approx({"products": 0.001, "attention": 0.001, "sampling": 0.0})
    assert lines[14:18] == [
        "A decode step on the worker                           ms       %",
        "  matrix products                                  1.000    50.0",
        "  attention                                        1.000    50.0",
        "  step                                             2.000   100.0",
    ]
    with pytest.raises(CommandError, match="without other requests"):
        profile(prefill, full, [record])


def test_metrics_of_something_else() -> None:
    with pytest.raises(ValueError, match="not a Pagewire scheduler"):
        parse_times("# TYPE up gauge\nup 1\n")
    with pytest.raises(CommandError, match=r"cannot read the metrics at http://127\.0\.0\.1:1/metrics"):
        read_times("http://127.0.0.1:1/metrics")


class SlowServer:
    """A fake server that sends one token, then waits for `go_on`. It refuses prompts of one token."""

    def __init__(self) -> None:
        self.num_running = self.max_running = self.num_closed = 0
        self.has_one = asyncio.Event()
        self.go_on = asyncio.Event()

    async def stream(self, prompt: Any, sampling: Any, **request: Any) -> AsyncIterator[Any]:
        from pagewire import Output

        if len(request["prompt_token_ids"]) == 1:
            raise ResourceExhausted("full")
        self.num_running += 1
        self.max_running = max(self.max_running, self.num_running)
        try:
            for index in range(sampling.max_tokens):
                yield Output("x", 0, (1,), "", None, None, None, None, None, index, None)
                self.has_one.set()
                await self.go_on.wait()
        finally:
            self.num_running -= 1
            self.num_closed += 1


def planned(num_requests: int, num_prompt_tokens: int = 2) -> list[PlannedRequest]:
    return [PlannedRequest((0,) * num_prompt_tokens, 3, seed=index) for index in range(num_requests)]


async def test_a_cancelled_run_keeps_what_it_has() -> None:
    server = SlowServer()
    progress = Progress(5, io.StringIO())
    running = asyncio.create_task(run(server, planned(5), SamplingParams(), progress, max_concurrency=2))
    await server.has_one.wait()
    running.cancel()
    ran = await running
    assert ran.was_interrupted
    # Requests that waited for a free slot were never sent.
    assert len(ran.records) == 2
    assert {record.num_output_tokens for record in ran.records} <= {0, 1}
    assert sum(record.num_output_tokens for record in ran.records) >= 1
    assert not any(record.is_finished or record.error for record in ran.records)
    assert server.num_closed == server.max_running == 2


async def test_failed_requests_are_told_apart() -> None:
    server = SlowServer()
    server.go_on.set()
    requests = [*planned(2), *planned(1, num_prompt_tokens=1)]
    ran = await run(server, requests, SamplingParams(), Progress(3, io.StringIO()))
    assert [record.error for record in ran.records] == [None, None, "UNKNOWN: full"]
    assert [record.num_output_tokens for record in ran.records] == [3, 3, 0]
    assert not ran.was_interrupted


# Against a real scheduler, over gRPC


SMALL = ("--input-len", 20, "--output-len", 10, "--random-range-ratio", 0.5, "--num-prompts", 12, "--seed", 3)


async def test_equal_seeds_find_nothing_in_the_cache(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with stack_of(checkpoint) as stack:
        for _ in range(2):
            assert await bench(stack, "throughput", *SMALL) == 0
        assert (await stack.until_idle()).num_cached_prompt_tokens == 0
        assert await bench(stack, "throughput", *SMALL, "--random-prefix-len", 16) == 0
        # All prompts but the first get a prefix cache hit on the four blocks that they share.
        assert (await stack.until_idle()).num_cached_prompt_tokens > 0
    first, second, third = capsys.readouterr().out.split("Throughput: ")[1:]
    requests = Workload(12, LengthRange(10, 30), LengthRange(5, 15), seed=3).requests(300)
    num_prompt_tokens = sum(len(request.prompt_token_ids) for request in requests)
    num_output_tokens = sum(request.num_output_tokens for request in requests)
    counts = f"Total num prompt tokens:  {num_prompt_tokens}\nTotal num output tokens:  {num_output_tokens}\n"
    assert first.endswith(counts)
    assert second.endswith(counts)
    assert f"prompt tokens:  {num_prompt_tokens + 12 * 16}\n" in third


async def test_throughput_json(checkpoint: Path, tmp_path: Path) -> None:
    async with stack_of(checkpoint) as stack:
        path = tmp_path / "new" / "t.json"
        flags = ["--max-concurrency", 3, "--num-warmups", 2, "--output-json", path]
        assert await bench(stack, "throughput", *SMALL, *flags) == 0
        loads = await stack.until_idle()
    result = json.loads(path.read_text())
    assert (result["backend"], result["num_requests"], result["failed"]) == ("pagewire", 12, 0)
    requests = Workload(12, LengthRange(10, 30), LengthRange(5, 15), seed=3).requests(300)
    num_output_tokens = sum(request.num_output_tokens for request in requests)
    assert result["total_output_tokens"] == num_output_tokens
    assert result["total_num_tokens"] == num_output_tokens + sum(len(each.prompt_token_ids) for each in requests)
    # The warm-up requests have different prompts, or the measured requests would get prefix cache hits.
    assert loads.num_cached_prompt_tokens == 0
    assert loads.num_generation_tokens > num_output_tokens
    assert result["tokens_per_second"] == pytest.approx(result["total_num_tokens"] / result["elapsed_time"])
    assert result["requests_per_second"] == pytest.approx(12 / result["elapsed_time"])
    assert result["worker"]["worker_id"] == "fake"


async def test_latency_and_its_profile(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    port = free_port("127.0.0.1")
    flags = ["--input-len", 100, "--output-len", 8, "--num-iters", 4, "--num-iters-warmup", 1]
    async with stack_of(checkpoint, metrics_port=port) as stack:
        url = f"http://127.0.0.1:{port}/metrics"
        path = tmp_path / "l.json"
        assert await bench(stack, "latency", *flags, "--profile", "--metrics-url", url, "--output-json", path) == 0
        assert (await stack.until_idle()).num_cached_prompt_tokens == 0
    printed = capsys.readouterr().out
    result = json.loads(path.read_text())
    assert len(result["latencies"]) == 4
    assert result["avg_latency"] == pytest.approx(statistics.mean(result["latencies"]))
    assert result["percentiles"]["50"] == pytest.approx(statistics.median(result["latencies"]))
    # The fake worker reports 1 ms for each step, and computes up to 64 tokens in a step.
    found = result["profile"]
    assert found["num_prefill_steps"] == 2
    assert found["prefill"] == pytest.approx(0.002)
    assert found["decode_step"] == pytest.approx(0.001)
    assert 0 < found["server_ttft"] < found["client_ttft"]
    assert found["plan_bytes"] > 0
    assert "Avg latency: " in printed
    assert "99% percentile latency: " in printed
    assert "  worker (2 steps) " in printed


async def test_refused_requests_are_counted_and_told(
    checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    async with stack_of(checkpoint, step_seconds=0.05, max_num_seqs=1, max_waiting_requests=2) as stack:
        arguments = ["--input-len", 4, "--output-len", 3, "--num-prompts", 30, "--output-json", tmp_path / "t.json"]
        assert await bench(stack, "throughput", *arguments) == 0
    captured = capsys.readouterr()
    result = json.loads((tmp_path / "t.json").read_text())
    succeeded, failed = result["num_requests"], result["failed"]
    assert succeeded + failed == 30
    assert succeeded >= 2
    assert failed > 10
    assert captured.err.count("a request failed: RESOURCE_EXHAUSTED: ") == 10
    assert f"and {failed - 10} more failed" in captured.err


async def test_requests_that_cannot_fit(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with stack_of(checkpoint) as stack:
        assert await bench(stack, "throughput", "--input-len", 200, "--output-len", 57) == 1
        assert await bench(stack, "latency", "--input-len", 256, "--output-len", 1) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert "allow up to 200 + 57 tokens, but max_model_len of the server is 256: lower them" in first
    assert "256 + 1 tokens" in second


@pytest.mark.parametrize("verb", ["throughput", "latency"])
async def test_ctrl_c_prints_what_was_measured(checkpoint: Path, verb: str) -> None:
    async with stack_of(checkpoint, step_seconds=0.005) as stack:
        endless = ["--num-prompts", "4000", "--max-concurrency", "64"]
        if verb == "latency":
            endless = ["--num-iters-warmup", "0", "--num-iters", "4000"]
        command = [sys.executable, "-m", "pagewire", "bench", verb, "--url", stack.url, *endless]
        command += ["--input-len", "4", "--output-len", "10"]
        environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
        process = await asyncio.create_subprocess_exec(
            *command, env=environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE
        )
        # At this point some requests have ended, and others are running.
        num_tokens = 25 if verb == "latency" else 700
        await stack.until(lambda loads: loads.num_generation_tokens > num_tokens)
        process.send_signal(signal.SIGINT)
        out, err = (stream.decode() for stream in await process.communicate())
        await stack.until_idle()
    assert process.returncode == 130
    assert err.splitlines()[-1] == "interrupted: the figures cover what was measured so far"
    assert "Traceback" not in err
    assert out.startswith("Throughput: " if verb == "throughput" else "Avg latency: ")


async def test_no_server_answers(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("throughput", "latency"):
        assert await asyncio.to_thread(main, ["bench", verb, "--url", "127.0.0.1:1"]) == 1
        assert "UNAVAILABLE: no server answers at 127.0.0.1:1" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: pagewire bench VERB"),
        (["thruput"], "unknown verb 'thruput'; did you mean throughput?"),
        (["throughput", "--num-prompts", "0"], "--num-prompts: 0 is below 1"),
        (["throughput", "--num-prompts", "many"], "--num-prompts: 'many' is not an integer"),
        (["throughput", "--random-range-ratio", "1"], "1 is not from 0 to below 1"),
        (["throughput", "--random-range-ratio", '{"input": 0.5}'], "must have exactly the keys in"),
        (["throughput", "--random-range-ratio", "{"], "not a JSON object"),
        (["throughput", "--output-json", "/proc/none/x"], "cannot make the folder"),
        (["latency", "--output-json", "/tmp"], "cannot write /tmp"),
        (["throughput", "--modle", "m"], "did you mean --model?"),
        (["throughput", "--num-promts", "3"], "did you mean --num-prompts?"),
        (["serve", "--num-prompts", "3"], "there is no pagewire bench serve: `vllm bench serve` and `guidellm`"),
        (["throughput", "--save-result"], "unknown flag --save-result: --output-json FILE writes the figures"),
        (["latency", "--chart", "x.png"], "unknown flag --chart: `vllm bench serve` and `guidellm` report more"),
        (["throughput", "--model", "m", "--num-prompts", "1", "2"], "unknown argument 2"),
        (["throughput"], "give either --model MODEL"),
        (["throughput", "--model", "m", "--url", "a:1"], "give either --model MODEL"),
        (["throughput", "--url", "a:1", "--", "--dtype", "float32"], "--dtype follows --"),
        (["throughput", "--url", "nowhere"], "HOST:PORT"),
        (["latency", "--url", "a:1", "--profile"], "--profile needs both --url and --metrics-url"),
        (["latency", "--url", "a:1", "--metrics-url", "x"], "--metrics-url requires --profile"),
        (["latency", "--model", "m", "--profile", "--batch-size", "2"], "--profile measures one stream"),
        (["latency", "--model", "m", "--profile", "--output-len", "1"], "--profile measures one stream"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("verb", ["throughput", "latency"])
def test_help_loads_nothing_heavy(verb: str) -> None:
    heavy = ["torch", "numpy", "tokenizers", "transformers", "matplotlib", "scheduler_service", "worker_service"]
    program = f"""
import contextlib, io, sys
from pagewire.cli.command import main
with contextlib.redirect_stdout(io.StringIO()) as out:
    assert main(["bench", {verb!r}, "--help"]) == 0
assert "usage: pagewire bench {verb} " in out.getvalue()
print([name for name in {heavy} if name in sys.modules])
"""
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "[]"
