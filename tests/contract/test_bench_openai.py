"""`pagewire bench serve` against a server with the OpenAI API, and with prompts that are texts."""

import asyncio
import json
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer

from pagewire.bench import dataset
from pagewire.bench.dataset import TextTokenizer
from pagewire.bench.run import Arrival, counted
from pagewire.cli.command import main
from pagewire.errors import CommandError
from tests.contract import openai_stub
from tests.contract.bench_stack import stack_of
from tests.contract.openai_stub import OpenAIStub

ROOT = Path(__file__).parents[2]
STORYTELLER = ROOT / "models" / "storyteller"
QUESTIONS = ["What is a fox?", "What is a hen?", "Who is it?"]


@pytest.fixture
def stub() -> OpenAIStub:
    return OpenAIStub()


@pytest.fixture
def url(stub: OpenAIStub) -> Iterator[str]:
    with openai_stub.serving(stub) as address:
        yield address


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    path = tmp_path / "questions.jsonl"
    path.write_text("".join(json.dumps({"prompt": text, "more": 1}) + "\n" for text in QUESTIONS))
    return path


def measured(path: Path, *arguments: object) -> dict[str, Any]:
    """The figures of a run that succeeds."""
    saved = ["--save-result", "--save-detailed", "--result-dir", path.parent, "--result-filename", path.name]
    assert main(["bench", "serve", "--disable-tqdm", *map(str, [*arguments, *saved])]) == 0
    return json.loads(path.read_text())


def prompts(stub: OpenAIStub) -> list[str]:
    return [request["prompt"] for request in stub.requests]


def test_random_prompts_through_completions(
    stub: OpenAIStub, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    flags = ["--backend", "openai", "--base-url", url, "--model", STORYTELLER, "--served-model-name", "fox"]
    lengths = ["--random-input-len", 30, "--random-output-len", 7, "--random-range-ratio", 0.5, "--num-prompts", 6]
    more = [
        "--num-warmups",
        2,
        "--max-concurrency",
        1,
        "--temperature",
        0,
        "--request-id-prefix",
        "r",
        "--extra-body",
        '{"user": "me"}',
    ]
    figures = measured(tmp_path / "r.json", *flags, *lengths, *more)
    assert (figures["backend"], figures["model_id"]) == ("openai", "fox")
    assert (figures["completed"], figures["failed"], figures["worker"]) == (6, 0, None)
    assert figures["output_lens"] == [request["max_tokens"] for request in stub.requests[2:]]
    assert {len(itls) + 1 for itls in figures["itls"]} == set(figures["output_lens"])
    assert figures["total_output_tokens"] == sum(figures["output_lens"])
    # What the server has counted, not what the tokenizer here has.
    assert figures["input_lens"] == [len(prompt.split()) for prompt in prompts(stub)[2:]]
    assert 0 < figures["mean_ttft_ms"] <= figures["p99_ttft_ms"]
    tokenizer = Tokenizer.from_file(str(STORYTELLER / "tokenizer.json"))
    assert all(15 <= len(tokenizer.encode(prompt)) <= 46 for prompt in prompts(stub))
    assert len(set(prompts(stub))) == 8, "warm-up requests have prompts of their own"
    for request in stub.requests:
        expected = {"model": "fox", "temperature": 0.0, "ignore_eos": True, "user": "me", "stream": True}
        assert {name: request[name] for name in expected} == expected
        assert request["stream_options"] == {"include_usage": True}
    assert set(stub.authorizations) == {"Bearer secret"}
    assert stub.request_ids[:2] == [None, None]
    assert sorted(map(str, stub.request_ids[2:])) == [f"r{index}" for index in range(6)]
    assert "Successful requests:                     6" in capsys.readouterr().out


def test_equal_seeds_make_equal_prompts(stub: OpenAIStub, url: str, tmp_path: Path) -> None:
    flags = ["--backend", "vllm", "--base-url", url, "--tokenizer", STORYTELLER, "--input-len", 9, "--num-prompts", 3]
    for seed in (1, 1, 2):
        measured(tmp_path / "r.json", *flags, "--output-len", 2, "--seed", seed, "--max-concurrency", 1)
    first, again, other = (prompts(stub)[start : start + 3] for start in (0, 3, 6))
    assert first == again != other
    assert {request["model"] for request in stub.requests} == {"first"}


def test_questions_of_a_file_through_chat(stub: OpenAIStub, url: str, tmp_path: Path, questions: Path) -> None:
    """Nothing but the server's own count is known of the tokens: no tokenizer is here."""
    flags = ["--backend", "openai-chat", "--base-url", url, "--dataset-name", "custom", "--dataset-path", questions]
    stub.words_per_event = 4
    figures = measured(tmp_path / "r.json", *flags, "--custom-output-len", 10, "--num-prompts", 5)
    said = [request["messages"] for request in stub.requests]
    texts = [message["content"] for [message] in said]
    assert sorted(texts) != QUESTIONS
    assert set(texts) == set(QUESTIONS)
    assert all("ignore_eos" not in request for request in stub.requests)
    assert figures["backend"] == "openai-chat"
    assert figures["output_lens"] == [10] * 5
    assert {len(itls) for itls in figures["itls"]} == {2}, "the event with the role has no token"
    assert figures["dataset_name"] == "custom"
    assert sorted(figures["input_lens"]) == sorted(len(text.split()) for text in texts)


@pytest.mark.parametrize("flags", [["--endpoint", "/v1/chat/completions"], []])
def test_the_endpoint_says_how_to_send(
    stub: OpenAIStub, url: str, tmp_path: Path, questions: Path, flags: list[str]
) -> None:
    where = ["--backend", "openai", "--host", "127.0.0.1", "--port", url.rpartition(":")[2], *flags]
    given = ["--dataset-name", "custom", "--dataset-path", questions, "--num-prompts", 3, "--disable-shuffle"]
    measured(tmp_path / "r.json", *where, *given, "--max-concurrency", 1, "--ignore-eos")
    if flags:
        assert [request["messages"][0]["content"] for request in stub.requests] == QUESTIONS
    else:
        assert prompts(stub) == QUESTIONS
    assert all(request["ignore_eos"] for request in stub.requests)


def test_a_server_that_counts_nothing(stub: OpenAIStub, url: str, tmp_path: Path, questions: Path) -> None:
    stub.tells_usage = False
    flags = ["--backend", "openai", "--base-url", url, "--dataset-name", "custom", "--dataset-path", questions]
    figures = measured(tmp_path / "r.json", *flags, "--custom-output-len", 6, "--num-prompts", 2)
    assert figures["output_lens"] == [6, 6], "an event with text counts as a token"


def test_failures_are_told(stub: OpenAIStub, url: str, questions: Path, capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--backend", "openai", "--base-url", url, "--dataset-name", "custom", "--dataset-path", str(questions)]

    def failure() -> str:
        assert main(["bench", "serve", *flags, "--num-prompts", "1"]) == 1
        captured = capsys.readouterr()
        assert "Failed requests:                         1" in captured.out
        return captured.err

    stub.fails = (429, {"error": {"message": "too many of you", "type": "x"}})
    assert "a request failed: RESOURCE_EXHAUSTED: HTTP 429: too many of you" in failure()
    stub.fails = (500, "broken")
    assert 'HTTP 500: "broken"' in failure()
    stub.fails, stub.event_error = None, True
    assert "out of blocks" in failure()
    stub.event_error, stub.breaks_off = False, True
    assert "cannot talk to" in failure()
    stub.breaks_off, stub.streams = False, False
    assert "/v1/completions does not stream: its answer is application/json" in failure()


def test_no_server_answers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "serve", "--backend", "openai", "--base-url", "http://127.0.0.1:1", "--model", "m"]) == 1
    err = capsys.readouterr().err
    assert err.startswith("pagewire: error: cannot talk to http://127.0.0.1:1/v1/models: ")
    assert err.count("\n") == 1


def test_what_does_not_speak_http(capsys: pytest.CaptureFixture[str]) -> None:
    program = "import socket; s = socket.create_server(('127.0.0.1', 0)); print(s.getsockname()[1], flush=True); "
    program += "c = s.accept()[0]; c.recv(1); c.sendall(b'SSH-2.0-x\\r\\n'); c.recv(1000); c.recv(1)"
    with subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url = f"http://127.0.0.1:{process.stdout.readline().strip()}"
        assert main(["bench", "serve", "--backend", "openai", "--base-url", url, "--model", "m"]) == 1
    assert "does not speak HTTP/1.1, but begins with 'SSH-2.0-x'" in capsys.readouterr().err


def test_random_prompts_need_a_tokenizer(stub: OpenAIStub, url: str, capsys: pytest.CaptureFixture[str]) -> None:
    stub.models = [str(ROOT / "nothing" / "here")]
    assert main(["bench", "serve", "--backend", "openai", "--base-url", url]) == 1
    assert "random prompts need the model's tokenizer, to count tokens: give --tokenizer (" in capsys.readouterr().err
    stub.models = []
    assert main(["bench", "serve", "--backend", "openai", "--base-url", url]) == 1
    assert "does not say which models it serves: give --model" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--backend", "opneai"], "opneai"),
        (["--base-url", "http://a"], "--base-url means nothing to --backend grpc"),
        (["--backend", "openai", "--url", "a:1"], "--url means nothing to --backend openai"),
        (["--backend", "openai", "--base-url", "a:1"], "'a:1' is no address of a server"),
        (["--backend", "openai", "--base-url", "http://a", "--port", "1"], "give only one"),
        (["--url", "a:1", "--host", "b"], "give only one"),
        (["--dataset-name", "custom"], "--dataset-name custom needs --dataset-path"),
        (["--dataset-path", "x"], "--dataset-name random takes no --dataset-path"),
        (["--backend", "openai", "--extra-body", "[]"], "[] is not a JSON object"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(["bench", "serve", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err


async def test_texts_over_grpc(checkpoint: Path, tmp_path: Path, questions: Path) -> None:
    """The scheduler counts the tokens of the prompts, and applies its model's template where there is one."""
    async with stack_of(checkpoint) as stack:
        custom = ["--dataset-name", "custom", "--dataset-path", questions, "--custom-output-len", 5, "--ignore-eos"]
        saved = ["--save-result", "--save-detailed", "--result-dir", tmp_path, "--result-filename", "r.json"]
        host, _, port = stack.url.removeprefix("grpc://").rpartition(":")
        arguments = ["bench", "serve", "--host", host, "--port", port, *custom, *saved, "--num-prompts", 4]
        assert await asyncio.to_thread(main, [*map(str, arguments)]) == 0
        figures = json.loads((tmp_path / "r.json").read_text())
        assert (figures["backend"], figures["completed"], figures["output_lens"]) == ("pagewire", 4, [5] * 4)
        assert all(figures["input_lens"])


@pytest.mark.parametrize("given", ["host", "port"])
async def test_a_host_or_a_port_alone_is_given_too(
    checkpoint: Path, questions: Path, monkeypatch: pytest.MonkeyPatch, given: str
) -> None:
    """The other is the default's, not that of the environment's server."""
    async with stack_of(checkpoint) as stack:
        host, _, port = stack.url.removeprefix("grpc://").rpartition(":")
        monkeypatch.setattr("pagewire.cli.connection.DEFAULT_URL", f"127.0.0.1:{port if given == 'host' else 1}")
        monkeypatch.setenv("PAGEWIRE_URL", "127.0.0.1:1")
        where = ["--host", host] if given == "host" else ["--port", port]
        custom = ["--dataset-name", "custom", "--dataset-path", str(questions), "--custom-output-len", "5"]
        assert await asyncio.to_thread(main, ["bench", "serve", *where, *custom, "--num-prompts", "1"]) == 0


def test_files_that_hold_no_prompts(tmp_path: Path) -> None:
    path = tmp_path / "p.jsonl"
    options: dict[str, Any] = {"shuffles": True, "repeats": False}
    for text, message in (
        ("", "has no prompts"),
        ('{"prompt": "a"}\n{"text": "b"}\n', "line 2: expected a JSON object"),
        ('{"prompt": "a"}\nb\n', "line 2: expected a JSON object"),
        ('{"prompt": 3}\n', "line 1: expected a JSON object"),
        ('{"prompt": "a"}\n', "has 1 prompts, but 2 are to be sent"),
    ):
        path.write_text(text)
        with pytest.raises(CommandError, match=message):
            dataset.custom_prompts(str(path), 2, 0, **options)
    with pytest.raises(CommandError, match="cannot read --dataset-path"):
        dataset.custom_prompts(str(tmp_path / "none"), 2, 0, **options)


def test_texts_have_about_the_length_that_was_asked_for() -> None:
    tokenizer = TextTokenizer(str(STORYTELLER))
    rng = random.Random(5)
    for length in (1, 7, 64, 300):
        for _ in range(10):
            ids = rng.choices(range(tokenizer.vocab_size), k=length)
            assert abs(tokenizer.count(tokenizer.text_of(ids, rng)) - length) <= 1 + length // 20


def test_tokens_are_shared_out_among_messages() -> None:
    arrivals = [Arrival(at, 1) for at in (1.0, 2.0, 3.0)]
    assert counted(arrivals, 3, 4.0) == arrivals
    assert counted(arrivals, 8, 4.0) == [Arrival(1.0, 2), Arrival(2.0, 3), Arrival(3.0, 3)]
    assert counted([], 2, 4.0) == [Arrival(4.0, 2)]
    assert counted([], 0, 4.0) == []
