"""Log lines as text or JSON, with the id of the request that they are about."""

import asyncio
import json
import logging
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import grpc.aio
import pytest

from pagewire.hosting import logs
from testing.scheduler_stack import request, serve
from testing.serving.failures import code_at_end

PROMPT = [1, 2, 3, 4, 5]


@pytest.fixture
def written(capfd: pytest.CaptureFixture[str]) -> Iterator[Callable[[], str]]:
    """Yield a function that returns the text written to standard error, without the lines of gRPC's core."""
    handlers = logging.getLogger().handlers[:]

    def read() -> str:
        for handler in logging.getLogger().handlers:
            handler.flush()
        lines = capfd.readouterr().err.splitlines(keepends=True)
        return "".join(line for line in lines if not re.match(r"[IWE]\d{4} ", line))

    yield read
    logging.basicConfig(handlers=handlers, force=True)


def test_json_lines_hold_what_the_caller_gave(written: Callable[[], str]) -> None:
    logs.configure(logs.LogConfig(log_format="json"))
    logger = logging.getLogger("pagewire.test")
    logger.info("two\nlines of %s", "“text”", extra={"request_id": "r-1", "path": Path("/x")})
    logger.debug("below the level")
    try:
        raise ValueError("why")
    except ValueError:
        logger.exception("it failed")
    first, second = map(json.loads, written().splitlines())
    assert first.pop("time").endswith("+00:00")
    assert first == {
        "level": "info",
        "logger": "pagewire.test",
        "message": "two\nlines of “text”",
        "request_id": "r-1",
        "path": "/x",
    }
    assert second["level"] == "error"
    assert second["exception"].endswith("ValueError: why")


def test_text_is_the_default(written: Callable[[], str]) -> None:
    logs.configure(logs.LogConfig())
    logging.getLogger("pagewire.test").warning("hello", extra={"request_id": "r-1"})
    assert written().endswith(" WARNING pagewire.test: hello\n")


def test_a_termination_log_that_takes_no_bytes_stops_nothing(
    written: Callable[[], str], monkeypatch: pytest.MonkeyPatch
) -> None:
    let_go = threading.Event()
    monkeypatch.setattr(logs.TerminationLog, "_write", lambda self, line: let_go.wait())
    monkeypatch.setattr(logs, "FLUSH_TIMEOUT", 0.01)
    logs.configure(logs.LogConfig())
    logging.getLogger("pagewire.test").critical("why")
    let_go.set()


def test_the_line_on_why_a_process_ends_goes_to_the_termination_log(tmp_path: Path, written: Callable[[], str]) -> None:
    path = tmp_path / "termination-log"
    logs.configure(logs.LogConfig(log_format="json", termination_log=str(path)))
    logger = logging.getLogger("pagewire.test")
    logger.critical("not asked for")
    assert not path.exists(), "it is there in pods alone"
    path.write_text("what was there before, which is longer than what comes")
    logger.error("something else")
    assert path.read_text().startswith("what was there")
    logger.critical("no GPU: %s", "é" * 5000)
    assert path.read_text().startswith("no GPU: éé")
    assert 4000 < path.stat().st_size <= 4096, "Kubernetes reads no more"
    logger.critical("no GPU")
    assert path.read_text() == "no GPU\n"
    path.unlink()
    path.mkdir()
    logger.critical("no GPU")
    assert len(written().splitlines()) == 5


async def test_every_end_is_logged_with_its_request(checkpoint: Path, written: Callable[[], str]) -> None:
    logs.configure(logs.LogConfig(log_format="json"))
    async with serve(checkpoint, log_requests=True) as stack:
        message = request(PROMPT, max_tokens=3, n=2)
        message.request_id, message.tenant = "mine", "acme"
        await stack.generate(message)
        left = request(PROMPT, max_tokens=200)
        left.request_id = "left"
        stack.worker.step_seconds = 0.01
        call = stack.stub.Generate(left)
        await call.read()
        call.cancel()
        await stack.until_idle()
    entries = [entry for entry in map(json.loads, written().splitlines()) if "request_id" in entry]
    assert [(entry["request_id"], entry["tenant"], entry["reason"]) for entry in entries] == [
        ("mine", "acme", "length"),
        ("mine", "acme", "length"),
        ("left", "", "abort"),
    ]
    first = entries[0]
    assert (first["num_prompt_tokens"], first["num_output_tokens"]) == (5, 3)
    assert 0 <= first["queue_seconds"] <= first["first_token_seconds"] <= first["seconds"]
    assert all(first[name] == round(first[name], 6) for name in ("queue_seconds", "first_token_seconds", "seconds"))
    assert len({entry["sequence_id"] for entry in entries}) == 3
    assert "mine" in first["message"]


async def test_failures_are_logged_without_being_asked_for(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serve(checkpoint, drain_timeout=0.0) as stack:
        await stack.generate(request(PROMPT, max_tokens=3))
        stack.worker.step_seconds = 0.05
        message = request(PROMPT, max_tokens=200)
        message.request_id = "cut-off"
        call = stack.stub.Generate(message)
        await call.read()
        stack.stop.set()
        assert await code_at_end(call) is grpc.StatusCode.UNAVAILABLE
        await stack.running
    (record,) = [record for record in caplog.records if hasattr(record, "request_id")]
    assert (record.request_id, record.reason, record.levelname) == ("cut-off", "no_worker", "WARNING")


async def test_requests_that_fail_together_have_one_line(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with serve(checkpoint, drain_timeout=0.0, max_num_seqs=4) as stack:
        await stack.generate(request(PROMPT, max_tokens=3))
        stack.worker.step_seconds = 0.05
        calls = [stack.stub.Generate(request(PROMPT, max_tokens=200, ignore_eos=True)) for _ in range(50)]
        await stack.until(lambda loads: loads.num_running + loads.num_waiting == 50)
        stack.stop.set()
        async with asyncio.timeout(60):
            codes = await asyncio.gather(*map(code_at_end, calls))
            await stack.running
    assert set(codes) == {grpc.StatusCode.UNAVAILABLE}
    (record,) = [record for record in caplog.records if record.levelname == "WARNING" and hasattr(record, "reason")]
    assert (record.reason, record.num_requests, len(record.request_ids)) == ("no_worker", 50, 10)
    told = r"50 requests \((req-\w+, ){9}req-\w+ and 40 more\): no_worker: the server has shut down; send .*"
    assert re.fullmatch(told, record.getMessage())


FORGED = "2026-01-01 00:00:00,000 CRITICAL pagewire: all is lost"
# Line ends, terminal escape codes (color, title, 8-bit), direction marks, an unpaired surrogate, NUL, and DEL.
HOSTILE = [
    f"x\n{FORGED}",
    f"x\r{FORGED}",
    f"x\r\n{FORGED}",
    f"x\v{FORGED}",
    f"x\x85{FORGED}",
    f"x\u2028{FORGED}",
    f"x\u2029{FORGED}",
    "\x1b[2J\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "\x9b31m\x9d0;title\x9c",
    "\b\b\b\t\0\x7f",
    "\u202etxet\u2066\u200f",
    "\ud800 half",
    "\U000e0041 tag",
]


@pytest.mark.parametrize("log_format", logs.FORMATS)
@pytest.mark.parametrize("text", HOSTILE)
def test_nothing_from_outside_forges_a_line(log_format: str, text: str, written: Callable[[], str]) -> None:
    logs.configure(logs.LogConfig(log_format=log_format))
    logger = logging.getLogger("pagewire.test")
    logger.warning("request %s failed", text, extra={"request_id": text, "request_ids": [text]})
    try:
        raise ValueError(text)
    except ValueError:
        logger.exception("it failed")
    lines = written().splitlines()
    assert all(line.isprintable() for line in lines)
    if log_format == "json":
        first, second = map(json.loads, lines)
        assert (first["message"], first["request_id"], first["request_ids"]) == (f"request {text} failed", text, [text])
        assert second["exception"].endswith(f"ValueError: {text}")
    else:
        beginnings = [line for line in lines if not line.startswith("  ")]
        assert [line.split(" WARNING ")[-1].split(" ERROR ")[-1].split(":")[0] for line in beginnings] == [
            "pagewire.test",
            "pagewire.test",
        ]
        assert beginnings[1].endswith(" ERROR pagewire.test: it failed")
        assert lines[2] == "  Traceback (most recent call last):"


@pytest.mark.parametrize("log_format", logs.FORMATS)
def test_no_line_is_longer_than_a_line_can_be(log_format: str, written: Callable[[], str]) -> None:
    logs.configure(logs.LogConfig(log_format=log_format))
    long = "é" * 1_000_000
    logging.getLogger("pagewire.test").warning("request %s failed", long, extra={"request_id": long})
    assert len(written()) < 20_000


def test_plain_text_stays_as_it_is(written: Callable[[], str]) -> None:
    logs.configure(logs.LogConfig())
    logging.getLogger("pagewire.test").warning("“Größe” \\n 大きい 🐢")
    assert written().endswith(" WARNING pagewire.test: “Größe” \\n 大きい 🐢\n")


@pytest.mark.parametrize("log_format", logs.FORMATS)
async def test_a_request_that_fails_forges_no_line(
    log_format: str, checkpoint: Path, written: Callable[[], str]
) -> None:
    logs.configure(logs.LogConfig(log_format=log_format))
    async with serve(checkpoint, worker_timeout=0) as stack:
        await stack.worker.kill()
        await stack.until(lambda loads: not loads.worker_connected)
        message = request(PROMPT, max_tokens=2)
        message.request_id, message.tenant = f"mine\n{FORGED}\x1b]0;t\x07", f"me\r\n{FORGED}"
        with pytest.raises(grpc.aio.AioRpcError):
            await stack.generate(message)
    lines = written().splitlines()
    assert all(line.isprintable() for line in lines)
    assert not any(line.startswith(FORGED) for line in lines)
