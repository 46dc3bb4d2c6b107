"""A trial of each grammar in a separate process with limits on CPU time and memory.

The library counts its work in most places, but not in all. Some grammars make it compute for minutes or allocate
gigabytes before it counts. A service that accepts grammars from strangers therefore tries each one here first. A parent
process loads the tokenizer and forks a child for each trial. The operating system ends a child that exceeds its limits
of CPU time and memory.
"""

import json
import os
import random
import resource
import signal
import subprocess
import sys
import time
from ctypes import addressof, create_string_buffer
from pathlib import Path
from typing import IO

from pagewire.common.grammars.matcher import (
    GrammarCompiler,
    GrammarDeadEndError,
    GrammarError,
    GrammarLimitError,
    Matcher,
)
from pagewire.common.process.child_process import python_command

MAX_CPU_SECONDS = 0.1
MAX_BYTES = 64 * 1024 * 1024
MAX_MASK_SECONDS = 0.005  # the limit on the mean time of a mask
TOO_MUCH = (
    f"it takes more than {MAX_CPU_SECONDS * 1000:.0f} ms of CPU time or {MAX_BYTES // 1024**2} MiB of memory to read; "
    "make it simpler"
)
_LONG_MASKS = (
    f"its token masks take {{:.1f}} ms of CPU time per token, but the limit is {1000 * MAX_MASK_SECONDS:.0f} ms; "
    "make it simpler"
)
_MAX_WALK_TOKENS, _WALK_SECONDS = 64, 0.03
_MAX_ERROR_CHARS = 4096
_MAX_ANSWER_CHARS = 16 * _MAX_ERROR_CHARS  # in JSON
_ENDED = "the process that reads grammars has ended"
_NICENESS = 10
_COPY_SECONDS = 0.015  # the share of the CPU time limit that is reserved for the fork and the exit of a child


class Trials:
    """A client of a separate process that tests whether grammars can be used within limits of CPU time and memory. The
    methods block. Only one thread may call them at a time, except `close`.
    """

    def __init__(self, tokenizer_json: str, vocab_size: int, end_token_ids: tuple[int, ...]) -> None:
        """Start the process that tests grammars, and wait until it has loaded the tokenizer. Raises GrammarError if the
        process cannot read the tokenizer.
        """
        self._first = {"tokenizer": tokenizer_json, "vocab_size": vocab_size, "end_token_ids": end_token_ids}
        self._process: subprocess.Popen[str] | None = None
        self._is_closed = False
        self._start()

    def run(self, kind: str, text: str, end_token_ids: tuple[int, ...]) -> str:
        """Test a grammar in the separate process. Return the reason why the grammar cannot be used, as reported by the
        grammar library, or an empty text.

        If the process ends, it is restarted once. Raises GrammarError if the new process ends too.
        """
        for _ in range(2):
            if self._process is None:
                self._start()
            answer = self._ask({"kind": kind, "text": text, "end_token_ids": end_token_ids})
            if answer is not None:
                return answer
        raise GrammarError(_ENDED)

    def close(self) -> None:
        """End the process that tests grammars, and prevent a restart. Any thread may call this method."""
        self._is_closed = True
        if self._process is not None:
            self._process.kill()
            self._process.wait()

    def _start(self) -> None:
        if self._is_closed:
            raise GrammarError(_ENDED)
        command, pipe = python_command("pagewire.common.grammars.trial"), subprocess.PIPE
        # A group of its own, so that a terminal's Ctrl-C reaches only the service. This process ends when its input
        # ends.
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, text=True, encoding="utf-8", process_group=0)
        if error := self._ask(self._first):
            self.close()
            raise GrammarError(error)

    def _ask(self, question: dict[str, object]) -> str | None:
        """Send one question to the process that tests grammars. Return the answer, or None if the process has ended."""
        process = self._process
        if process is None:  # it ended while it read the tokenizer
            return None
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            process.stdin.write(json.dumps(question) + "\n")
            process.stdin.flush()
            answer = json.loads(process.stdout.readline(_MAX_ANSWER_CHARS))
        except (OSError, ValueError):
            answer = None
        if isinstance(answer, str):
            return answer
        process.kill()
        process.communicate()
        self._process = None
        return None


def _serve(questions: IO[str], answers: IO[str]) -> None:
    """Run the main loop of the separate process: test grammars until the input ends.

    The first line of `questions` has the tokenizer, and each further line has a grammar. Each line gets an answer of
    one line: an error message, or an empty text. A forked child process tests each grammar.
    """
    first = json.loads(questions.readline())
    ends = tuple(first["end_token_ids"])
    try:
        compiler = GrammarCompiler(first["tokenizer"], first["vocab_size"])
        compiler.compile("json_object", "", ends)
    except Exception as error:  # a broken tokenizer can raise any exception in the library
        _answer(answers, str(error) or type(error).__name__)
        return
    _answer(answers, "")
    for line in questions:
        child = os.fork()
        if child == 0:
            _limit()
            _answer(answers, _try(compiler, first["vocab_size"], **json.loads(line)))
            os._exit(0)
        _, status = os.waitpid(child, 0)
        if status:
            _answer(answers, TOO_MUCH)


def _limit() -> None:
    """Limit the CPU time of this process, and on Linux also its memory. The operating system ends the process when it
    exceeds the CPU time.
    """
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_SECONDS - _COPY_SECONDS)
    if sys.platform == "linux":
        size = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
        resource.setrlimit(resource.RLIMIT_AS, (size + MAX_BYTES, size + MAX_BYTES))
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def _try(compiler: GrammarCompiler, vocab_size: int, kind: str, text: str, end_token_ids: list[int]) -> str:
    """Compile a grammar and compute the token masks along one random output. Return the reason why the grammar cannot
    be used, or an empty text.
    """
    try:
        return _RandomOutput(compiler.compile(kind, text, tuple(end_token_ids)), vocab_size).find_fault(text)
    except GrammarError as error:
        return str(error).strip() or "it cannot be read"
    except MemoryError:
        return TOO_MUCH


class _RandomOutput:
    """A random output with which a grammar is tested. The token masks after each of its tokens are computed, to find
    grammars with slow masks. The output mostly repeats a token, and sometimes draws a new one at random.
    """

    def __init__(self, matcher: Matcher, vocab_size: int) -> None:
        self._matcher = matcher
        self._start = matcher.copy()
        self._token_ids: list[int] = []
        self._mask = create_string_buffer(4 * -(-vocab_size // 32))

    def find_fault(self, seed: str) -> str:
        """Compute the token masks of a grammar along a random output. Return the reason why the grammar needs too much
        work, or an empty text.

        `seed` determines the tokens, so every process gets the same result, unless slow masks end the test early.
        Raises GrammarDeadEndError if no token is allowed, and GrammarError for other errors of the grammar library.
        """
        rng, token_id = random.Random(seed), -1
        began = time.process_time()
        until = min(began + _WALK_SECONDS, MAX_CPU_SECONDS - 2 * _COPY_SECONDS)
        self._fill()
        for num_tokens in range(1, _MAX_WALK_TOKENS + 1):
            if token_id < 0 or not self._mask.raw[token_id // 8] >> token_id % 8 & 1 or rng.random() < 0.25:
                token_id = self._draw(rng)
            try:
                self._matcher.consume((token_id,))
                if self._matcher.end_token_id is not None:
                    return ""
                self._token_ids.append(token_id)
                self._fill()
            except GrammarLimitError as error:
                return f"after {num_tokens} tokens of an output: {error}"
            now = time.process_time()
            if now > until:
                mean = (now - began) / num_tokens
                return _LONG_MASKS.format(1000 * mean) if mean > MAX_MASK_SECONDS else ""
        return ""

    def _fill(self) -> None:
        try:
            self._matcher.fill_mask(addressof(self._mask), len(self._mask))
        except GrammarDeadEndError as error:
            self._start.consume(self._token_ids)
            forced = self._start.forced_text()
            where = f"after {len(self._token_ids)} tokens of an output: " if self._token_ids else ""
            raise GrammarDeadEndError(f"{where}{error}" + (f", {forced[:80]!r}" if forced else "")) from None

    def _draw(self, rng: random.Random) -> int:
        """Return a random token that the current token mask allows. At least one token must be allowed."""
        mask = self._mask.raw
        start = rng.randrange(len(mask))
        rest = mask[start:].lstrip(b"\0") or mask.lstrip(b"\0")  # from the next byte with an allowed token
        bits = [bit for bit in range(8) if rest[0] >> bit & 1]
        return 8 * (len(mask) - len(rest)) + rng.choice(bits)


def _answer(answers: IO[str], error: str) -> None:
    answers.write(json.dumps(error[:_MAX_ERROR_CHARS]) + "\n")
    answers.flush()


if __name__ == "__main__":
    os.nice(_NICENESS)
    null = os.open(os.devnull, os.O_WRONLY)
    os.dup2(null, 2)  # the library's panics must not reach our log
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(null, 1)  # output of the library must not be read as an answer
    _serve(sys.stdin, answers)
