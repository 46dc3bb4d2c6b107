"""The examples, run as a user runs them, with a real `pagewire serve` of the bundled model."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import grpc
import jsonschema
import pytest

from pagewire import Client, SamplingParams
from testing.services import ENVIRON, Service, free_port
from tests.system import grpcurl
from tests.thorough import thorough

ROOT = Path(__file__).parents[2]
EXAMPLES = ROOT / "examples"
BIN = Path(sys.executable).parent
DEFAULT_URL = "127.0.0.1:50051"
TIMEOUT_S = 120


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    flags = ["--port", 0, "--metrics-port", 0, "--log-level", "error", "--num-threads", 1]
    service = Service("serve", [ROOT / "models/storyteller", *flags])
    try:
        yield service.wait_until_ready()
    finally:
        service.stop()


def run(command: Sequence[str | Path], folder: Path = ROOT, programs: Path = BIN) -> str:
    """Return the output of a command, which must succeed. `programs`: a folder that is searched before all others."""
    environ = ENVIRON | {"PATH": os.pathsep.join([str(programs), str(BIN), os.environ["PATH"]])}
    result = subprocess.run(
        list(map(str, command)),
        cwd=folder,
        env=environ,
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, result.stdout + result.stderr
    return result.stdout


def blocks(path: str, language: str) -> list[str]:
    text = (ROOT / path).read_text(encoding="utf-8")
    return [block for name, block in re.findall(r"^```(\w*)\n(.*?)^```$", text, re.M | re.S) if name == language]


def expected(url: str, prompt: str, max_tokens: int) -> str:
    with Client(url) as client:
        sampling = SamplingParams(temperature=0, max_tokens=max_tokens)
        return client.complete(prompt, sampling).outputs[0].text


def test_async_client(url: str) -> None:
    output = run([sys.executable, EXAMPLES / "async_client.py", url])
    assert output.startswith(f"storyteller at {url}\n")
    for prompt in ("Once upon a time", "The little fox", "One rainy day"):
        assert f"{prompt}{expected(url, prompt, 24)}\n" in output


def test_async_client_tells_of_a_server_that_is_not_there() -> None:
    command = [sys.executable, str(EXAMPLES / "async_client.py"), "127.0.0.1:1"]
    result = subprocess.run(command, env=ENVIRON, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert result.returncode == 1
    assert result.stderr.startswith("UNAVAILABLE: ")
    assert "Traceback" not in result.stderr


def test_batch(url: str, tmp_path: Path) -> None:
    prompts = [f"Once upon a time there were {i} owls" for i in range(100)]
    source, target = tmp_path / "prompts.txt", tmp_path / "completions.jsonl"
    source.write_text("\n".join(prompts))
    assert run([sys.executable, EXAMPLES / "batch.py", source, target, url]) == f"100 prompts, 0 failed: {target}\n"
    results = [json.loads(line) for line in target.read_text().splitlines()]
    assert [result["prompt"] for result in results] == prompts
    for result in (results[0], results[-1]):
        assert result["text"] == expected(url, result["prompt"], 32)


def test_batch_keeps_what_succeeded(url: str, tmp_path: Path) -> None:
    source, target = tmp_path / "prompts.txt", tmp_path / "completions.jsonl"
    source.write_text("Once\n" + "too long " * 10_000)
    command = [sys.executable, str(EXAMPLES / "batch.py"), str(source), str(target), url]
    result = subprocess.run(command, env=ENVIRON, capture_output=True, text=True, timeout=TIMEOUT_S, check=False)
    assert result.returncode == 1
    good, bad = (json.loads(line) for line in target.read_text().splitlines())
    assert good["text"] == expected(url, "Once", 32)
    assert bad["error"].startswith("INVALID_ARGUMENT: ")


def test_detached(url: str) -> None:
    submitted, first, second, whole = run([sys.executable, EXAMPLES / "detached.py", url]).splitlines()
    assert submitted.startswith("submitted req-")
    parts = [line.partition(": ")[2] for line in (first, second, whole)]
    texts = [part.strip("'") for part in parts]
    assert texts[0] + texts[1] == texts[2]
    assert whole.startswith("all of it (finished)")


def test_grpcurl(url: str, tmp_path: Path) -> None:
    grpcurl.install(tmp_path)
    output = run(["sh", EXAMPLES / "grpcurl.sh", url], programs=tmp_path)
    assert "pagewire.scheduler.v1.SchedulerService.Generate\n" in output
    assert '"status": "SERVING"' in output
    assert output.count("FINISH_REASON_LENGTH") == 2
    (text,) = [line for line in output.splitlines() if line.strip().startswith('"text": ') and len(line) > 60]
    assert json.loads(f"{{{text.strip().rstrip(',')}}}")["text"] == expected(url, "The little fox", 40)


def test_grpcurl_of_the_documents(url: str) -> None:
    """A client that attaches waits for the end. Afterwards there is a result, and nothing to abort."""
    submit, get_result, attach, abort = grpcurl.lines_of(ROOT / "docs/openai.md")
    assert grpcurl.run(submit, url) == [{"request_id": "turtle-1"}]
    story = expected(url, "Once there was a brave turtle", 24)
    assert "".join(delta.get("text", "") for delta in grpcurl.run(attach, url)) == story
    (result,) = grpcurl.run(get_result, url)
    assert result["state"] == "RESULT_STATE_FINISHED"
    assert [output["text"] for output in result["outputs"]] == [story]
    with pytest.raises(grpc.RpcError) as caught:
        grpcurl.run(abort, url)
    assert caught.value.code() is grpc.StatusCode.NOT_FOUND


@pytest.mark.parametrize("path", ["README.md", *thorough("docs/python.md")])
def test_python_of_the_documents(url: str, path: str) -> None:
    for block in blocks(path, "python"):
        assert run([sys.executable, "-c", block.replace(DEFAULT_URL, url)])


def test_a_card_of_the_schema(url: str) -> None:
    """The command in README.md."""
    schema = EXAMPLES / "card.json"
    command = ["complete", "--temperature", "0", "--json-schema", schema, "A card about Lily the fox:"]
    printed = run([sys.executable, "-m", "pagewire", command[0], "--url", url, *command[1:]])
    card = json.loads(printed)
    jsonschema.validate(card, json.loads(schema.read_text()))
    assert (card["name"], card["animal"]) == ("Lily", "fox")


@pytest.mark.thorough
@pytest.mark.skipif(not (shutil.which("node") and shutil.which("npm")), reason="Node.js is not installed")
def test_node(url: str, tmp_path: Path) -> None:
    """The example runs in a copy of its folder, at the same relative path to the protos."""
    folder = tmp_path / "examples" / "node"
    shutil.copytree(EXAMPLES / "node", folder, ignore=shutil.ignore_patterns("node_modules"))
    (tmp_path / "protos").symlink_to(ROOT / "protos")
    command = ["npm", "ci", "--ignore-scripts", "--no-audit", "--no-fund"]
    installed = subprocess.run(
        command, cwd=folder, capture_output=True, text=True, timeout=TIMEOUT_S, check=False, stdin=subprocess.DEVNULL
    )
    if installed.returncode and any(word in installed.stderr for word in ("ENOTFOUND", "EAI_AGAIN", "ECONNREFUSED")):
        pytest.skip("npm reaches no registry")
    assert installed.returncode == 0, installed.stderr
    lines = run(["node", "client.js", url], folder).splitlines()
    assert lines == [
        f"storyteller at {url}",
        expected(url, "Once upon a time", 24),
        "FINISH_REASON_LENGTH: 4 prompt tokens, 24 output tokens",
    ]


@pytest.mark.skipif(
    importlib.util.find_spec("langchain_openai") is None, reason="examples/langchain/requirements.txt is not installed"
)
def test_langchain() -> None:
    flags = ["--port", 0, "--metrics-port", 0, "--http-port", free_port(), "--log-level", "error"]
    service = Service("serve", [ROOT / "models/storyteller", *flags])
    try:
        service.wait_until_ready()
        ready = service.next_line()
        assert ready.startswith("ready on http://")
        lines = run([sys.executable, EXAMPLES / "langchain/client.py", ready.removeprefix("ready on ")]).splitlines()
        assert len(lines) >= 4
    finally:
        service.stop()


def test_every_example_is_known_here() -> None:
    """The example ray_data is not run here; its output is in examples/README.md."""
    known = {"async_client.py", "batch.py", "card.json", "detached.py", "grpcurl.sh"}
    known |= {"node", "langchain", "ray_data", "README.md"}
    assert {path.name for path in EXAMPLES.iterdir()} == known
