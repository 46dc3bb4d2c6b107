"""The OpenAI API of `pagewire serve` as a user runs it: real processes, a real model, HTTP."""

import json
import logging
import os
import signal
import ssl
import subprocess
import time
import urllib.error
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from pagewire import installation
from pagewire.cli import services
from pagewire.cli.command import main
from testing.parity import STORYTELLER
from testing.services import children_of, command_line, is_alive
from testing.serving.certificates import Authority
from testing.serving.tenants import KEYS, write_tenants
from tests.system.http_server import serving, with_tools

PROMPT = {"prompt": "Once there was a brave turtle", "temperature": 0, "max_tokens": 16}


def post(url: str, body: dict[str, Any], key: str = "", trusted: ssl.SSLContext | None = None) -> dict[str, Any]:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    request = urllib.request.Request(f"{url}/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=30, context=trusted) as answer:
        return json.load(answer)


def front_end_of(process: "subprocess.Popen[str]") -> int:
    (front_end,) = [child for child in children_of(process.pid) if b"frontend" in command_line(child)]
    return front_end


def test_a_front_end_that_dies_comes_back_and_ends_with_its_parent() -> None:
    with serving() as (process, url):
        text = post(url, PROMPT)["choices"][0]["text"]
        assert len(text) > 10
        os.kill(front_end_of(process), signal.SIGKILL)
        deadline = time.monotonic() + 60
        while True:
            try:
                assert post(url, PROMPT)["choices"][0]["text"] == text
                break
            except OSError:
                assert time.monotonic() < deadline
                time.sleep(0.1)  # only the front end itself shows when it listens again
        front_end = front_end_of(process)
        process.kill()
        process.wait(10)
        deadline = time.monotonic() + 10
        while is_alive(front_end):
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_clean_shutdown_logs_no_warnings(tmp_path: Path) -> None:
    """The front end ends last, after the scheduler has reported that it shuts down."""
    path = tmp_path / "log"
    with path.open("wb") as file, serving("--log-level=warning", stderr=file) as (process, url):
        assert post(url, PROMPT)["choices"]
        process.terminate()
        assert process.wait(30) == 0
    progress = " WARNING worker_service.startup.progress: "  # of a start that takes long
    assert [line for line in path.read_text().splitlines() if progress not in line] == []


def test_tenants_over_tls(tmp_path: Path) -> None:
    write_tenants(tmp_path / "tenants.yaml")
    authority = Authority("ours")
    cert, key = authority.issue("127.0.0.1").write(tmp_path, "server")
    with serving(f"--tenants={tmp_path / 'tenants.yaml'}", f"--tls-cert={cert}", f"--tls-key={key}") as (_, url):
        trusted = ssl.create_default_context(cafile=authority.write(tmp_path))
        assert post(url, PROMPT, KEYS["acme"], trusted=trusted)["choices"]
        with pytest.raises(urllib.error.HTTPError, match="401"):
            post(url, PROMPT, trusted=trusted)


@pytest.mark.thorough
def test_an_api_key_is_demanded_and_shown_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PAGEWIRE_API_KEY", KEYS["acme"])
    log, record = tmp_path / "log", tmp_path / "record"
    with log.open("wb") as file, serving("--log-level=debug", f"--record={record}", stderr=file) as (process, url):
        assert post(url, PROMPT, KEYS["acme"])["choices"]
        for key in ("", KEYS["globex"]):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                post(url, PROMPT, key)
        children = children_of(process.pid)
        assert len(children) >= 2
        assert not any(KEYS["acme"].encode() in command_line(child) for child in children)
        holders = [child for child in children if KEYS["acme"].encode() in Path(f"/proc/{child}/environ").read_bytes()]
        assert holders == [front_end_of(process)]
        process.terminate()
        assert process.wait(30) == 0
    written = log.read_bytes()
    assert b"api_key=(hidden)" in written
    assert KEYS["acme"].encode() not in written + record.read_bytes()


@pytest.mark.parametrize("verb", ["serve", "frontend"])
def test_the_port_is_8000_unless_one_is_named(
    verb: str,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The model does not exist, so nothing listens."""
    monkeypatch.delenv("PAGEWIRE_HTTP_PORT")
    monkeypatch.setattr(services, "check_port", lambda host, port, flag: None)
    monkeypatch.setattr(services.logs, "configure", lambda config: None)
    caplog.set_level(logging.DEBUG, services.log.name)
    command = [verb, "/no-model", "--metrics-port=0"]
    assert main(command) == 78
    assert "http_port=8000" in caplog.text
    monkeypatch.setattr(installation, "shortage", lambda extra="": "there is no HTTP" if extra == "http" else None)
    caplog.clear()
    assert main(command) == 78
    assert "http_port=0" in caplog.text
    assert caplog.messages.count("the OpenAI API is not served: there is no HTTP") == 1
    caplog.clear()
    assert main([*command, "--http-port=0"]) == 78
    assert "there is no HTTP" not in caplog.text
    assert main([*command, "--http-port=8000"]) == 2
    assert "--http-port needs an HTTP server, but there is no HTTP" in capsys.readouterr().err


def test_a_model_without_a_tokenizer_takes_tokens(tmp_path: Path) -> None:
    for path in STORYTELLER.iterdir():
        if not path.name.startswith("tokenizer"):
            (tmp_path / path.name).symlink_to(path)
    with serving(model=tmp_path) as (_, url):
        assert post(url, {"prompt": [1, 2, 3], "max_tokens": 4, "ignore_eos": True})["usage"]["completion_tokens"] == 4


FORECAST = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Oslo", "Rome"]},
        "days": {"type": "array", "items": {"enum": [1, 2, 3]}, "maxItems": 6},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}


def streamed_call(client: openai.OpenAI, seed: int) -> str:
    """Return the arguments of a forced tool call, which follows reasoning that only its budget ends."""
    function: Any = {"name": "forecast", "parameters": FORECAST}
    events = client.chat.completions.create(
        model="tooled",
        messages=[{"role": "user", "content": PROMPT["prompt"]}],
        tools=[{"type": "function", "function": function}],
        tool_choice="required",
        max_tokens=100,
        seed=seed,
        stream=True,
        extra_body={"thinking_token_budget": 6},
    )
    told = [event.choices[0].delta for event in events]
    assert any(getattr(delta, "reasoning", None) for delta in told)
    deltas = [call for delta in told for call in delta.tool_calls or ()]
    assert {call.index for call in deltas} == {0}
    return "".join(call.function.arguments or "" for call in deltas if call.function)


@pytest.mark.thorough
def test_calls_of_tools_are_the_same_through_deaths_of_the_worker(tmp_path: Path) -> None:
    template = with_tools(tmp_path) / "chat_template.jinja"
    template.write_text(f"{template.read_text()}<think>")
    with serving("--served-model-name=tooled", model=tmp_path) as (process, url):
        client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", timeout=60, max_retries=0)
        calm = [streamed_call(client, seed) for seed in range(20)]
        whole = [arguments for arguments in calm if arguments.endswith("}")]
        assert len(set(calm)) > 5, calm
        assert whole
        assert all(json.loads(arguments)["city"] in ("Oslo", "Rome") for arguments in whole)
        with ThreadPoolExecutor(4) as pool:
            streams = [pool.submit(streamed_call, client, seed) for seed in range(20)]
            for place in (2, 9, 15):
                streams[place].result(60)
                (worker,) = [child for child in children_of(process.pid) if b"worker" in command_line(child)]
                os.kill(worker, signal.SIGKILL)
            assert [stream.result(60) for stream in streams] == calm
