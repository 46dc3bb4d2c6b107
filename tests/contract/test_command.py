"""The commands with a scripted server: standard output, standard error and exit status."""

import io
import json
import os
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast

import grpc
import pytest

from pagewire.cli.chat import Conversation
from pagewire.cli.chat_terminal import read_input
from pagewire.cli.command import BENCHES, VERBS, main, tell
from pagewire.cli.request import SamplePrinter
from pagewire.client.errors import CommandError
from pagewire.client.wire import decode_output
from pagewire.compatibility import FOREIGN_RUN_FLAGS
from pagewire.hosting import local_server
from pagewire.hosting.local_server import LocalServer
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from testing.serving import scripted_scheduler
from testing.serving.scripted_scheduler import ScriptedScheduler, delta, serving

STORY = "".join(scripted_scheduler.WORDS)
CHAT_TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m['content'] }}\n{% endfor %}"
    "{% if add_generation_prompt %}{{ bos_token }}<assistant>{% endif %}"
)


@pytest.fixture
def scheduler() -> ScriptedScheduler:
    return ScriptedScheduler()


@pytest.fixture(autouse=True)
def url(scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    with serving(scheduler) as address:
        monkeypatch.setenv("PAGEWIRE_URL", address)
        yield address


def start(*arguments: str) -> "subprocess.Popen[str]":
    command = [sys.executable, "-m", "pagewire", *arguments]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


@pytest.mark.one_of_each
@pytest.mark.parametrize("arguments", ["--no-such-flag 0", "--no-such-flag /tmp", "-Z 0", "a --no-such-flag 0"])
@pytest.mark.parametrize("verb", [*(name for name in VERBS if name != "bench"), *(f"bench {name}" for name in BENCHES)])
def test_the_value_of_an_unknown_flag_is_no_argument(
    verb: str, arguments: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*verb.split(), *arguments.split()]) == 2
    flag = next(word for word in arguments.split() if word.startswith("-"))
    line = f"pagewire {verb}: error: unknown flag {flag} (see pagewire {verb} --help)\n"
    assert capsys.readouterr().err == line


def test_complete_streams_text_and_tells_statistics(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complete", "Once"]) == 0
    captured = capsys.readouterr()
    assert captured.out == STORY + "\n"
    for part in ("time to first token ", " tokens/s, ", "7 prompt tokens", "4 cached tokens", "5 completion tokens"):
        assert part in captured.err
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "redirection", "code", "error"),
    [
        ("complete -", "<&-", 1, "pagewire: error: cannot read standard input: Bad file descriptor\n"),
        ("chat", "<&-", 1, "pagewire: error: cannot read standard input: Bad file descriptor\n"),
        ("run m", "<&-", 1, "pagewire: error: cannot read standard input: Bad file descriptor\n"),
        ("--version", ">&-", 1, "pagewire: error: cannot write the output: Bad file descriptor\n"),
        ("complete --help", ">&-", 1, "pagewire: error: cannot write the output: Bad file descriptor\n"),
        ("--help", ">/dev/full", 1, "pagewire: error: cannot write the output: No space left on device\n"),
        ("complete Once", ">/dev/full", 1, "cannot write the output: No space left on device\n"),
        ("complete Once", "2>&-", 0, ""),
        ("complete Once", "2>/dev/full", 0, ""),
        ("", "2>/dev/full", 2, ""),
    ],
)
def test_standard_streams_that_are_closed_or_full(arguments: str, redirection: str, code: int, error: str) -> None:
    command = ["sh", "-c", f'exec "$0" -m pagewire {arguments} {redirection}', sys.executable]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == code
    assert done.stderr.endswith(error)
    assert "Traceback" not in done.stderr
    assert done.stderr.count("pagewire: error: ") == bool(error)
    assert done.stdout == (f"{STORY}\n" if code == 0 else ""), "what is told on standard error stands nowhere else"


@pytest.mark.parametrize("given", [b"a\xff", "a\u00e4".encode("latin-1")])
def test_a_prompt_that_is_not_utf8(
    given: bytes, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], scheduler: ScriptedScheduler
) -> None:
    """The text comes from a terminal or file in another encoding.

    Python always decodes arguments with surrogate escapes, but standard input only in some locales.
    """
    for arguments in (
        ["complete", "-"],
        ["complete", os.fsdecode(given)],
        ["chat", "-q", os.fsdecode(given)],
        ["run", "m", os.fsdecode(given)],
        ["run", "m"],
        ["chat"],
    ):
        monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(given), encoding="utf-8"))
        assert main(arguments) == (arguments != ["chat"])
        told = capsys.readouterr().err
        assert f"half a character or the byte {given[1]:#x} of a text that is not UTF-8" in told
    assert not scheduler.requests


def test_help_and_version_by_other_words(capsys: pytest.CaptureFixture[str]) -> None:
    for first, second in (
        ("-V", "--version"),
        ("help", "--help"),
        ("help complete", "complete --help"),
        ("help bench latency", "bench latency --help"),
        ("bench help latency", "bench latency --help"),
    ):
        assert main(first.split()) == main(second.split()) == 0
        printed = capsys.readouterr().out
        assert printed
        assert printed == printed[: len(printed) // 2] * 2


def test_an_error_stands_below_usage(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["complet"]) == 2
    assert capsys.readouterr().err.endswith("\n\npagewire: error: unknown verb 'complet'; did you mean complete?\n")


@pytest.mark.parametrize(
    "arguments",
    [
        *(
            ["ps"],
            ["list"],
            ["ls"],
            ["pull", "m"],
            ["stop", "m"],
            ["rm", "m"],
            ["demo"],
            ["show", "m"],
            ["create", "m"],
        ),
        *(
            ["cp", "m", "n"],
            ["push", "m"],
            ["llama-server", "-m", "m"],
            ["-m", "m"],
            ["-hf", "m"],
            ["launch", "claude"],
        ),
        *(["run-batch"], ["collect-env"], ["generate", "m"], ["llama-cli"]),
    ],
)
def test_verbs_of_other_commands_are_explained_in_a_line(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith(f"pagewire: error: there is no pagewire {arguments[0]}: ")
    assert "`" in line or "Ctrl-C" in line


@pytest.mark.parametrize("flag", ["--format", "--keepalive", "--think"])
@pytest.mark.parametrize("verb", ["run", "chat"])
def test_flags_of_ollama_run_are_explained(verb: str, flag: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([verb, flag, "x"]) == 2
    assert f"error: unknown flag {flag}: {FOREIGN_RUN_FLAGS[flag]} (see" in capsys.readouterr().err


class Writes(io.RawIOBase):
    """A raw standard error stream that records each non-empty write."""

    def __init__(self) -> None:
        self.lines: list[bytes] = []

    def writable(self) -> bool:
        return True

    def write(self, data: Any) -> int:
        if data:
            self.lines.append(bytes(data))
        return len(data)


def test_a_line_on_standard_error_is_one_write(monkeypatch: pytest.MonkeyPatch) -> None:
    """A line on standard error is a single write.

    Otherwise the lines of a started server could appear inside it if PYTHONUNBUFFERED is set, as in containers.
    """
    writes = Writes()
    monkeypatch.setattr(sys, "stderr", io.TextIOWrapper(cast("Any", writes), write_through=True))
    monkeypatch.setattr(LocalServer, "start", lambda server: "grpc://here")
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    tell("told")
    with local_server.serving("model", flags_only=()):
        told, starting, ready = writes.lines
    assert (told, starting) == (b"told\n", b"starting pagewire serve model\n")
    assert re.fullmatch(rb"ready on grpc://here after [0-9.]+ s\n", ready)


@pytest.fixture
def served(url: str, monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """The flags of each `pagewire serve` that a command starts. A scripted scheduler replaces the server."""
    started: list[list[str]] = []

    def start(server: LocalServer) -> str:
        words = server._command
        started.append(words[words.index("serve") + 1 :])
        return url

    monkeypatch.setattr(LocalServer, "start", start)
    monkeypatch.setattr(signal, "signal", lambda number, handler: None)
    return started


@pytest.mark.parametrize(
    ("given", "flags"),
    [
        ("m hi", ""),
        ("m --dtype float32 hi", "--dtype=float32"),
        ("--model m -- ", ""),
        ("m hi -c 4096 -ngl 99 --no-mmap", "--ctx-size=4096 --n-gpu-layers=99 --no-mmap"),
        ("m hi --served_model_name a b --no-enable-prefix-caching",
         "--served-model-name=a --served-model-name=b --no-enable-prefix-caching"),
        ("m --seed 4 --top-k 3 --chat-template rag --stop hi --system s hi -q int8 ", "--quantization=int8"),
    ],
)  # fmt: skip
@pytest.mark.one_of_each
@pytest.mark.parametrize("verb", ["run", "chat"])
def test_run_passes_server_flags_to_serve(
    served: list[list[str]],
    scheduler: ScriptedScheduler,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    verb: str,
    given: str,
    flags: str,
) -> None:
    if verb == "chat" and given.startswith("-"):
        pytest.skip("a chat with a server has flags first")
    scheduler.info.named_chat_templates.update({"rag": CHAT_TEMPLATE})
    scheduler.info.chat_template = CHAT_TEMPLATE
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\n"))
    assert main([verb, *given.split()]) == 0
    assert capsys.readouterr().out == STORY + "\n"
    (command,) = served
    assert command == ["m", *local_server.SERVE_FLAGS, *flags.split()]
    (request,) = scheduler.requests
    assert request.text.endswith("<user>hi\n<assistant>")
    assert request.sampling.seed == (4 if "--seed" in given else 0)


def test_run_reads_the_prompt_where_it_is_told_to(
    served: list[list[str]], scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n\ntwo\n"))
    assert main(["run", "m", "-"]) == 0
    assert [request.text for request in scheduler.requests] == ["one\n\ntwo"]
    assert main(["run", "m"]) == 2  # standard input is empty now
    assert len(served) == 1


def test_text_is_written_as_it_comes(scheduler: ScriptedScheduler) -> None:
    scheduler.script = scripted_scheduler.never_end
    with start("complete", "Once") as process:
        assert process.stdout is not None
        assert process.stdout.read(30) == (" so" * 10)
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert scheduler.ended.wait(5)


def test_text_does_not_wait_in_a_buffer_for_the_end_of_its_line() -> None:
    written = io.BytesIO()
    printer = SamplePrinter(1, io.TextIOWrapper(written))
    printer.add(decode_output(delta(0, 0, [1], "Once")))
    assert written.getvalue() == b"Once"


def test_a_reader_that_goes_away(scheduler: ScriptedScheduler) -> None:
    scheduler.script = scripted_scheduler.never_end
    with start("complete", "Once") as process:
        assert process.stdout is not None
        process.stdout.read(3)
        process.stdout.close()
        assert process.wait(20) == 1
        assert process.stderr is not None
        assert process.stderr.read() == ""
    assert scheduler.ended.wait(5)


def test_complete_json(capsys: pytest.CaptureFixture[str], scheduler: ScriptedScheduler) -> None:
    assert main(["complete", "--json", "--prompt-token-ids", "1,2,3", "--n", "2"]) == 0
    captured = capsys.readouterr()
    printed = json.loads(captured.out)
    assert captured.out.count("\n") == 1
    assert captured.err == ""
    assert list(printed) == ["prompt_tokens", "cached_tokens", "completion_tokens", "ttft_s", "total_s", "outputs"]
    assert (printed["prompt_tokens"], printed["cached_tokens"], printed["completion_tokens"]) == (7, 4, 10)
    tokens = [100, 101, 102, 103, 104]
    assert printed["outputs"] == [
        {"index": index, "token_ids": tokens, "text": STORY, "finish_reason": "length"} for index in range(2)
    ]
    assert list(scheduler.requests[0].token_ids.ids) == [1, 2, 3]


def test_json_has_logprobs_where_asked_for(capsys: pytest.CaptureFixture[str], scheduler: ScriptedScheduler) -> None:
    entry = pb.TokenLogprobs(token_id=5, logprob=-0.5, rank=1, top=[pb.TopLogprob(token_id=5, logprob=-0.5)])
    last = delta(0, 0, [5], "x", last=True)
    last.MergeFrom(pb.GenerateResponse(logprobs=[entry], cumulative_logprob=-0.5))
    scheduler.script = lambda request, context: iter([pb.GenerateResponse(prompt_logprobs=[entry]), last])
    assert main(["complete", "--json", "--logprobs", "1", "--prompt-logprobs", "1", "Once"]) == 0
    printed = json.loads(capsys.readouterr().out)
    expected = [{"token_id": 5, "logprob": -0.5, "rank": 1, "top": [[5, -0.5]]}]
    assert printed["prompt_logprobs"] == expected
    assert printed["outputs"][0]["logprobs"] == expected
    assert printed["outputs"][0]["cumulative_logprob"] == -0.5


def test_samples_are_labelled_and_not_mixed(capsys: pytest.CaptureFixture[str], scheduler: ScriptedScheduler) -> None:
    deltas = [
        delta(1, 0, [1], "b"),
        delta(2, 0, [1], "c", last=True),
        delta(0, 0, [1], "a"),
        delta(1, 1, [2], "B", last=True),
        delta(0, 1, [2], "A", last=True),
    ]
    scheduler.script = lambda request, context: iter(deltas)
    assert main(["complete", "--n", "3", "Once"]) == 0
    assert capsys.readouterr().out == "--- sample 0 ---\naA\n--- sample 1 ---\nbB\n--- sample 2 ---\nc\n"


def test_flags_become_the_request(scheduler: ScriptedScheduler) -> None:
    flags = (
        "--max-tokens 9 --temperature 0.5 --n 2 --seed 3 --ignore-eos --stop END --stop --- --logprobs 2 --top-p 0.75 "
        "--top-k 4 --min-p 0.25 --presence-penalty -1 --frequency-penalty 1 --repetition-penalty 1.5 --min-tokens 2 "
        "--prompt-logprobs 0 --stop-token-ids 5,6 --logit-bias 7=-1.5 --logit-bias 8=2 --no-skip-special-tokens "
        "--include-stop-str-in-output --request-id mine --priority -4 --tenant t --cache-salt s --timeout 30 "
        "--session chat-7 --no-will-return --retention-seconds 9"
    )
    assert main(["complete", *flags.replace("--stop ---", "--stop=---").split(), "Once"]) == 0
    [request] = scheduler.requests
    assert request == pb.GenerateRequest(
        text="Once", request_id="mine", priority=-4, tenant="t", cache_salt="s", session_id="chat-7",
        will_return=False, retention_seconds=9,
        sampling=pb.SamplingParams(
            max_tokens=9, temperature=0.5, n=2, seed=3, ignore_eos=True, stop=["END", "---"], logprobs=2, top_p=0.75,
            top_k=4, min_p=0.25, presence_penalty=-1, frequency_penalty=1, repetition_penalty=1.5, min_tokens=2,
            prompt_logprobs=0, stop_token_ids=[5, 6], logit_bias={7: -1.5, 8: 2.0}, skip_special_tokens=False,
            include_stop_str_in_output=True,
        ),
    )  # fmt: skip
    [remaining] = scheduler.time_remaining
    assert remaining is not None
    # gRPC encodes a deadline with few digits and rounds it up: 30.01 s are sent as 30.1 s.
    assert 0 < remaining <= 30.1


@pytest.mark.parametrize("verb", ["complete", "chat -q"])
def test_flags_of_structured_output(scheduler: ScriptedScheduler, tmp_path: Path, verb: str) -> None:
    file = tmp_path / "file"
    file.write_text('{"type": "é"}', encoding="utf-8")
    cases: list[tuple[list[object], dict[str, Any]]] = [
        (["--json-schema", file], {"json_schema": '{"type": "é"}'}),
        (["--json-object"], {"json_object": True}),
        (["--regex", "a,b+"], {"regex": "a,b+"}),
        (["--choice", "yes, no"], {"choice": pb.Choice(texts=["yes", " no"])}),
        (["--grammar", file], {"grammar": '{"type": "é"}'}),
        (["--structural-tag", file], {"structural_tag": '{"type": "é"}'}),
    ]
    for flags, expected in cases:
        assert main([*verb.split(), "Once", *map(str, flags)]) == 0
        assert scheduler.requests.pop().sampling == pb.SamplingParams(**expected)


def test_what_is_not_given_is_left_to_the_server(scheduler: ScriptedScheduler) -> None:
    assert main(["complete", "Once"]) == 0
    assert scheduler.requests == [pb.GenerateRequest(text="Once", sampling=pb.SamplingParams())]


def test_text_from_standard_input(scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once\nmore"))
    assert main(["complete", "-"]) == 0
    assert scheduler.requests[0].text == "Once\nmore"


@pytest.mark.parametrize("flags", [[], ["--json"]])
def test_an_error_is_one_line(
    scheduler: ScriptedScheduler, capsys: pytest.CaptureFixture[str], flags: list[str]
) -> None:
    def refuse(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        scripted_scheduler.abort(context, grpc.StatusCode.INVALID_ARGUMENT, "prompt has 9 tokens, the model allows 8")
        yield from ()

    scheduler.script = refuse
    assert main(["complete", *flags, "Once"]) == 1
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == "pagewire: error: INVALID_ARGUMENT: prompt has 9 tokens, the model allows 8\n"


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    for verb in (["complete", "Once"], ["status"], ["chat", "-q", "hello"], ["submit", "Once"], ["attach", "x"]):
        assert main([*verb, "--url", "127.0.0.1:1"]) == 1
        captured = capsys.readouterr()
        assert captured.out == ""
        assert captured.err.startswith(
            "pagewire: error: UNAVAILABLE: no server answers at 127.0.0.1:1 (`pagewire serve"
        )
        assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["complet"], "unknown verb 'complet'; did you mean complete?"),
        (["complete"], "give either a text"),
        (["complete", "a", "--prompt-token-ids", "1"], "give either a text"),
        (["complete", "a", "--max-token", "1"], "unknown flag --max-token; did you mean --max-tokens?"),
        (["complete", "--prompt-token-ids", "1,a"], "not a list of token ids"),
        (["complete", "a", "--logit-bias", "1"], "not a bias such as"),
        (["complete", "a", "--json-schema", "/nowhere"], "--json-schema: cannot read /nowhere: No such file"),
        (["complete", "a", "--grammar", "/proc/self/exe"], "--grammar: cannot read /proc/self/exe: it is not UTF-8"),
        (["chat", "--choice", "a,,b"], "--choice: 'a,,b' has an empty text"),
        (["complete", "a", "--regex", "a", "--choice", "b"], "--choice: not allowed with argument --regex"),
        (["complete", "a", "--url", "nowhere"], "HOST:PORT"),
        (["complete", "a", "--tls-ca", "/nowhere"], "/nowhere"),
        (["complete", "a", "--tls-cert", "/nowhere"], "tls_key"),
        (["status", "--whatch"], "did you mean --watch?"),
        (["status", "--address", "a:1"], "unknown flag --address; did you mean --url?"),
        (["chat", "--server=a:1"], "unknown flag --server; did you mean --url?"),
        (["complete", "a", "--server_adress", "a:1"], "unknown flag --server-adress; did you mean --url?"),
        (["bench", "latency", "--host", "a"], "unknown flag --host; did you mean --url?"),
        (["complete", "a", "--top-p", "2"], "argument --top-p: top_p is 2, but must be above 0 and at most 1"),
        (["complete", "a", "--seed", "-1"], "argument --seed: seed is -1, but must be 0 to 18446744073709551615"),
        (["complete", "a", "--n", "17"], "argument --n: n is 17, but must be 1 to 16"),
        (["complete", "a", "--logit-bias", "5=101"], "logit_bias[5] is 101, but must be -100 to 100"),
        (["chat", "--temperature", "nan"], "argument --temperature: 'nan' is not a number"),
        (["bench", "latency", "--top-p", "0"], "argument --top-p: top_p is 0, but must be above 0 and at most 1"),
        (["complete", "two", "words"], "unknown argument words; quote arguments that contain spaces"),
        (["run"], "MODEL is missing (also --model): give a checkpoint directory"),
        (["run", "m", ""], "the prompt is empty; to chat, run it on a terminal"),
        (["run", "m", "two", "words"], "unknown argument words; quote arguments that contain spaces"),
        (["run", "m", "hi", "--dtype", "float31"], "--dtype: 'float31' is none of auto, float32"),
        (["run", "m", "hi", "--http-port", "80"], "unknown flag --http-port: `pagewire serve` has it"),
        (["run", "m", "hi", "--url", "a:1"], "unknown flag --url: `pagewire chat` talks to a server that runs already"),
        (["run", "m", "hi", "--enable-lora"], "--enable-lora is not supported: Pagewire serves one model"),
        (["chat", "m", "--temprature", "1"], "unknown flag --temprature; did you mean --temperature?"),
        (["chat", "--model", "m"], "unknown flag --model: `pagewire run MODEL` serves one and chats with it"),
        (["--verison"], "did you mean --version?"),
        (["serve", "m", "--block-sise", "8"], "did you mean --block-size?"),
        (["serve", "m", "--port", "high"], "--port: 'high' is not an integer"),
        (
            ["serve", "m", "--worker", "a:1"],
            "unknown flag --worker: `pagewire serve` connects the scheduler and the worker",
        ),
        (["serve", "m", "--tensor-parallel-rank=1"], "unknown flag --tensor-parallel-rank: `pagewire serve` connects"),
        (["serve", "m", "--device", "tpu"], "--device: 'tpu' is none of auto, cpu, cuda"),
        (["serve", "m", "--num-host-blocks", "5", "--swap-space", "1GiB"], "--swap-space"),
        (["serve", "m", "--policy", "fairly"], "--policy: 'fairly' is none of"),
        (["serve", "m", "--preemption", "swop"], "did you mean swap?"),
        (["serve", "m", "--watermark", "1"], "--watermark"),
        (["submit"], "give either a text"),
        (["submit", "a", "--timeout", "3"], "unknown flag --timeout"),
        (["complete", "a", "--early-stopping", "soon"], "--early-stopping"),
        (["attach"], "ID"),
        (["attach", "x", "--from-token", "-1"], "--from-token is -1"),
        (
            ["serve"],
            "MODEL is missing (also --model): give a checkpoint directory, a GGUF file, or the id of a Hugging",
        ),
        (["serve"], "storyteller is the bundled model"),
        (["serve", "a", "--model", "b"], "MODEL is given twice: 'a' and 'b'"),
        (["serve", "--modle", "b"], "unknown flag --modle; did you mean --model?"),
        (["serve", "--host", "a", "b", "c"], "unknown argument c"),
        (["worker", "--model", "m", "--max-num-seqs", "0"], "--max-num-seqs"),
        (["worker"], "--model"),
        (["scheduler", "--model", "m", "--worker", "nowhere"], "--worker"),
    ],
)
def test_wrong_usage(capsys: pytest.CaptureFixture[str], arguments: list[str], message: str) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert message in captured.err
    assert "Traceback" not in captured.err


def test_help_of_every_verb(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    overview = capsys.readouterr().out
    for verb in VERBS:
        assert f"  {verb} " in overview
        assert main([verb, "--help"]) == 0
        assert f"usage: pagewire {verb} " in capsys.readouterr().out
    assert main([]) == 2


@pytest.mark.parametrize(
    "verb", ["complete", "chat", "submit", "attach", "result", "status", "serve", "worker", "scheduler"]
)
def test_help_loads_nothing_heavy(verb: str) -> None:
    heavy = ["torch", "numpy", "tokenizers", "transformers"]
    if verb not in ("serve", "worker", "scheduler"):
        heavy += ["scheduler_service", "worker_service"]
    program = f"""
import contextlib, io, sys
from pagewire.cli.command import main
with contextlib.redirect_stdout(io.StringIO()):
    main([{verb!r}, "--help"])
print([name for name in {heavy} if name in sys.modules])
"""
    printed = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert printed.stdout.strip() == "[]"


def test_status(capsys: pytest.CaptureFixture[str], scheduler: ScriptedScheduler) -> None:
    assert main(["status"]) == 0
    captured = capsys.readouterr()
    assert re.search("^model +storyteller, a vocabulary of 4096 tokens$", captured.out, re.MULTILINE)
    assert re.search("^context +at most 512 tokens, prompt and output together$", captured.out, re.MULTILINE)
    assert "none connected" in captured.out
    assert "25.0 % held of 200 blocks" in captured.out
    assert "\033" not in captured.out
    worker = pb.WorkerInfo(device="cpu", dtype="float32", attention_backend="torch", epoch=9, worker_id="box:4711:ab12")
    scheduler.info.worker.MergeFrom(worker)
    assert main(["status"]) == 0
    printed = capsys.readouterr().out
    assert "cpu float32, torch attention, epoch 9, process 4711 on box\n" in printed
    assert "weights" not in printed, "an older server does not tell of them"


def test_status_tells_of_the_weights(capsys: pytest.CaptureFixture[str], scheduler: ScriptedScheduler) -> None:
    scheduler.info.worker.MergeFrom(pb.WorkerInfo(weight_format="Q4_0 and Q6_K", weight_bytes=3 << 29))
    assert main(["status"]) == 0
    line = r"^weights +Q4_0 and Q6_K, 1.50 GiB of memory$"
    assert re.search(line, capsys.readouterr().out, re.MULTILINE)


def test_status_tells_of_layer_groups(capsys: pytest.CaptureFixture[str], scheduler: ScriptedScheduler) -> None:
    scheduler.info.worker.MergeFrom(pb.WorkerInfo(layer_group_windows=[0]))
    assert main(["status"]) == 0
    assert "layer groups" not in capsys.readouterr().out
    scheduler.info.worker.MergeFrom(pb.WorkerInfo(layer_group_windows=[512] * 6))
    assert main(["status"]) == 0
    line = "^layer groups +1 without a window, 6 with a window of 512 tokens$"
    assert re.search(line, capsys.readouterr().out, re.MULTILINE)


def test_status_tells_the_share_of_the_prompts_that_each_cache_had(
    capsys: pytest.CaptureFixture[str], scheduler: ScriptedScheduler
) -> None:
    scheduler.loads.MergeFrom(
        pb.GetLoadsResponse(num_prompt_tokens=8, num_cached_prompt_tokens=4, num_host_cached_prompt_tokens=1)
    )
    assert main(["status"]) == 0
    printed = capsys.readouterr().out
    assert "8 prompt (50.0 % cached)" in printed
    assert "; 12.5 % of the prompt tokens were found there" in printed


def test_status_json(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["status", "--json"]) == 0
    printed = json.loads(capsys.readouterr().out)
    assert printed["info"]["max_model_len"] == 512
    assert printed["info"]["worker"] is None
    assert printed["loads"]["num_running"] == 3
    assert printed["loads"]["queue_time"] is None


def test_status_watch_goes_on_until_interrupted() -> None:
    with start("status", "--watch", "--json") as process:
        assert process.stdout is not None
        for _ in range(2):
            assert json.loads(process.stdout.readline())["loads"]["num_running"] == 3
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=20)
    assert process.returncode == 130
    assert "Traceback" not in err


def test_chat_renders_the_template(capsys: pytest.CaptureFixture[str], scheduler: ScriptedScheduler) -> None:
    scheduler.info.chat_template = CHAT_TEMPLATE
    assert main(["chat", "-q", "hello", "--system", "be kind", "--max-tokens", "5", "--stats"]) == 0
    captured = capsys.readouterr()
    assert captured.out == STORY + "\n"
    assert "5 completion tokens" in captured.err
    [request] = scheduler.requests
    assert request.text == "<system>be kind\n<user>hello\n<assistant>"
    assert request.sampling == pb.SamplingParams(max_tokens=5)
    assert (request.session_id, request.HasField("will_return"), request.will_return) == ("", True, False)


def test_chat_takes_the_template_of_a_name_or_a_file(
    capsys: pytest.CaptureFixture[str],
    scheduler: ScriptedScheduler,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scheduler.info.chat_template = CHAT_TEMPLATE
    scheduler.info.named_chat_templates.update(
        {"default": CHAT_TEMPLATE, "rag": "{{ bos_token + messages[0].content }}!"}
    )
    assert main(["chat", "-q", "hello", "--chat-template", "rag"]) == 0
    [request] = scheduler.requests
    assert request.text == "hello!"
    capsys.readouterr()
    (tmp_path / "rag").write_text("the name of a template counts, not the file")
    (tmp_path / "other.jinja").write_text("{% for m in messages %}({{ m.content }}){% endfor %}")
    monkeypatch.chdir(tmp_path)
    for chosen in ("rag", "other.jinja"):
        assert main(["chat", "-q", "hello", "--chat-template", chosen]) == 0
    assert [request.text for request in scheduler.requests[-2:]] == [scheduler.requests[0].text, "(hello)"]
    assert main(["chat", "-q", "hello", "--chat-template", "rug"]) == 1
    assert "chat_template is 'rug', which is neither Jinja2 nor the name" in capsys.readouterr().err


def test_chat_remembers_what_was_said(
    capsys: pytest.CaptureFixture[str], scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    scheduler.info.chat_template = CHAT_TEMPLATE
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nand then?\n"))
    assert main(["chat"]) == 0
    assert capsys.readouterr().out == f"{STORY}\n" * 2
    assert scheduler.requests[1].text == f"<user>hello\n<assistant>{STORY}\n<user>and then?\n<assistant>"


def test_answers_in_a_chat_end_with_the_models_token(
    capsys: pytest.CaptureFixture[str], scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A chat template gets `eos_token`, with which Mistral's templates end a turn.

    The tokenizer adds the first token itself.
    """
    ends = "{{ m.content + (eos_token if m.role == 'assistant' else '|') }}"
    scheduler.info.chat_template = "{{ bos_token }}{% for m in messages %}" + ends + "{% endfor %}"
    scheduler.info.special_tokens.update({"bos_token": "<s>", "eos_token": "</s>"})
    monkeypatch.setattr(sys, "stdin", io.StringIO("hello\nand then?\n"))
    assert main(["chat"]) == 0
    assert [request.text for request in scheduler.requests] == ["hello|", f"hello|{STORY}</s>and then?|"]
    capsys.readouterr()


def test_chat_without_a_template_continues_the_text(
    scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once\n And\n"))
    assert main(["chat"]) == 0
    assert [request.text for request in scheduler.requests] == ["Once", f"Once{STORY} And"]
    assert "no chat template" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("max_tokens", "reason", "is_full"),
    [
        (12, pb.FINISH_REASON_LENGTH, True),
        (12, pb.FINISH_REASON_STOP, False),
        (13, pb.FINISH_REASON_LENGTH, False),
        (1, pb.FINISH_REASON_LENGTH, True),
        (0, pb.FINISH_REASON_LENGTH, False),  # unknown, because no worker has connected
    ],
)
def test_chat_says_that_an_answer_was_cut_off_where_the_context_ends(
    scheduler: ScriptedScheduler,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    max_tokens: int,
    reason: pb.FinishReason,
    is_full: bool,
) -> None:
    last = delta(0, 0, [1] * 5, STORY, last=True)  # 12 tokens including the prompt
    last.finish_reason = reason
    scheduler.info.max_sequence_tokens = max_tokens
    scheduler.script = lambda request, context: iter([last])
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\n"))
    assert main(["chat"]) == 0
    assert ("(the context is full, 12 tokens: the answer was cut off)" in capsys.readouterr().err) == is_full


def test_chat_goes_on_after_a_failed_answer(
    scheduler: ScriptedScheduler, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refuse_first(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if len(scheduler.requests) == 1:
            scripted_scheduler.abort(context, grpc.StatusCode.RESOURCE_EXHAUSTED, "4096 requests wait already")
        yield from scripted_scheduler.tell_story(request, context)

    scheduler.script = refuse_first
    monkeypatch.setattr(sys, "stdin", io.StringIO("one\ntwo\n"))
    assert main(["chat"]) == 0
    captured = capsys.readouterr()
    assert captured.out == STORY + "\n"
    assert "error: 4096 requests wait already" in captured.err
    assert [request.text for request in scheduler.requests] == ["one", "two"]


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception('roles must alternate') }}",
        "{% if %}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
    ],
)
def test_templates_run_in_a_sandbox_and_fail_clearly(template: str) -> None:
    with pytest.raises(CommandError, match="chat template fails"):
        Conversation(template, None).ask("hello")


def test_names_that_templates_rely_on() -> None:
    template = "{% for m in messages %}{{ m | tojson }}{% break %}{% endfor %}{{ strftime_now('%Y') | length }}"
    assert Conversation(template, None).ask("é") == '{"role": "user", "content": "é"}4'


def test_the_package_runs_from_anywhere(tmp_path: Path) -> None:
    environ = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    command = [sys.executable, "-m", "pagewire", "complete", "--json", "Once"]
    printed = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=True)
    assert json.loads(printed.stdout)["outputs"][0]["text"] == STORY


@pytest.mark.parametrize(("name", "arguments"), [("json", ["complete", "a"]), ("token", ["--version"])])
def test_a_file_that_hides_a_module_of_pythons_own_is_named(tmp_path: Path, name: str, arguments: list[str]) -> None:
    (tmp_path / f"{name}.py").touch()
    environ = os.environ | {"PYTHONPATH": f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}"}
    program = [sys.executable, "-P", "-m", "pagewire", *arguments]
    done = subprocess.run(program, env=environ, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1
    assert done.stderr == (
        f"pagewire: error: {tmp_path / name}.py hides a module of Python's own: "
        "rename it, or take its folder off PYTHONPATH\n"
    )


def test_output_encoding_errors_are_not_input_errors(monkeypatch: pytest.MonkeyPatch) -> None:
    unwritten = io.TextIOWrapper(io.BufferedWriter(io.FileIO(os.open("/dev/full", os.O_WRONLY), "w")))
    monkeypatch.setattr(sys, "stdout", unwritten)
    unwritten.write("an answer")
    with pytest.raises(OSError, match="No space left"):
        read_input(input)
    with pytest.raises(OSError, match="No space left"):
        unwritten.close()
