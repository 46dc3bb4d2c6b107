"""Writes the terminal captures in the pages: the output of commands with the bundled model, on this machine's CPU.

Run `make docs` or `python -m docs.captures`. The texts of the model are the same on every run, but figures, processes
and epochs are not. So a capture is replaced only if its wording differs from the page. `--all` replaces every capture,
and needs a machine that does nothing else.
"""

import argparse
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path

from docs.reference import ROOT, with_part
from pagewire.hosting.supervisor import free_port
from testing.services import ENVIRON, HOST
from testing.terminal import Terminal

PAGEWIRE = (sys.executable, "-m", "pagewire")
COLUMNS, ROWS = 80, 24
START_S = 120.0
NUM_ROWS, NUM_REQUESTS = 4, 6  # of the watched server
LONG = ("--seed", "1", "--max-tokens", "1900", "--ignore-eos")


@dataclass(frozen=True, slots=True)
class Server:
    """A running `pagewire serve models/storyteller`."""

    environ: Mapping[str, str]  # for its clients
    log: Path

    def logged(self, pattern: str, count: int = 1) -> list[str]:
        """Return the log lines with a pattern, without their times and modules, as soon as there are `count`."""
        deadline = time.monotonic() + START_S
        while True:
            lines = [line for line in self.log.read_text().splitlines() if re.search(pattern, line)]
            if len(lines) >= count:
                return [re.sub(r"^\S+ \S+ (\w+) \S+: ", r"\1 ", line) for line in lines]
            if time.monotonic() > deadline:
                raise TimeoutError(f"no {pattern!r} in the log:\n{self.log.read_text()}")
            time.sleep(0.1)

    def start(self, *arguments: str) -> "subprocess.Popen[str]":
        """Start a client."""
        command = [*PAGEWIRE, *arguments]
        return subprocess.Popen(
            command, env=self.environ, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT
        )

    def terminal(self, *arguments: str) -> Terminal:
        """Start a client on a terminal without colours."""
        return Terminal([*PAGEWIRE, *arguments], columns=COLUMNS, rows=ROWS, environ={**self.environ, "NO_COLOR": "1"})


@contextmanager
def served(*flags: str) -> Iterator[Server]:
    port, http_port = free_port(HOST), free_port(HOST)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        log = Path(folder) / "log"
        command = [*PAGEWIRE, "serve", "models/storyteller", f"--port={port}", f"--http-port={http_port}"]
        file = stack.enter_context(log.open("w"))
        process = subprocess.Popen(
            [*command, "--metrics-port=0", *flags], env=ENVIRON, stderr=file, stdout=file, cwd=ROOT
        )
        stack.callback(process.wait)
        stack.callback(process.terminate)
        # The client's history of typed lines goes to the folder, too.
        server = Server({**ENVIRON, "PAGEWIRE_URL": f"{HOST}:{port}", "XDG_STATE_HOME": folder}, log)
        server.logged("ready on", 2)
        yield server


def lost_worker() -> str:
    """Return the capture of a request whose worker is killed."""
    complete = ("complete", *LONG, "Once upon a time")
    with served() as server:
        calm, calm_figures = server.start(*complete).communicate()
        (first,) = server.logged("the worker is process")
        process = first.split()[-1]
        client = server.start(*complete)
        assert client.stdout is not None
        assert client.stderr is not None
        beginning = client.stdout.read(200)
        os.kill(int(process), signal.SIGKILL)
        rest, killed_figures = client.stdout.read(), client.stderr.read()
        client.wait()
        lost = server.logged("lost the worker")[0].split(" (")[0]
        started = server.logged("the worker is process", 2)[-1]
    assert calm == beginning + rest, "the text of the interrupted request differs"
    command = 'pagewire complete --seed 1 --max-tokens 1900 --ignore-eos "Once upon a time"'
    lines = [
        "$ pagewire serve models/storyteller &",
        "ready on grpc://127.0.0.1:50051",
        "ready on http://127.0.0.1:8000",
    ]
    lines += [f"$ {command} > calm.txt", calm_figures.strip(), f"$ {command} > killed.txt &", f"$ kill -9 {process}"]
    lines += [lost, started, killed_figures.strip(), "$ cmp calm.txt killed.txt && echo the same text", "the same text"]
    return block("console", lines)


def watch() -> str:
    """Return the capture of `pagewire status --watch` while requests run and wait."""
    with served(f"--max-num-seqs={NUM_ROWS}", "--kv-cache-memory=8MiB") as server:
        server.start("complete", *LONG, "Once").communicate()  # the latencies of the view
        clients = [
            server.start("complete", *LONG, "--request-id", f"story-{index}", f"Story {index}")
            for index in range(NUM_REQUESTS)
        ]
        with server.terminal("status", "--watch") as terminal:
            lines = terminal.wait_for(lambda lines: sum(line.count(" story-") for line in lines) == NUM_ROWS)
        for client in clients:
            client.kill()
            client.communicate()
    return block("text", lines)


def chat() -> str:
    """Return the capture of a chat with one answer."""
    with (
        served() as server,
        server.terminal("chat", "--temperature", "0", "--max-tokens", "60") as terminal,
    ):
        terminal.wait_for(lambda lines: ">" in lines)
        terminal.type("Tell me a story about a fox.\r")
        lines = terminal.wait_for(
            lambda lines: lines.count(">") == 1 and sum(line.startswith("> ") for line in lines) == 1
        )
    shown = "\n".join(lines).rstrip().removesuffix("\n>").split("\n")
    return block("text", ["$ pagewire chat --temperature 0 --max-tokens 60", *shown])


def block(language: str, lines: list[str]) -> str:
    return "\n".join([f"```{language}", *(line.rstrip() for line in lines), "```"])


# The page, the name of the part, and the function that makes the part.
CAPTURES: tuple[tuple[str, str, Callable[[], str]], ...] = (
    ("README.md", "capture of a lost worker", lost_worker),
    ("docs/serving.md", "capture of status --watch", watch),
    ("docs/quickstart.md", "capture of a chat", chat),
)


def part_of(text: str, name: str) -> str:
    """Return the part of a page between its markers. Raise ValueError if there is no such part."""
    found = re.search(rf"<!-- {name} -->\n\n(.*?)\n\n<!-- end of {name} -->", text, re.DOTALL)
    if found is None:
        raise ValueError(f"the page has no place for {name}")
    return found[1]


def wording(part: str) -> list[str]:
    """Return the words of a capture that do not change from run to run: words without digits, and not the lines of a
    map of blocks, which have no spaces."""
    words = [word for line in part.splitlines() if " " in line for word in line.split()]
    return [word for word in words if re.fullmatch(r"[A-Za-z-]{2,}[^\w\s]*", word)]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m docs.captures", description="Write the terminal captures.")
    parser.add_argument("--all", action="store_true", help="replace also captures whose wording is unchanged")
    replaces_all = parser.parse_args().all
    for name, title, make in CAPTURES:
        page = ROOT / name
        text = page.read_text(encoding="utf-8")
        part = make()
        if replaces_all or wording(part) != wording(part_of(text, title)):
            page.write_text(with_part(text, title, part), encoding="utf-8")
        print(f"{page}: {title}")


if __name__ == "__main__":
    main()
