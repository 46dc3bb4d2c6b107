"""`pagewire bench`: figures against ones computed by hand, and the verbs against a scheduler with a fake worker."""

import argparse
import asyncio
import io
import itertools
import json
import math
import os
import random
import signal
import statistics
import subprocess
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure

from pagewire import installation
from pagewire.bench.flags import percents
from pagewire.bench.profile import ServerTimes, Total, parse_times, profile, read_times, report
from pagewire.bench.result import draw_latencies, serving_table
from pagewire.bench.run import Arrival, RequestRecord, Run, run
from pagewire.bench.statistics import measure, peak_concurrency, percentile, summarize, tokens_by_second
from pagewire.bench.workload import LengthRange, PlannedRequest, Workload, arrival_times
from pagewire.cli.command import main
from pagewire.errors import CommandError, ResourceExhausted
from pagewire.hosting.supervisor import free_port
from pagewire.progress import Progress
from pagewire.sampling_params import SamplingParams
from tests.contract.bench_stack import bench, stack_of
from tests.environments import hide

# Sent at 0, 1, 2 and 3 s. The first gets tokens at 0.5, 1.0, 2.0 (two) s, the second one at 1.5 s, the third fails and
# the fourth is cut off.
RECORDS = (
    RequestRecord(10, 0.0, 0.0, 2.0, (Arrival(0.5, 1), Arrival(1.0, 1), Arrival(2.0, 2)), is_finished=True),
    RequestRecord(20, 1.0, 1.0, 2.5, (Arrival(1.5, 1),), is_finished=True),
    RequestRecord(30, 2.0, 2.0, 2.25, (), is_finished=False, error="INTERNAL: no"),
    RequestRecord(40, 2.5, 3.0, 4.0, (Arrival(3.75, 1),), is_finished=False),
)


def test_figures_of_a_run() -> None:
    metrics = measure(Run(RECORDS, 4.0, was_interrupted=True), [99.0], {"ttft": 0.5, "tpot": 0.4})
    assert (metrics.completed, metrics.failed, metrics.num_cut_off) == (2, 1, 1)
    assert (metrics.total_input_tokens, metrics.total_output_tokens) == (70, 6)
    assert (metrics.request_throughput, metrics.output_throughput, metrics.total_token_throughput) == (0.5, 1.5, 19.0)
    # The first request takes (2.0 - 0.5) / 3 = 0.5 s per token; the second has one token, and no time per token.
    assert metrics.request_goodput == 0.25
    assert metrics.max_output_tokens_per_s == 2.0
    assert metrics.max_concurrent_requests == 2
    assert metrics.ttft is not None
    assert metrics.ttft.mean == pytest.approx((0.5 + 0.5 + 0.75) / 3)
    assert metrics.ttft.median == 0.5
    assert metrics.tpot is not None
    assert (metrics.tpot.mean, metrics.tpot.std) == (0.5, 0.0)
    assert metrics.itl is not None
    assert (metrics.itl.mean, metrics.itl.median, metrics.itl.std) == (0.75, 0.75, 0.25)
    assert metrics.itl.percentiles == ((99.0, pytest.approx(0.995)),)
    assert metrics.e2el is not None
    assert metrics.e2el.mean == 1.75


def test_no_records() -> None:
    metrics = measure(Run((), 0.0, was_interrupted=True), [99.0], {"ttft": 1.0})
    assert (metrics.completed, metrics.request_goodput, metrics.ttft) == (0, 0.0, None)
    assert "Mean TTFT (ms):                          n/a" in serving_table(metrics, latencies=["ttft"])


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
    assert (summary.mean, summary.median, summary.std) == (5.0, 4.5, 2.0)


def test_tokens_by_second_and_concurrency() -> None:
    assert tokens_by_second(RECORDS) == [1, 2, 2, 1]
    assert tokens_by_second(RECORDS[2:3]) == []
    follows = RequestRecord(1, 2.0, 2.0, 3.0, (), is_finished=True)
    assert peak_concurrency([RECORDS[0], follows]) == 1
    assert peak_concurrency([]) == 0


def test_table_has_the_rows_of_vllm() -> None:
    metrics = measure(Run(RECORDS[:2], 2.5), [50.0, 99.9], {"e2el": 1.5})
    table = serving_table(metrics, latencies=["ttft", "itl"], max_concurrency=4, request_rate=1.0)
    assert table.split("\n") == [
        "============ Serving Benchmark Result ============",
        "Successful requests:                     2",
        "Failed requests:                         0",
        "Maximum request concurrency:             4",
        "Request rate configured (RPS):           1.00",
        "Benchmark duration (s):                  2.50",
        "Total input tokens:                      30",
        "Total generated tokens:                  5",
        "Request throughput (req/s):              0.80",
        "Request goodput (req/s):                 0.40",
        "Output token throughput (tok/s):         2.00",
        "Peak output token throughput (tok/s):    2.00",
        "Peak concurrent requests:                2",
        "Total token throughput (tok/s):          14.00",
        "---------------Time to First Token----------------",
        "Mean TTFT (ms):                          500.00",
        "Median TTFT (ms):                        500.00",
        "P50 TTFT (ms):                           500.00",
        "P99.9 TTFT (ms):                         500.00",
        "---------------Inter-token Latency----------------",
        "Mean ITL (ms):                           750.00",
        "Median ITL (ms):                         750.00",
        "P50 ITL (ms):                            750.00",
        "P99.9 ITL (ms):                          999.50",
        "==================================================",
    ]


def test_length_ranges() -> None:
    assert LengthRange.around(160, 0.6) == LengthRange(64, 256)
    assert LengthRange.around(80, 0.6) == LengthRange(32, 128)
    assert LengthRange.around(100, 0.0) == LengthRange(100, 100)
    assert LengthRange.around(1, 0.9) == LengthRange(1, 2)
    assert LengthRange.around(10, 0.25) == LengthRange(7, 13)


def test_arrival_times() -> None:
    seed = 7
    print(f"seed {seed}")
    assert arrival_times(3, math.inf, 1.0, random.Random(seed)) == [0.0, 0.0, 0.0]
    assert arrival_times(4, 2.0, math.inf, random.Random(seed)) == [0.5, 1.0, 1.5, 2.0]
    spreads = {}
    for burstiness in (0.25, 1.0, 4.0):
        times = arrival_times(4000, 50.0, burstiness, random.Random(seed))
        assert times == arrival_times(4000, 50.0, burstiness, random.Random(seed))
        assert times != arrival_times(4000, 50.0, burstiness, random.Random(seed + 1))
        assert times == sorted(times)
        assert times[-1] == pytest.approx(80.0)
        gaps = [after - before for before, after in itertools.pairwise(times)]
        spreads[burstiness] = statistics.pstdev(gaps) / statistics.mean(gaps)
    # The coefficient of variation of a gamma distribution is the square root of 1 / shape.
    for burstiness, spread in spreads.items():
        assert spread == pytest.approx(burstiness**-0.5, rel=0.1)


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
    slower = Workload(20, LengthRange(4, 9), LengthRange(2, 3), prefix_len=3, request_rate=3.0, seed=5).requests(50)
    assert [r.prompt_token_ids for r in slower] == [r.prompt_token_ids for r in requests]
    assert [r.send_at for r in slower] != [r.send_at for r in requests]
    assert workload.max_sequence_len == 15


def test_profile_by_hand() -> None:
    # Two requests of three tokens. One step of 10 ms computes a prompt, each of two more a token in 2 ms.
    parts = {"products": 0.012, "attention": 0.008, "sampling": 0.0}
    prefill = ServerTimes(Total(0.020, 2), Total(0.030, 2), Total(), Total(60, 2), 2, parts)
    parts = {"products": 0.016, "attention": 0.012, "sampling": 0.0}
    full = ServerTimes(Total(0.028, 6), Total(0.032, 2), Total(0.012, 4), Total(120, 6), 6, parts)
    arrivals = (Arrival(0.018, 1), Arrival(0.022, 1), Arrival(0.026, 1))
    record = RequestRecord(8, 0.0, 0.0, 0.026, arrivals, is_finished=True)
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
    with pytest.raises(CommandError, match="does nothing else"):
        profile(prefill, full, [record])


def test_metrics_of_something_else() -> None:
    with pytest.raises(ValueError, match="no Pagewire scheduler"):
        parse_times("# TYPE up gauge\nup 1\n")
    with pytest.raises(CommandError, match=r"cannot read the metrics at http://127\.0\.0\.1:1/metrics"):
        read_times("http://127.0.0.1:1/metrics")


class SlowServer:
    """Gives a token, then no more until it is told to; refuses prompts of one token."""

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
    return [PlannedRequest((0,) * num_prompt_tokens, 3, 0.0, seed=index) for index in range(num_requests)]


async def test_a_cancelled_run_keeps_what_it_has() -> None:
    server = SlowServer()
    progress = Progress(5, io.StringIO())
    running = asyncio.create_task(run(server, planned(5), SamplingParams(), progress, max_concurrency=2))
    await server.has_one.wait()
    running.cancel()
    ran = await running
    assert ran.was_interrupted
    # Those that waited for their turn were never sent.
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


async def test_serve(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--max-concurrency", 3, "--num-warmups", 2, "--goodput", "ttft:10000", "e2el:20000"]
    saved = ["--save-result", "--result-dir", tmp_path / "new", "--result-filename", "r.json", "--save-detailed"]
    figures = ["--percentile-metrics", "ttft,tpot,itl,e2el", "--metric-percentiles", "50,99", "--metadata", "a=b"]
    async with stack_of(checkpoint) as stack:
        assert await bench(stack, "serve", *SMALL, *flags, *saved, *figures) == 0
        loads = await stack.until_idle()
    printed = capsys.readouterr().out
    result = json.loads((tmp_path / "new" / "r.json").read_text())
    assert result["backend"] == "pagewire"
    assert result["a"] == "b"
    assert result["request_rate"] == "inf"
    assert (result["completed"], result["failed"], result["was_interrupted"]) == (12, 0, False)
    requests = Workload(12, LengthRange(10, 30), LengthRange(5, 15), seed=3).requests(300)
    assert result["input_lens"] == [len(request.prompt_token_ids) for request in requests]
    assert result["output_lens"] == [request.num_output_tokens for request in requests]
    assert result["total_output_tokens"] == sum(result["output_lens"])
    assert result["total_token_throughput"] * result["duration"] == pytest.approx(
        sum(result["input_lens"]) + sum(result["output_lens"])
    )
    assert result["request_goodput"] == result["request_throughput"]
    assert 1 <= result["max_concurrent_requests"] <= 3
    assert [len(times) for times in result["itls"]] <= [length - 1 for length in result["output_lens"]]
    assert 0 < result["p50_ttft_ms"] <= result["p99_ttft_ms"]
    assert result["p50_ttft_ms"] == pytest.approx(result["median_ttft_ms"])
    for row in ("Successful requests:                     12", "P99 E2EL (ms):", "Request goodput (req/s):"):
        assert row in printed
    # The warm-up requests have the prompts of the first ones, and must not have computed them.
    assert loads.num_cached_prompt_tokens == 0
    assert loads.num_generation_tokens > result["total_output_tokens"]


async def test_serve_at_a_rate(checkpoint: Path, tmp_path: Path) -> None:
    path = tmp_path / "r.json"
    rate = ["--request-rate", 100, "--burstiness", "inf", "--num-prompts", 20]
    saved = ["--save-result", "--save-detailed", "--result-dir", tmp_path, "--result-filename", path.name]
    async with stack_of(checkpoint) as stack:
        assert await bench(stack, "serve", "--input-len", 4, "--output-len", 1, *rate, *saved) == 0
    result = json.loads(path.read_text())
    assert (result["request_rate"], result["burstiness"]) == ("100", "inf")
    assert result["mean_tpot_ms"] is None
    # A request is never sent before its time.
    for index, sent_at in enumerate(result["start_times"]):
        assert sent_at >= (index + 1) / 100
    assert all(wait >= 0 for wait in result["queue_times"])


async def test_equal_seeds_find_nothing_in_the_cache(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with stack_of(checkpoint) as stack:
        for _ in range(2):
            assert await bench(stack, "throughput", *SMALL) == 0
        assert (await stack.until_idle()).num_cached_prompt_tokens == 0
        assert await bench(stack, "throughput", *SMALL, "--random-prefix-len", 16) == 0
        # All but the first find the four blocks that they share.
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
        assert await bench(stack, "throughput", *SMALL, "--output-json", tmp_path / "t.json") == 0
    result = json.loads((tmp_path / "t.json").read_text())
    assert result["num_requests"] == 12
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
    # The fake worker says that each step took it 1 ms; a step of it takes 64 tokens.
    found = result["profile"]
    assert found["num_prefill_steps"] == 2
    assert found["prefill"] == pytest.approx(0.002)
    assert found["decode_step"] == pytest.approx(0.001)
    assert 0 < found["server_ttft"] < found["client_ttft"]
    assert found["plan_bytes"] > 0
    assert "Avg latency: " in printed
    assert "99% percentile latency: " in printed
    assert "  worker (2 steps) " in printed


async def test_refused_requests_are_counted_and_told(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with stack_of(checkpoint, step_seconds=0.05, max_num_seqs=1, max_waiting_requests=2) as stack:
        arguments = ["--input-len", 4, "--output-len", 3, "--num-prompts", 30]
        assert await bench(stack, "serve", *arguments) == 0
    captured = capsys.readouterr()
    succeeded, failed = (int(line.split()[-1]) for line in captured.out.split("\n")[1:3])
    assert succeeded + failed == 30
    assert succeeded >= 2
    assert failed > 10
    assert captured.err.count("a request failed: RESOURCE_EXHAUSTED: ") == 10
    assert f"and {failed - 10} more failed" in captured.err


async def test_requests_that_cannot_fit(checkpoint: Path, capsys: pytest.CaptureFixture[str]) -> None:
    async with stack_of(checkpoint) as stack:
        assert await bench(stack, "serve", "--input-len", 200, "--output-len", 57) == 1
        assert await bench(stack, "latency", "--input-len", 256, "--output-len", 1) == 1
    first, second = capsys.readouterr().err.splitlines()
    assert "come to up to 200 + 57 tokens, but max_model_len of the server is 256: lower them" in first
    assert "256 + 1 tokens" in second


@pytest.mark.parametrize("verb", ["serve", "throughput", "latency"])
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
        # By then some requests have ended, and others run.
        num_tokens = 25 if verb == "latency" else 700
        await stack.until(lambda loads: loads.num_generation_tokens > num_tokens)
        process.send_signal(signal.SIGINT)
        out, err = (stream.decode() for stream in await process.communicate())
        await stack.until_idle()
    assert process.returncode == 130
    assert err.splitlines()[-1] == "interrupted: the figures are those of what was measured until then"
    assert "Traceback" not in err
    if verb == "serve":
        rows = dict(line.rsplit(None, 1) for line in out.splitlines() if ":" in line)
        assert out.startswith("===== Serving Benchmark Result (interrupted) =====")
        assert int(rows["Successful requests:"]) > 0
        assert rows["Failed requests:"] == "0"
        assert float(rows["Output token throughput (tok/s):"]) > 0
    else:
        assert out.startswith("Throughput: " if verb == "throughput" else "Avg latency: ")


async def test_no_server_answers(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in ("serve", "throughput", "latency"):
        assert await asyncio.to_thread(main, ["bench", verb, "--url", "127.0.0.1:1"]) == 1
        assert "UNAVAILABLE: no server answers at 127.0.0.1:1" in capsys.readouterr().err


async def test_charts(checkpoint: Path, tmp_path: Path) -> None:
    async with stack_of(checkpoint) as stack:
        for verb in ("serve", "throughput"):
            assert await bench(stack, verb, *SMALL, "--chart", tmp_path / f"{verb}.png") == 0
        latency = ["--num-iters", 3, "--num-iters-warmup", 0, "--chart", tmp_path / "latency.png"]
        assert await bench(stack, "latency", *latency) == 0
    for verb in ("serve", "throughput", "latency"):
        assert (tmp_path / f"{verb}.png").read_bytes().startswith(b"\x89PNG")


def test_a_chart_has_the_share_of_latencies_up_to_each(monkeypatch: pytest.MonkeyPatch) -> None:
    figures: list[Figure] = []
    monkeypatch.setattr(Figure, "savefig", lambda figure, path, dpi: figures.append(figure))
    draw_latencies(Path("x.png"), "title", [0.003, 0.001, 0.002, 0.005])
    [iterations, shares] = figures[0].axes
    assert iterations.lines[0].get_xydata().tolist() == [[1, 3.0], [2, 1.0], [3, 2.0], [4, 5.0]]
    assert shares.lines[0].get_xydata().tolist() == [[1.0, 0.25], [2.0, 0.5], [3.0, 0.75], [5.0, 1.0]]
    assert shares.lines[0].get_drawstyle() == "steps-post"
    assert shares.get_ylim() == (0, 1.02)


def test_percentiles_are_0_to_100() -> None:
    assert percents("0,50,99.9,100") == [0, 50, 99.9, 100]
    for text in ("-1", "100.1", "50,101"):
        with pytest.raises(argparse.ArgumentTypeError, match="is no percentile: they are 0 to 100"):
            percents(text)


def test_charts_need_matplotlib(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    hide(installation.NEEDED["bench"][0], monkeypatch)
    assert main(["bench", "serve", "--chart", "x.png"]) == 2
    assert (
        f"--chart needs matplotlib, but matplotlib is not installed: {sys.executable} -m pip install 'pagewire[bench]'"
        in capsys.readouterr().err
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "usage: pagewire bench VERB"),
        (["serv"], "unknown verb 'serv'; did you mean serve?"),
        (["serve", "--num-prompts", "0"], "--num-prompts: 0 is below 1"),
        (["serve", "--num-prompts", "many"], "--num-prompts: 'many' is not an integer"),
        (["serve", "--request-rate", "0"], "--request-rate: 0 is not above 0"),
        (["serve", "--request-rate", "nan"], "'nan' is not a number"),
        (["serve", "--burstiness", "-1"], "--burstiness"),
        (["serve", "--random-range-ratio", "1"], "1 is not from 0 to below 1"),
        (["serve", "--random-range-ratio", '{"input": 0.5}'], "has other keys"),
        (["serve", "--random-range-ratio", "{"], "no JSON object"),
        (["serve", "--goodput", "ttft"], "'ttft' is no NAME:MS"),
        (["serve", "--goodput", "tttf:5"], "'tttf' is none of ttft, tpot, e2el; did you mean ttft?"),
        (["serve", "--goodput", "ttft:x"], "'x' is no number of milliseconds"),
        (["serve", "--goodput", "ttft:-1"], "at least 0 ms"),
        (["serve", "--goodput", "ttft:nan"], "at least 0 ms"),
        (["serve", "--goodput", "ttft:1", "ttft:2"], "ttft is there twice"),
        (["serve", "--percentile-metrics", "ttft,ttl"], "'ttl' is none of ttft, tpot, itl, e2el"),
        (["serve", "--metric-percentiles", "101"], "101 is no percentile"),
        (["serve", "--metadata", "a"], "'a' is no KEY=VALUE"),
        (["serve", "--save-detailed"], "need --save-result"),
        (["serve", "--save-result", "--result-dir", "/proc/none"], "cannot make the folder"),
        (["serve", "--save-result", "--result-dir", "/", "--result-filename", "tmp"], "cannot write /tmp"),
        (["serve", "--modle", "m"], "did you mean --model?"),
        (["serve", "--num-promts", "3"], "did you mean --num-prompts?"),
        (["throughput"], "give either --model MODEL"),
        (["throughput", "--model", "m", "--url", "a:1"], "give either --model MODEL"),
        (["throughput", "--url", "a:1", "--", "--dtype", "float32"], "--dtype stands after --"),
        (["throughput", "--url", "nowhere"], "HOST:PORT"),
        (["latency", "--url", "a:1", "--profile"], "--profile needs --metrics-url"),
        (["serve", "--model", "m", "--served-model-name", "a", "b"], "unknown argument b"),
        (["latency", "--url", "a:1", "--metrics-url", "x"], "--metrics-url is for --profile"),
        (["latency", "--model", "m", "--profile", "--batch-size", "2"], "--profile looks at one stream"),
        (["latency", "--model", "m", "--profile", "--output-len", "1"], "--profile looks at one stream"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["bench", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert "Traceback" not in captured.err


@pytest.mark.parametrize("verb", ["serve", "throughput", "latency"])
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
