"""The dispatch of `pagewire` verbs. The module of a verb is imported only when the verb runs."""

import contextlib
import errno
import importlib
import io
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TextIO

from pagewire.common import __version__
from pagewire.common.process.limits import describe_address_space, obstacle, raise_descriptor_limit


@dataclass(frozen=True, slots=True)
class Verb:
    """A subcommand of `pagewire`, such as `serve`: its module and function, its line of help, and the extra of
    pyproject.toml that it needs."""

    module: str
    function: str
    help: str
    extra: str = ""


_SERVICES = "pagewire.cli.services"
_REQUEST = "pagewire.cli.request"
VERBS = {
    "serve": Verb(_SERVICES, "serve", "serve a model: a scheduler and its worker on this machine", "serve"),
    "run": Verb("pagewire.cli.chat", "run", "serve a model and chat with it, or answer one prompt", "serve"),
    "worker": Verb(_SERVICES, "worker", "run only a worker, for a scheduler elsewhere", "worker"),
    "scheduler": Verb(_SERVICES, "scheduler", "run only a scheduler, for a worker elsewhere", "scheduler"),
    "frontend": Verb(
        _SERVICES, "frontend", "run only a front end (tokenizing, streaming), for a scheduler elsewhere", "scheduler"
    ),
    "complete": Verb(_REQUEST, "complete", "complete a text"),
    "chat": Verb("pagewire.cli.chat", "main", "chat with the model that a server has"),
    "submit": Verb(_REQUEST, "submit", "queue a request that runs without a connection, and print its id"),
    "attach": Verb(_REQUEST, "attach", "stream the output of a submitted request, from any token on"),
    "result": Verb(_REQUEST, "result", "show the output of a submitted request so far"),
    "status": Verb("pagewire.cli.status", "main", "show what a server is doing"),
    "bench": Verb("pagewire.cli.command", "bench", "measure throughput or latency", "bench"),
    "replay": Verb("pagewire.cli.replay", "main", "run a recording of a scheduler again and check it"),
    "simulate": Verb(
        "pagewire.cli.simulate", "main", "simulate the scheduler with a trace of requests, and compare policies"
    ),
    "calibrate": Verb("pagewire.cli.calibrate", "main", "measure with a text how to quantise a model to int4", "serve"),
    "completion": Verb(
        "pagewire.cli.shell_completion", "completion", "print a script that lets a shell complete verbs and flags"
    ),
}
BENCHES = {
    "throughput": Verb("pagewire.bench.throughput", "main", "many requests at once: tokens per second"),
    "latency": Verb("pagewire.bench.latency", "main", "one batch at a time: its latency, and the parts of it"),
}
SUCCESS, FAILURE, USAGE, INTERRUPTED = 0, 1, 2, 130
# For gRPC 1.85: the polling thread itself reads and writes, instead of a thread pool that passes every message on.
GRPC_EXPERIMENTS = "-event_engine_client,-event_engine_listener"
# gRPC's core would write a line to standard error for each failed handshake. If standard error is not read, its threads
# would block there. gRPC reports the errors that matter to Python as well.
GRPC_VERBOSITY = "NONE"


def main(argv: Sequence[str] | None = None) -> int:
    """Run the `pagewire` command and return the exit code: 0 for success, 1 for an error, 2 for wrong usage, or 130 for
    Ctrl-C."""
    arguments = sys.argv[1:] if argv is None else list(argv)
    # Invalid UTF-8 input is refused later, when a text is checked. Model output may contain any character. Characters
    # that a terminal's encoding lacks are escaped, as on standard error.
    for stream, errors in ((sys.stdin, "surrogateescape"), (sys.stdout, "backslashreplace")):
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors=errors)
    try:
        code = dispatch("pagewire", VERBS, arguments, run)
        sys.stdout.flush()
        return code
    except OSError as error:
        # These errors come from writing to standard output. Errors of standard input and standard error are handled
        # elsewhere.
        if error.errno not in (errno.EBADF, errno.EPIPE, errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO):
            raise
        _redirect_to_null(sys.stdout)
        if not isinstance(error, BrokenPipeError):  # the reader closed the pipe on purpose
            tell(f"pagewire: error: cannot write the output: {error.strerror}")
        return FAILURE


def tell(text: str) -> None:
    """Write a message to standard error, since standard output is for results. Ignore write errors."""
    try:
        print(f"{text}\n", end="", file=sys.stderr, flush=True)  # one write, even with PYTHONUNBUFFERED
    except OSError:
        _redirect_to_null(sys.stderr)


def _redirect_to_null(stream: TextIO) -> None:
    """Redirect an output stream to the null device after a write to the stream has failed. Flushing the stream's buffer
    at exit then does not fail again."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def bench(arguments: Sequence[str]) -> int:
    """Run the command `pagewire bench NAME`: the benchmark that the first argument names. Return the exit code."""
    return dispatch("pagewire bench", BENCHES, arguments, lambda verb, rest: load(verb)(rest))


def dispatch(
    program: str, verbs: Mapping[str, Verb], arguments: Sequence[str], perform: Callable[[Verb, Sequence[str]], int]
) -> int:
    """Run the subcommand that the first argument names, or print the list of subcommands. Return the exit code."""
    if arguments[:1] == ["help"]:
        arguments = [*arguments[1:], "--help"]
    if not arguments or arguments[0] in ("-h", "--help"):
        write: Callable[[str], None] = print if arguments else tell
        write(usage(program, verbs))
        return SUCCESS if arguments else USAGE
    name, *rest = arguments
    if name in ("-V", "--version"):
        from pagewire.installation import commit

        known = commit()
        print(f"pagewire {__version__}{known and f' (commit {known})'}")
        return SUCCESS
    if name not in verbs:
        from pagewire.compatibility import FOREIGN_VERBS, suggestion

        if instead := FOREIGN_VERBS.get(f"{program} {name}"):
            tell(f"{program}: error: there is no {program} {name}: {instead}")
            return USAGE
        near = suggestion(name, (*verbs, "--help", "--version"))
        tell(f"{usage(program, verbs)}\n\n{program}: error: unknown verb {name!r}{near}")
        return USAGE
    return perform(verbs[name], rest)


def run(verb: Verb, arguments: Sequence[str]) -> int:
    """Run one subcommand and return the exit code. An exception is printed as one line on standard error."""
    # gRPC reads these variables when it is imported.
    os.environ.setdefault("GRPC_EXPERIMENTS", GRPC_EXPERIMENTS)
    os.environ.setdefault("GRPC_VERBOSITY", GRPC_VERBOSITY)
    if verb.module == _SERVICES:
        raise_descriptor_limit()
    try:
        return _run(verb, arguments)
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else FAILURE
    except KeyboardInterrupt:
        tell("")
        return INTERRUPTED
    except MemoryError as error:
        if not (limit := describe_address_space()):
            raise
        tell(f"pagewire: error: out of memory{f': {error}' if str(error) else ''}{limit}")
        return FAILURE
    except Exception as error:
        from pagewire.common.process.child_process import EXIT_REFUSED, announce_refusal, is_child
        from pagewire.installation import advice

        line = advice(error, verb.extra)
        if line is None:
            raise
        is_service = verb.module == _SERVICES
        if is_service and is_child():
            announce_refusal(line)
        else:
            tell(f"pagewire: error: {line}")
        return EXIT_REFUSED if is_service else FAILURE


def _run(verb: Verb, arguments: Sequence[str]) -> int:
    from pagewire.client.errors import CommandError, PagewireError
    from pagewire.hosting.printable import printable_lines

    try:
        function = load(verb)
        is_help_only = verb.function == "completion" or not {"-h", "--help"}.isdisjoint(arguments)
        if not is_help_only and (reason := obstacle(loads_libraries=verb.module == _SERVICES)):
            raise CommandError(reason)
        with _interrupts(verb):
            return function(arguments)
    except PagewireError as error:
        tell(f"pagewire: error: {error.code.name}: {printable_lines(str(error))}")
    except CommandError as error:
        tell(f"pagewire: error: {printable_lines(str(error))}")
    return FAILURE


@contextlib.contextmanager
def _interrupts(verb: Verb) -> Iterator[None]:
    """Let Ctrl-C raise KeyboardInterrupt in the client command that runs inside the `with` block, so that the client
    can clean up.

    The function changes nothing if the process does not belong to the command (see `pagewire.__main__`). Service
    commands, such as `serve`, finish running requests on Ctrl-C instead, as soon as their event loop handles the
    signal. Before this point they hold no resources, so Ctrl-C may end the process at once.
    """
    if signal.getsignal(signal.SIGINT) is not signal.SIG_DFL:
        yield
        return
    if verb.module != _SERVICES:
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        # An event loop restores Python's default handler, which would print a traceback during interpreter shutdown.
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def load(verb: Verb) -> Callable[[Sequence[str]], int]:
    function: Callable[[Sequence[str]], int] = getattr(importlib.import_module(verb.module), verb.function)
    return function


def usage(program: str, verbs: Mapping[str, Verb]) -> str:
    width = max(map(len, verbs))
    lines = [f"  {name:<{width}}  {verb.help}" for name, verb in verbs.items()]
    return "\n".join([f"usage: {program} VERB ... (see {program} VERB --help)", "", *lines])
