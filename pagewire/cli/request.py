"""The request verbs: `pagewire complete`, and `submit`, `attach` and `result` for detached requests."""

import argparse
import contextlib
import os
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from typing import Any, TextIO

from pagewire.cli import client_flags, connection
from pagewire.cli.chat_terminal import read_input
from pagewire.cli.command import tell
from pagewire.cli.word_wrap import WordWrap
from pagewire.client.client import Client
from pagewire.client.completion import Completion, CompletionBuilder, CompletionOutput, Output, Result
from pagewire.client.conversation import Session
from pagewire.client.errors import PagewireError
from pagewire.client.sampling_params import SamplingParams
from pagewire.common.strict_json import to_json
from pagewire.options import Parser


def complete(arguments: Sequence[str]) -> int:
    """Run the command `pagewire complete`. It prints a completion as it is generated, and the statistics on standard
    error. Return the exit code."""
    parser = Parser(
        prog="pagewire complete",
        usage="pagewire complete TEXT [flags]",
        description="Complete a text: it is streamed to standard output, statistics to standard error.",
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of the text")
    group = add_request_flags(parser)
    group.add_argument(
        "--timeout",
        type=client_flags.positive,
        metavar="SECONDS",
        help="give up after this time, including the time in the queue",
    )
    parsed = parser.parse_args(arguments)
    request = request_arguments(parser, parsed) | {"timeout": parsed.timeout}
    with connection.client(parser, parsed, Client) as client:
        if parsed.json:
            print(to_json(describe(client.complete(**request))), flush=True)
        else:
            printer = SamplePrinter(request["sampling"].n or 1, sys.stdout)
            tell(statistics(stream(client, printer=printer, **request)))
    return 0


def add_request_flags(parser: Parser) -> argparse._ArgumentGroup:
    """Add the flags that describe a request to a parser: the prompt, the sampling parameters and the request's options.

    Return the argument group of the options.
    """
    parser.add_argument("text", nargs="?", help="the prompt, or - to read it from standard input")
    parser.add_argument(
        "--prompt-token-ids",
        metavar="IDS",
        type=client_flags.token_ids,
        help="the prompt as token ids, such as 1,2,3",
    )
    connection.add_flags(parser)
    client_flags.add_flags(parser)
    client_flags.add_sample_flags(parser)
    group = parser.add_argument_group("request")
    group.add_argument("--request-id", metavar="ID", help="id of the request (default: the server chooses one)")
    group.add_argument(
        "--priority", type=int, default=0, metavar="INT", help="requests with lower numbers run first (default: 0)"
    )
    group.add_argument("--tenant", default="", help="tenant that the request belongs to")
    group.add_argument(
        "--cache-salt", default="", metavar="SALT", help="share cached prefixes only with requests of the same salt"
    )
    group.add_argument("--session", default="", metavar="ID", help="conversation that the request is part of")
    group.add_argument(
        "--will-return",
        action=argparse.BooleanOptionalAction,
        help="whether the conversation goes on: another request will begin with this prompt and its output",
    )
    group.add_argument(
        "--retention-seconds", type=int, metavar="INT", help="how long the request's cached prefix is worth keeping"
    )
    return group


def request_arguments(parser: Parser, parsed: argparse.Namespace) -> dict[str, Any]:
    """Convert the parsed command line flags to keyword arguments for `Client` methods such as `stream`."""
    if (parsed.text is None) == (parsed.prompt_token_ids is None):
        parser.error("give either a text (or - for standard input) or --prompt-token-ids")
    text = read_input(sys.stdin.read) if parsed.text == "-" else parsed.text
    names = ("prompt_token_ids", "request_id", "priority", "cache_salt", "tenant")
    request = {name: getattr(parsed, name) for name in names}
    session = Session(parsed.session, parsed.will_return, parsed.retention_seconds)
    return request | {"prompt": text, "sampling": client_flags.sampling(parsed), "session": session}


def stream(
    client: Client, prompt: str | None, sampling: SamplingParams, printer: "SamplePrinter", **request: Any
) -> Completion:
    """Send a request to the server, print its output as it arrives, and return the complete output. Ctrl-C aborts the
    request."""
    builder = CompletionBuilder(sampling.n or 1, time.monotonic())
    with printer.errors_apart(), contextlib.closing(client.stream(prompt, sampling, **request)) as outputs:
        for output in outputs:
            builder.add(output, time.monotonic())
            printer.add(output)
    return builder.finish(time.monotonic())


class SamplePrinter:
    """Writes the samples of a request to a file one after another, with labels if there are several.

    The current sample is written as it arrives. The output of later samples is buffered until the current sample has
    ended. On a terminal, text is wrapped at words.
    """

    def __init__(self, num_samples: int, file: TextIO) -> None:
        self._file = file
        self._labelled = num_samples > 1
        self._waiting: list[list[Output]] = [[] for _ in range(num_samples)]
        self._current = 0
        self._texts: list[str] = []
        self.in_line = False  # whether the last written line has not ended
        can_wrap = file.isatty() and os.environ.get("TERM", "dumb") != "dumb"
        self._wrap = WordWrap(file.fileno()).wrap if can_wrap else str
        self._label()

    @property
    def text(self) -> str:
        """The text of all samples written so far, without labels and without the line breaks after samples."""
        return "".join(self._texts)

    def add(self, output: Output) -> None:
        self._waiting[output.index].append(output)
        while self._current < len(self._waiting) and self._write_current():
            self._current += 1
            self._label()

    @contextlib.contextmanager
    def errors_apart(self) -> Iterator[None]:
        """End the current output line if a `with` block raises a PagewireError, so that the error message begins a new
        line."""
        try:
            yield
        except PagewireError:
            self._write("\n" * self.in_line)
            raise

    def _write_current(self) -> bool:
        """Write the output that has arrived for the current sample. Return whether the sample has ended."""
        deltas, self._waiting[self._current] = self._waiting[self._current], []
        ended = any(delta.finish_reason is not None for delta in deltas)
        text = "".join(delta.text for delta in deltas)
        self._texts.append(text)
        self._write(text + "\n" * ended)
        return ended

    def _label(self) -> None:
        if self._labelled and self._current < len(self._waiting):
            self._write(f"--- sample {self._current} ---\n")

    def _write(self, text: str) -> None:
        self.in_line = not text.endswith("\n") if text else self.in_line
        print(self._wrap(text), end="", file=self._file, flush=True)


def statistics(completion: Completion) -> str:
    """Describe the timing and the token counts of a completion in one line of text. The rate is the number of output
    tokens divided by the total request time."""
    usage = completion.usage
    ttft = "no token" if completion.ttft_s is None else f"time to first token {completion.ttft_s * 1e3:.1f} ms"
    rate = usage.completion_tokens / completion.total_s
    return (
        f"{ttft}, {rate:.1f} tokens/s, {usage.prompt_tokens} prompt tokens, {usage.cached_tokens} cached tokens, "
        f"{usage.completion_tokens} completion tokens, {completion.total_s:.3f} s"
    )


def describe(completion: Completion) -> dict[str, Any]:
    """Return the JSON object that the flag `--json` prints for a completion.

    Log-probabilities are included if they were requested. `cumulative_logprob` is included for beam search hypotheses
    too.
    """
    described: dict[str, Any] = {
        **asdict(completion.usage),
        "ttft_s": completion.ttft_s,
        "total_s": completion.total_s,
        "outputs": [_describe_output(output) for output in completion.outputs],
    }
    if completion.prompt_logprobs is not None:
        described["prompt_logprobs"] = [asdict(entry) for entry in completion.prompt_logprobs]
    return described


def _describe_output(output: CompletionOutput) -> dict[str, Any]:
    described: dict[str, Any] = {
        name: getattr(output, name) for name in ("index", "token_ids", "text", "finish_reason")
    }
    if output.logprobs is not None:
        described["logprobs"] = [asdict(entry) for entry in output.logprobs]
    if output.cumulative_logprob is not None:
        described["cumulative_logprob"] = output.cumulative_logprob
    return described


def submit(arguments: Sequence[str]) -> int:
    """Run the command `pagewire submit`. It queues a detached request, which runs on the server independently of this
    process, and prints the request's id. Return the exit code."""
    parser = Parser(
        prog="pagewire submit",
        usage="pagewire submit TEXT [flags]",
        description="Queue a request that runs without a connection, and print its id (see attach and result).",
    )
    add_request_flags(parser)
    parsed = parser.parse_args(arguments)
    request = request_arguments(parser, parsed)
    with connection.client(parser, parsed, Client) as client:
        print(client.submit(**request), flush=True)
    return 0


def attach(arguments: Sequence[str]) -> int:
    """Run the command `pagewire attach`. It streams the output of a detached request, which was queued by `pagewire
    submit` and runs on the server. Return the exit code."""
    parser = _submitted_parser(
        "attach",
        "Stream the output of a submitted request. Ctrl-C leaves it running. A broken connection is retried.",
    )
    parser.add_argument(
        "--from-token", type=int, default=0, metavar="INT", help="start at this token of the output (default: 0)"
    )
    parsed = parser.parse_args(arguments)
    if parsed.from_token < 0:
        parser.error(f"--from-token is {parsed.from_token}, but must be at least 0")
    with connection.client(parser, parsed, Client) as client:
        printer = SamplePrinter(len(client.result(parsed.request_id, tenant=parsed.tenant).outputs), sys.stdout)
        with (
            printer.errors_apart(),
            contextlib.closing(
                client.attach(parsed.request_id, tenant=parsed.tenant, from_token=parsed.from_token)
            ) as outputs,
        ):
            for output in outputs:
                printer.add(output)
    return 0


def result(arguments: Sequence[str]) -> int:
    """Run the command `pagewire result`. It prints the state of a detached request, which was queued by `pagewire
    submit`, and the output so far. Return the exit code."""
    parser = _submitted_parser("result", "Show the state of a submitted request and its output so far.")
    parser.add_argument("--json", action="store_true", help="print a JSON object instead of the text")
    parsed = parser.parse_args(arguments)
    with connection.client(parser, parsed, Client) as client:
        found = client.result(parsed.request_id, tenant=parsed.tenant)
    if parsed.json:
        print(to_json(describe_result(found)), flush=True)
    else:
        for output in found.outputs:
            if len(found.outputs) > 1:
                print(f"--- sample {output.index} ---")
            print(output.text, flush=True)
        num_tokens = sum(len(output.token_ids) for output in found.outputs)
        tell(f"{found.state}, {num_tokens} completion tokens")
    if found.error is not None:
        raise found.error
    return 0


def describe_result(found: Result) -> dict[str, Any]:
    """Return the JSON object that the flag `--json` prints for the state and output of a detached request."""
    described = asdict(found)
    for output in described["outputs"]:
        del output["request_id"], output["first_token"]
    if found.error is not None:
        described["error"] = {"code": found.error.code.name, "message": str(found.error)}
    return described


def _submitted_parser(verb: str, description: str) -> Parser:
    parser = Parser(prog=f"pagewire {verb}", description=description)
    parser.add_argument("request_id", metavar="ID", help="the id that `pagewire submit` printed")
    parser.add_argument("--tenant", default="", help="tenant that the request belongs to")
    connection.add_flags(parser)
    return parser
