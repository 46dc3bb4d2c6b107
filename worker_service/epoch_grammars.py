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
    """A thread that builds the compile function and then compiles grammars in the order of submission."""

    def __init__(self, make_compile: Callable[[], Compile]) -> None:
        """Start the thread. It runs `make_compile` at once, because reading a large vocabulary takes a second."""
        self._executor = ThreadPoolExecutor(1, "grammars", _lower_priority)
        self._compile = self._executor.submit(make_compile)

    def wait(self) -> None:
        """Wait until grammars can be compiled. Raises the exception of `make_compile`."""
        self._compile.result()

    def submit(self, job: Callable[[Compile], None]) -> None:
        """Queue a job. It should not raise; an exception is logged."""
        self._executor.submit(lambda: job(self._compile.result())).add_done_callback(_log_failure)

    def stop(self) -> None:
        """Wait for the job in progress and drop the queued jobs."""
        self._executor.shutdown(cancel_futures=True)


def _log_failure(job: Future[None]) -> None:
    if not job.cancelled() and job.exception() is not None:
        logger.critical("a grammar's job failed", exc_info=job.exception())


def _lower_priority() -> None:
    """Lower the priority of the current thread.

    On Linux each thread has its own priority. Other systems have one priority per process.
    """
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


class EpochGrammars:
    """The grammars of the current epoch. The compute thread calls its methods; the compile thread prepares grammars.

    Each added grammar is reported once as ready or failed, to the session that began its epoch. A grammar that is
    released earlier is not reported.
    """

    def __init__(self, thread: CompileThread | None, vocab_size: int) -> None:
        """If `thread` is None, grammars are not supported."""
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
        """Begin an epoch and forget the grammars of earlier epochs. `report` is called on the compile thread."""
        with self._lock:
            self._epoch, self._report = epoch, report
            self._grammars, self._last_id = {}, 0

    def apply(self, plan: StepPlan) -> None:
        """Release and add the grammars that a plan names. Raises WorkerProtocolError for an invalid id or grammar."""
        for grammar_id in plan.released_grammar_ids:
            self.release(grammar_id)
        for added in plan.added_grammars:
            self.add(added)

    def add(self, added: AddedGrammar) -> None:
        """Start preparing a grammar. Raises WorkerProtocolError if the grammar or its id is invalid."""
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
        """Forget a grammar, whether it is ready or not. Raises WorkerProtocolError if the id is unknown."""
        with self._lock:
            grammar = self._grammars.pop(grammar_id, None)
        if grammar is None:
            raise WorkerProtocolError(f"grammar {grammar_id} is released, but {self._absence(grammar_id)}")

    def matcher(self, grammar_id: int) -> Matcher:
        """Return a new matcher in the initial state of a grammar.

        Raises WorkerProtocolError if the grammar is not ready.
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
        """End the compile thread and the mask threads."""
        self.mask_queue.close()
        if self._thread is not None:
            self._thread.stop()

    def _absence(self, grammar_id: int) -> str:
        return "it was never added" if grammar_id > self._last_id else "it was released before, if it was ever added"

    def _is_wanted(self, grammar: "_Grammar") -> bool:
        """Return whether the grammar is still needed: it has not been released, and its epoch has not ended."""
        return self._grammars.get(grammar.added.grammar_id) is grammar

    def _prepare(self, grammar: "_Grammar", compile: Compile) -> None:
        """Compile a grammar and report it. Runs on the compile thread."""
        if not self._is_wanted(grammar):
            return
        matcher, error = grammar.compile(compile)
        with self._lock:
            if not self._is_wanted(grammar):
                return
            grammar.matcher, grammar.has_failed = matcher, bool(error)
        grammar.report(GrammarReport(grammar.epoch, grammar.added.grammar_id, error))


@dataclass(slots=True)
class _Grammar:
    """An added grammar. It is ready once `matcher` is set. `matcher` itself always stays in its initial state."""

    added: AddedGrammar
    epoch: int
    report: Report
    matcher: Matcher | None = None
    has_failed: bool = False

    def compile(self, compile: Compile) -> tuple[Matcher | None, str]:
        """Return the matcher and "", or None and the reason of the failure."""
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
    """Raise WorkerProtocolError if the end tokens are empty, not strictly ascending, or outside the vocabulary."""
    ends = added.end_token_ids
    if not ends or any(first >= second for first, second in pairwise(ends)):
        raise WorkerProtocolError(
            f"grammar {added.grammar_id} has end tokens {ends}; they must ascend, and there must be at least one"
        )
    if not 0 <= ends[0] <= ends[-1] < vocab_size:
        raise WorkerProtocolError(f"grammar {added.grammar_id} has end tokens {ends}; ids must be below {vocab_size}")


def _ignore_report(report: GrammarReport) -> None:
    """Ignore a report: no epoch has begun."""
