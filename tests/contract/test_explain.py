"""The reports about requests and blocks, and the commands that display them."""

import asyncio
import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import time
from dataclasses import fields
from pathlib import Path

import grpc
import pytest

import pagewire
from pagewire import AsyncClient, SamplingParams
from pagewire.cli.block_view import BlockView
from pagewire.cli.status import View
from pagewire.client.server_info import CACHED, FREE, HELD, MOVING, SHARED, BlockHolder, BlockMap, RequestReport
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from scheduler_service.core.request import BlockUse
from testing.fake_worker import FakeWorker
from testing.scheduler_stack import Stack, request, serve
from testing.serving.failures import failure_of

PROMPT = [5, 6, 7, 8, 9]


async def report_of(stack: Stack, request_id: str, tenant: str = "") -> pb.GetRequestResponse:
    return await stack.stub.GetRequest(pb.GetRequestRequest(request_id=request_id, tenant=tenant))


async def submit(stack: Stack, name: str, prompt: list[int], *, tenant: str = "", **sampling: object) -> None:
    message = request(prompt, **sampling)
    message.request_id, message.tenant = name, tenant
    await stack.stub.Submit(pb.SubmitRequest(request=message))


async def test_a_request_says_what_it_does_and_why_it_waits(checkpoint: Path) -> None:
    async with serve(
        checkpoint, worker=await FakeWorker.started(checkpoint, num_device_blocks=64), max_num_seqs=2
    ) as stack:
        stack.worker.step_seconds = 0.02
        await submit(stack, "first", PROMPT, max_tokens=200)
        await submit(stack, "second", [1, *PROMPT], tenant="other", max_tokens=200)
        await stack.until(lambda loads: loads.num_running == 2)
        await submit(stack, "third", [2, *PROMPT], max_tokens=4)
        await submit(stack, "fourth", [3, *PROMPT], max_tokens=4)
        running = await report_of(stack, "first")
        assert (running.state, running.reason) == (pb.REQUEST_STATE_RUNNING, "")
        assert (running.num_prompt_tokens, running.num_sequences, running.num_running_sequences) == (5, 1, 1)
        assert running.num_held_blocks > 0
        assert running.age_seconds > 0
        assert not running.HasField("queue_position")
        third, fourth = await report_of(stack, "third"), await report_of(stack, "fourth")
        assert (third.state, third.queue_position) == (pb.REQUEST_STATE_WAITING, 1)
        assert "rows" in third.reason
        assert (fourth.queue_position, fourth.num_wanted_blocks) == (2, 2)
        assert "behind 1" in fourth.reason
        # Request ids of other tenants are not reported.
        assert [holder.HasField("request_id") for holder in third.holders if holder.request_id != "first"] == [False]
        for name, tenant in (("first", "other"), ("second", ""), ("unknown", "")):
            await failure_of(report_of(stack, name, tenant), grpc.StatusCode.NOT_FOUND)
        blocks = await stack.stub.GetBlocks(pb.GetBlocksRequest())
        assert (len(blocks.device_blocks), len(blocks.host_blocks)) == (64, 0)
        assert sorted(blocks.owners) == ["first", "second"]
        for index, name in enumerate(blocks.owners):
            assert list(blocks.device_blocks).count(HELD + index) > 0, name
        for name, tenant in (("first", ""), ("second", "other"), ("third", ""), ("fourth", "")):
            await stack.stub.Abort(pb.AbortRequest(request_id=name, tenant=tenant))
        await stack.until_idle()
        blocks = await stack.stub.GetBlocks(pb.GetBlocksRequest())
        assert not blocks.owners
        assert set(blocks.device_blocks) <= {FREE, CACHED}


async def test_swapped_requests_and_host_blocks_are_seen(checkpoint: Path) -> None:
    async with serve(
        checkpoint,
        worker=await FakeWorker.started(checkpoint, num_device_blocks=64, num_host_blocks=200, swap_bandwidth=1e12),
        preemption="swap",
    ) as stack:
        stack.worker.step_seconds = 0.002
        for index in range(8):
            await submit(stack, f"r{index}", [index, *PROMPT], max_tokens=120)
        seen: set[int] = set()
        async with asyncio.timeout(30):
            while not {pb.REQUEST_STATE_SWAPPED, pb.REQUEST_STATE_RUNNING} <= seen:
                for index in range(8):
                    try:
                        report = await report_of(stack, f"r{index}")
                    except grpc.aio.AioRpcError:
                        continue
                    seen.add(report.state)
                    if report.state == pb.REQUEST_STATE_SWAPPED:
                        assert report.num_held_host_blocks > 0
                        assert report.num_preemptions > 0
                        assert report.reason
        async with AsyncClient(stack.url) as client:
            loads = await client.loads()
            assert loads.num_host_blocks == 200
            assert loads.num_swap_preemptions == loads.num_preemptions > 0
            assert loads.num_moved_blocks_out > 0
            info = await client.info()
            assert info.worker is not None
            assert (info.worker.num_host_blocks, info.worker.swap_bandwidth) == (200, 1e12)


def test_reports_have_every_field_of_the_proto() -> None:
    for data_type, message in (
        (pagewire.RequestReport, pb.GetRequestResponse),
        (pagewire.BlockHolder, pb.BlockHolder),
        (pagewire.BlockMap, pb.GetBlocksResponse),
    ):
        assert [field.name for field in fields(data_type)] == list(message.DESCRIPTOR.fields_by_name)


def test_block_uses_equal_the_proto_enum() -> None:
    uses = {use.name: use.value for use in BlockUse}
    assert uses == {"FREE": FREE, "CACHED": CACHED, "MOVING": MOVING, "SHARED": SHARED, "HELD": HELD}


# The command


UTF8 = {"PYTHONUTF8": "1"}
ASCII = {"PYTHONUTF8": "0", "PYTHONCOERCECLOCALE": "0", "LC_ALL": "C"}


async def run_command(*arguments: str, locale: dict[str, str] = UTF8) -> tuple[int, str, str]:
    command = [sys.executable, "-m", "pagewire", *arguments]
    process = await asyncio.create_subprocess_exec(
        *command, env={**os.environ, **locale}, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 30)
    assert process.returncode is not None
    return process.returncode, out.decode(), err.decode()


async def test_status_tells_of_a_request(checkpoint: Path) -> None:
    async with serve(checkpoint, max_num_seqs=1) as stack:
        stack.worker.step_seconds = 0.05
        await submit(stack, "first", PROMPT, tenant="me")
        await stack.until(lambda loads: loads.num_running == 1)
        await submit(stack, "second", PROMPT, tenant="me")
        code, out, _ = await run_command("status", "--url", stack.url, "--tenant", "me", "--request", "second")
        assert code == 0
        assert re.search(r"state +waiting, number 1 in the queue", out)
        assert re.search(r"holders +first \d+", out)
        code, out, _ = await run_command("status", "--url", stack.url, "--tenant=me", "--request=first", "--json")
        assert json.loads(out)["state"] == "running"
        code, out, err = await run_command("status", "--url", stack.url, "--request", "second")
        assert (code, out) == (1, "")
        assert "NOT_FOUND" in err
        code, out, _ = await run_command("status", "--url", stack.url)
        assert code == 0
        assert re.search(r"host blocks +0 held of 0", out)
        assert "device blocks" not in out


class Terminal:
    """A command whose standard output is a terminal of 100 columns and 40 lines."""

    def __init__(self, *arguments: str, **environ: str) -> None:
        self._reading, writing = pty.openpty()
        self.text = ""
        self.process = subprocess.Popen(
            [sys.executable, "-m", "pagewire", *arguments],
            stdout=writing,
            stderr=subprocess.PIPE,
            env=os.environ | {"COLUMNS": "100", "LINES": "40"} | environ,
            text=True,
        )
        os.close(writing)

    def read_until(self, pattern: str, timeout: float = 20.0) -> None:
        deadline = time.monotonic() + timeout
        while not re.search(pattern, self.text, re.DOTALL):
            assert time.monotonic() < deadline, f"{pattern!r} did not come: {self.text!r}"
            if select.select([self._reading], [], [], 0.1)[0]:
                self.text += os.read(self._reading, 65536).decode()

    def interrupt(self) -> None:
        self.process.send_signal(signal.SIGINT)
        _, err = self.process.communicate(timeout=20)
        while select.select([self._reading], [], [], 0)[0]:
            try:
                self.text += os.read(self._reading, 65536).decode()
            except OSError:  # the other side has closed the terminal
                break
        assert "Traceback" not in err


async def test_watch_draws_the_blocks_and_leaves_the_terminal_clean(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        stack.worker.step_seconds = 0.05
        await submit(stack, "first", PROMPT * 4, n=2)
        await stack.until(lambda loads: loads.num_running == 2)
        terminal = Terminal("status", "--watch", "--url", stack.url)
        frame = r"400 device blocks.*\033\[1;38;5;\d+ma+.* first \d+"
        await asyncio.to_thread(terminal.read_until, f"{frame}.*\033\\[H.*{frame}")
        await asyncio.to_thread(terminal.interrupt)
        assert terminal.process.returncode == 130
        assert terminal.text.startswith("\033[?1049h\033[?25l")
        assert terminal.text.rstrip().endswith("\033[?25h\033[?1049l")
        plain = Terminal("status", "--watch", "--url", stack.url, NO_COLOR="1")
        await asyncio.to_thread(plain.read_until, r"a first \d+")
        await asyncio.to_thread(plain.interrupt)
        assert not re.search(r"\033\[[0-9;]*m", plain.text)
        assert plain.text.rstrip().endswith("\033[?25h\033[?1049l")


async def test_watch_without_a_terminal_is_plain_text(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        command = [sys.executable, "-m", "pagewire", "status", "--watch", "--url", stack.url]
        process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
        assert process.stdout is not None
        text = ""
        async with asyncio.timeout(20):
            while text.count("400 device blocks") < 2:
                text += (await process.stdout.readline()).decode()
        process.send_signal(signal.SIGINT)
        await process.communicate()
        assert "\033" not in text


async def test_submit_attach_and_result(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        url = ["--url", stack.url]
        sampling = ["--max-tokens", "12", "--seed", "3", "--n", "2"]
        code, out, err = await run_command("complete", "once", *sampling, *url)
        assert code == 0
        expected = out
        code, out, err = await run_command("submit", "once", *sampling, "--request-id", "mine", "--tenant", "me", *url)
        assert (code, out, err) == (0, "mine\n", "")
        code, out, err = await run_command("attach", "mine", "--tenant", "me", *url)
        assert (code, out, err) == (0, expected, "")
        code, out, err = await run_command("result", "mine", "--tenant", "me", *url)
        assert (code, out) == (0, expected)
        assert err == "finished, 24 completion tokens\n"
        code, out, _ = await run_command("result", "mine", "--tenant", "me", "--json", *url)
        printed = json.loads(out)
        assert (printed["state"], printed["error"], len(printed["outputs"])) == ("finished", None, 2)
        assert printed["outputs"][1]["usage"]["completion_tokens"] == 12
        code, out, err = await run_command("attach", "mine", "--tenant", "me", "--from-token", "99", *url)
        assert code == 1
        assert "OUT_OF_RANGE: sample 0 has 12 tokens" in err
        code, out, err = await run_command("attach", "mine", *url)
        assert (code, out) == (1, "")
        assert "NOT_FOUND" in err
        code, out, err = await run_command("submit", "--prompt-token-ids", "1,299", *url)
        assert code == 0
        code, out, err = await run_command("result", out.strip(), *url)
        assert code in (0, 1)  # still running, or failed


async def test_a_locale_that_is_not_utf8_loses_no_text(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        arguments = ["complete", "once", "--max-tokens", "12", "--seed", "3", "--url", stack.url]
        code, text, _ = await run_command(*arguments)
        assert code == 0
        assert not text.isascii()
        code, escaped, err = await run_command(*arguments, locale=ASCII)
        assert (code, escaped) == (0, text.encode("ascii", "backslashreplace").decode()), err


async def test_beams_of_the_command(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        flags = ["--beam-width", "4", "--n", "2", "--length-penalty", "0.5", "--early-stopping", "never"]
        code, out, _ = await run_command("complete", "once", "--json", "--max-tokens", "6", *flags, "--url", stack.url)
        assert code == 0
        first, second = json.loads(out)["outputs"]
        assert first["cumulative_logprob"] / 6**0.5 >= second["cumulative_logprob"] / 6**0.5
        async with AsyncClient(stack.url) as client:
            sampling = SamplingParams(beam_width=4, n=2, length_penalty=0.5, early_stopping="never", max_tokens=6)
            completion = await client.complete("once", sampling)
        assert [list(output.token_ids) for output in completion.outputs] == [first["token_ids"], second["token_ids"]]


# The map


def test_a_request_keeps_its_letter() -> None:
    view = BlockView(colour=False)
    first = view.draw(BlockMap(("x", "y", "z"), (HELD, HELD + 1, HELD + 2, FREE), ()), 80, 10)
    assert first.splitlines()[:2] == ["4 device blocks", "abc."]
    second = view.draw(BlockMap(("z", "w"), (HELD, HELD + 1, SHARED, MOVING), (CACHED, HELD)), 80, 10)
    assert second.splitlines()[1] == "ca#~"
    assert second.splitlines()[3] == "+c"
    assert ". free 0+0  + cached 0+1  # shared 1+0  ~ moving 1+0" in second
    assert "c z 1+1" in second


def test_many_blocks_share_cells() -> None:
    uses = (HELD,) * 700 + (CACHED,) * 200 + (FREE,) * 100
    drawn = BlockView(colour=False).draw(BlockMap(("x",), uses, ()), 20, 11).splitlines()
    assert drawn[0] == "1000 device blocks, a cell is 10 blocks"
    assert "".join(drawn[1:6]) == "a" * 70 + "+" * 20 + "." * 10
    assert all(len(line) <= 20 for line in drawn[1:6])


def test_only_the_largest_owners_are_named() -> None:
    owners = tuple(f"r{index}" for index in range(60))
    uses = tuple(HELD + index for index in range(60) for _ in range(index + 1))
    drawn = BlockView(colour=False).draw(BlockMap(owners, uses, ()), 100, 50)
    assert "r59 60" in drawn
    assert "r30 31" not in drawn
    assert drawn.endswith("and 48 more requests")


@pytest.mark.parametrize("colour", [False, True])
def test_a_line_of_the_legend_is_as_full_as_the_terminal_is_wide(colour: bool) -> None:
    block_map = BlockMap(tuple("vwxyz"), tuple(HELD + index for index in range(5)), ())

    def owners(num_columns: int) -> list[str]:
        drawn = re.sub("\033[^m]*m", "", BlockView(colour=colour).draw(block_map, num_columns, 10))
        return [line for line in drawn.splitlines() if line[1:2] == " " and line[0].isalpha()]

    assert owners(len("a v 1  b w 1")) == ["a v 1  b w 1", "c x 1  d y 1", "e z 1"]
    assert owners(len("a v 1  b w 1") - 1) == ["a v 1", "b w 1", "c x 1", "d y 1", "e z 1"]
    assert owners(len("a v 1  b w 1  c x 1")) == ["a v 1  b w 1  c x 1", "d y 1  e z 1"]


@pytest.mark.parametrize("name", ["x\nstate  fine", "\x1b]0;title\x07\x1b[2J", "\x9b31m", "\u202ereversed"])
def test_names_from_a_server_are_no_codes_for_the_terminal(name: str) -> None:
    numbers = {field.name: 1 for field in fields(RequestReport)}
    texts = {"request_id": name, "tenant": name, "state": name, "reason": name, "holders": (BlockHolder(name, 3),)}
    drawn = View(colour=False).text(RequestReport(**(numbers | texts)))
    drawn += "\n" + BlockView(colour=False).draw(BlockMap((name,), (HELD, FREE), ()), 100, 5)
    assert all(line.isprintable() for line in drawn.split("\n"))
    assert not any(line.startswith("state  fine") for line in drawn.splitlines())


def test_no_blocks() -> None:
    assert "no worker" in BlockView(colour=True).draw(BlockMap((), (), ()), 80, 20)
