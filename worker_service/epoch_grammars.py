"""The grammars of an epoch, by the ids that plans use, and the thread that compiles them.

The compile thread is separate from the compute thread.
"""

import logging
import os
import threading
import time
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from itertools import pairwise

from pagewire.common.grammars import GrammarError, MaskQueue, Matcher
from pagewire.common.wire.messages import AddedGrammar, GrammarReport, StepPlan, WorkerProtocolError

logger = logging.getLogger(__name__)

_LONG_S = 0.1  # a grammar that takes longer to compile is logged
_NICENESS = 10  # threads of steps then get about nine tenths of a core that they share with the compile thread

Compile = Callable[[str, str, tuple[int, ...]], Matcher]  # (kind, text, end tokens) -> matcher; raises GrammarError
Report = Callable[[GrammarReport], None]


class CompileThread:
    """A thread that compiles grammars for structured output, in the order of submission.

    The thread first builds the compile function, for example from the model's vocabulary.
    """

    def __init__(self, make_compile: Callable[[], Compile]) -> None:
        """Start the thread.

        It calls `make_compile` at once, because reading a large vocabulary takes about a second.
        """
        self._executor = ThreadPoolExecutor(1, "grammars", _lower_priority)
        self._compile = self._executor.submit(make_compile)

    def wait(self) -> None:
        """Wait until the thread is ready to compile grammars. If `make_compile` failed, raise its exception."""
        self._compile.result()

    def submit(self, job: Callable[[Compile], None]) -> None:
        """Queue `job`, which the thread calls with the compile function. If `job` raises an exception, it is logged."""
        self._executor.submit(lambda: job(self._compile.result())).add_done_callback(_log_failure)

    def stop(self) -> None:
        """Drop the queued grammars, wait for the compilation in progress, and end the thread."""
        self._executor.shutdown(cancel_futures=True)


def _log_failure(job: Future[None]) -> None:
    if not job.cancelled() and job.exception() is not None:
        logger.critical("a grammar's job failed", exc_info=job.exception())


def _lower_priority() -> None:
    """Lower the scheduling priority of the current thread, so that compiling grammars slows down steps less.

    On Linux each thread has its own priority. Other systems have one priority per process.
    """
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


class EpochGrammars:
    """The grammars that the scheduler has added in the current epoch (its current session with this worker), by id.

    The compute thread calls the methods. The compile thread compiles the grammars. Each added grammar is reported once,
    as ready or failed, to the session that began its epoch. A grammar that is released earlier is not reported.
    """

    def __init__(self, thread: CompileThread | None, vocab_size: int) -> None:
        """Create an empty set of grammars. If `thread` is None, every plan that adds a grammar is rejected."""
        self._thread = thread
        self.mask_queue = MaskQueue()  # for the rows that use these grammars
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._epoch = 0
        self._report: Report = _ignore_report
        self._grammars: dict[int, _Grammar] = {}  # by id; from addition to release
        self._last_id = 0  # of this epoch

    @property
    def reads_any(self) -> bool:
        """Whether this worker supports grammars."""
        return self._thread is not None

    def begin(self, epoch: int, report: Report) -> None:
        """Begin an epoch (a session with a scheduler) and forget the grammars of earlier epochs.

        `report` is called on the compile thread when a grammar is ready or has failed.
        """
        with self._lock:
            self._epoch, self._report = epoch, report
            self._grammars, self._last_id = {}, 0

    def apply(self, plan: StepPlan) -> None:
        """Release and add the grammars that a step plan names.

        Raises WorkerProtocolError if an id or the end tokens of a grammar are invalid.
        """
        for grammar_id in plan.released_grammar_ids:
            self.release(grammar_id)
        for added in plan.added_grammars:
            self.add(added)

    def add(self, added: AddedGrammar) -> None:
        """Queue a grammar for compilation, on the compile thread.

        Raises WorkerProtocolError if this worker supports no grammars, or if the grammar's end tokens or its id are
        invalid.
        """
        if self._thread is None:
            raise WorkerProtocolError(f"grammar {added.grammar_id} is added, but this worker has no tokenizer for it")
        _check(added, self._vocab_size)
        if added.grammar_id <= self._last_id:
            raise WorkerProtocolError(f"grammar {added.grammar_id} is added after {self._last_id}; ids rise, from 1")
        self._last_id = added.grammar_id
        grammar = _Grammar(added, self._epoch, self._report)
        with self._lock:
            self._grammars[added.grammar_id] = grammar
        self._thread.submit(lambda compile: self._prepare(grammar, compile))

    def release(self, grammar_id: int) -> None:
        """Forget a grammar, whether it is compiled or not. Raises WorkerProtocolError if no grammar has this id."""
        with self._lock:
            grammar = self._grammars.pop(grammar_id, None)
        if grammar is None:
            raise WorkerProtocolError(f"grammar {grammar_id} is released, but {self._absence(grammar_id)}")

    def matcher(self, grammar_id: int) -> Matcher:
        """Return a new matcher for a grammar. A matcher tracks the state of one output and computes its token masks.

        Raises WorkerProtocolError if the grammar is unknown, is not compiled yet, or failed to compile.
        """
        with self._lock:
            grammar = self._grammars.get(grammar_id)
            matcher = grammar and grammar.matcher
        if matcher:
            return matcher.copy()
        if grammar is None:
            reason = self._absence(grammar_id)
        else:
            reason = "it cannot be used" if grammar.has_failed else "it is not ready"
        raise WorkerProtocolError(f"a row opens with grammar {grammar_id}, but {reason}")

    def close(self) -> None:
        """End the thread that compiles grammars and the threads that compute token masks."""
        self.mask_queue.close()
        if self._thread is not None:
            self._thread.stop()

    def _absence(self, grammar_id: int) -> str:
        return "it was never added" if grammar_id > self._last_id else "it was released before, if it was ever added"

    def _is_needed(self, grammar: "_Grammar") -> bool:
        """Return whether a grammar is still needed: it has not been released, and its session has not ended."""
        return self._grammars.get(grammar.added.grammar_id) is grammar

    def _prepare(self, grammar: "_Grammar", compile: Compile) -> None:
        """Compile a grammar on the compile thread, and report to the scheduler that it is ready or has failed.

        A grammar that is no longer needed is skipped.
        """
        if not self._is_needed(grammar):
            return
        matcher, error = grammar.compile(compile)
        with self._lock:
            if not self._is_needed(grammar):
                return
            grammar.matcher, grammar.has_failed = matcher, bool(error)
        grammar.report(GrammarReport(grammar.epoch, grammar.added.grammar_id, error))


@dataclass(slots=True)
class _Grammar:
    """A grammar that the scheduler has added. It is ready when `matcher` is set.

    The matcher always stays in its initial state. Each running sequence uses a copy of it.
    """

    added: AddedGrammar
    epoch: int
    report: Report
    matcher: Matcher | None = None
    has_failed: bool = False

    def compile(self, compile: Compile) -> tuple[Matcher | None, str]:
        """Compile the grammar. Return its matcher and an empty text, or None and the reason why it cannot be used."""
        started, matcher, error = time.perf_counter(), None, ""
        try:
            matcher = compile(self.added.kind.name.lower(), self.added.text, self.added.end_token_ids)
        except GrammarError as reason:
            error = str(reason) or "the grammar cannot be read"
        except Exception as reason:
            logger.exception("%s", self._name)
            error = f"the grammar cannot be prepared: {type(reason).__name__}"
        took = time.perf_counter() - started
        if error:
            logger.warning("%s cannot be used: %s", self._name, error)
        elif took > _LONG_S:
            logger.warning("%s took %.0f ms to prepare", self._name, took * 1000)
        return matcher, error

    @property
    def _name(self) -> str:
        kind = self.added.kind.name.lower()
        return f"grammar {self.added.grammar_id} of epoch {self.epoch} ({kind}, {len(self.added.text)} characters)"


def _check(added: AddedGrammar, vocab_size: int) -> None:
    """Raise WorkerProtocolError if the end tokens of a grammar are invalid.

    They must be at least one token of the vocabulary, in strictly ascending order.
    """
    ends = added.end_token_ids
    if not ends or any(first >= second for first, second in pairwise(ends)):
        raise WorkerProtocolError(
            f"grammar {added.grammar_id} has end tokens {ends}; they must ascend, and there must be at least one"
        )
    if not 0 <= ends[0] <= ends[-1] < vocab_size:
        raise WorkerProtocolError(f"grammar {added.grammar_id} has end tokens {ends}; ids must be below {vocab_size}")


def _ignore_report(report: GrammarReport) -> None:
    """Drop the result of compiling a grammar. The worker uses this callback until a scheduler connects."""
