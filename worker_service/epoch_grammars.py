"""The grammars of an epoch by the numbers that plans have for them, and the thread that prepares them, which is not the
one that computes."""

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

_LONG_S = 0.1  # a grammar that takes longer is told of in the log
_NICENESS = 10  # the threads of steps get about nine tenths of a core that they share with the one that compiles

Compile = Callable[[str, str, tuple[int, ...]], Matcher]  # of a kind, a text and end tokens; raises GrammarError
Report = Callable[[GrammarReport], None]


class CompileThread:
    """Makes what compiles grammars, and then compiles in the order that was asked for."""

    def __init__(self, make_compile: Callable[[], Compile]) -> None:
        """`make_compile` is called on the thread, at once: reading a large vocabulary takes a second."""
        self._executor = ThreadPoolExecutor(1, "grammars", _lower_priority)
        self._compile = self._executor.submit(make_compile)

    def wait(self) -> None:
        """Return when grammars can be compiled. Raises what `make_compile` raised."""
        self._compile.result()

    def submit(self, job: Callable[[Compile], None]) -> None:
        """Have a job done behind those that were submitted before. It is to raise nothing: what it raises is logged."""
        self._executor.submit(lambda: job(self._compile.result())).add_done_callback(_log_failure)

    def stop(self) -> None:
        """Return when the job in progress is done; the others are dropped."""
        self._executor.shutdown(cancel_futures=True)


def _log_failure(job: Future[None]) -> None:
    if not job.cancelled() and job.exception() is not None:
        logger.critical("a grammar's job failed", exc_info=job.exception())


def _lower_priority() -> None:
    """Linux has a priority for each thread, and takes this for the thread's own; others have one for a process."""
    with suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICENESS)


class EpochGrammars:
    """Called by the thread that computes; grammars become ready, or fail, on the one that compiles.

    Each grammar that was added is reported once, unless it was released before, to the session that began its epoch.
    """

    def __init__(self, thread: CompileThread | None, vocab_size: int) -> None:
        """`thread`: None where no grammars can be read."""
        self._thread = thread
        self.mask_queue = MaskQueue()  # of the rows that have these grammars
        self._vocab_size = vocab_size
        self._lock = threading.Lock()
        self._epoch = 0
        self._report: Report = _tell_none
        self._grammars: dict[int, _Grammar] = {}  # by id, from when they are added until they are released
        self._last_id = 0  # of this epoch

    @property
    def reads_any(self) -> bool:
        """Whether there can be grammars."""
        return self._thread is not None

    def begin(self, epoch: int, report: Report) -> None:
        """Forget the grammars of earlier epochs. `report` is called on the thread that compiles."""
        with self._lock:
            self._epoch, self._report = epoch, report
            self._grammars, self._last_id = {}, 0

    def apply(self, plan: StepPlan) -> None:
        """Release and add what a plan says. Raises WorkerProtocolError."""
        for grammar_id in plan.released_grammar_ids:
            self.release(grammar_id)
        for added in plan.added_grammars:
            self.add(added)

    def add(self, added: AddedGrammar) -> None:
        """Begin to prepare a grammar. Raises WorkerProtocolError."""
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
        """Forget a grammar, also one that is not ready. Raises WorkerProtocolError for one that is not there."""
        with self._lock:
            grammar = self._grammars.pop(grammar_id, None)
        if grammar is None:
            raise WorkerProtocolError(f"grammar {grammar_id} is released, but {self._absence(grammar_id)}")

    def matcher(self, grammar_id: int) -> Matcher:
        """Return a new matcher at the beginning of a grammar. Raises WorkerProtocolError for one that is not ready."""
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
        """End the threads."""
        self.mask_queue.close()
        if self._thread is not None:
            self._thread.stop()

    def _absence(self, grammar_id: int) -> str:
        return "it was never added" if grammar_id > self._last_id else "it was released before, if it was ever added"

    def _is_wanted(self, grammar: "_Grammar") -> bool:
        """Whether neither the grammar was released nor its epoch is over."""
        return self._grammars.get(grammar.added.grammar_id) is grammar

    def _prepare(self, grammar: "_Grammar", compile: Compile) -> None:
        """Called on the thread that compiles."""
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
    """A grammar from when it is added on. It is ready once it has a matcher, which itself is never moved on."""

    added: AddedGrammar
    epoch: int
    report: Report
    matcher: Matcher | None = None
    has_failed: bool = False

    def compile(self, compile: Compile) -> tuple[Matcher | None, str]:
        """Return a matcher, or None and why there is none."""
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
    """Raises WorkerProtocolError for what no grammar may be."""
    ends = added.end_token_ids
    if not ends or any(first >= second for first, second in pairwise(ends)):
        raise WorkerProtocolError(
            f"grammar {added.grammar_id} has end tokens {ends}; they rise, and there is at least one"
        )
    if not 0 <= ends[0] <= ends[-1] < vocab_size:
        raise WorkerProtocolError(f"grammar {added.grammar_id} has end tokens {ends}; ids are below {vocab_size}")


def _tell_none(report: GrammarReport) -> None:
    """No epoch has begun."""
