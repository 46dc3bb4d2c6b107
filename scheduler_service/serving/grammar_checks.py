"""Grammars of requests are read once before they are queued, so that nothing is queued which no worker could read.

A verdict is kept by content. A grammar without one is tried in a process of its own, of low priority, one at a time
(`pagewire.common.grammars.trial`), for which a thread waits. What passed it never has to again, so that a worker that
comes back gets it whatever else the machine does. A tenant's grammars wait for each other before they come to the
thread, so that it serves tenants in turn.
"""

import asyncio
import logging
import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from hashlib import sha256

from pagewire.common.gguf.tokenizer_files import read_tokenizer
from pagewire.common.grammars import GrammarError, version
from pagewire.common.grammars.trial import Trials
from pagewire.common.wire.messages import GrammarKind, WorkerCapacity
from scheduler_service.core.request import Grammar
from scheduler_service.serving.checkpoint.model_info import ModelInfo
from scheduler_service.serving.observer import Observer
from scheduler_service.serving.refusal import Reason, RefusedError, invalid
from scheduler_service.serving.turns import TenantBytes

logger = logging.getLogger(__name__)

MAX_WAITING_BYTES = 64 * 1024 * 1024  # of all grammars that wait to be checked; of a tenant's a quarter
MAX_TENANT_WAITING = 128  # of one tenant's
_MAX_VERDICTS = 4096
_MAX_ERROR_BYTES = 1000  # a status has it three times, and room for 8 KiB

_Key = tuple[GrammarKind, tuple[int, ...], bytes]


@dataclass(slots=True)
class _Same:
    """Checks of one grammar that wait. One of them has the lock: the others wait for what it finds."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_waiting: int = 0


@dataclass(slots=True)
class _Turns:
    """One tenant's grammars that wait."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by the one that is on the thread, or next
    waiting: dict[_Key, _Same] = field(default_factory=dict)


class GrammarChecks(Observer):
    """Belongs to the event loop's thread. It hears of workers, since those must read grammars as this service does."""

    def __init__(
        self, model: ModelInfo, on_checked: Callable[[float, bool], None], tokenizer_json: str | None = None
    ) -> None:
        """`on_checked` gets how many seconds each compilation took, and whether the grammar is good. `tokenizer_json`:
        the model's, where that has been read."""
        self._model = model
        self._tokenizer_json = tokenizer_json
        self._on_checked = on_checked
        self._trials: Trials | None = None  # made by the thread
        self._tokenizer_fault = ""  # why not
        self._worker_fault = ""  # why the worker that is there, or was there last, takes no grammars
        self._verdicts: OrderedDict[_Key, str] = OrderedDict()  # why a grammar is refused, or nothing
        self._turns: dict[str, _Turns] = {}  # of the tenants that have grammars which wait
        self._waiting = TenantBytes("new grammars", MAX_WAITING_BYTES, MAX_WAITING_BYTES // 4)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    async def start(self) -> None:
        """Return when the tokenizer has been read: no other thread runs while the library does that, which takes a
        second with a large vocabulary."""
        if not self._model.grammar_refusal:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._read_tokenizer)

    def close(self) -> None:
        """Check nothing any more."""
        if self._trials is not None:
            self._trials.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def refusal(self) -> str:
        """The reason why no grammar is served, as far as is known, or nothing."""
        return self._model.grammar_refusal or self._tokenizer_fault or self._worker_fault

    @property
    def num_waiting_bytes(self) -> int:
        """The bytes of all grammars that wait to be checked."""
        return self._waiting.num_bytes

    @property
    def num_verdicts(self) -> int:
        """The number of verdicts that are kept."""
        return len(self._verdicts)

    def worker_changed(self, capacity: WorkerCapacity | None) -> None:
        """Hold the worker's library against the one here. A worker that is lost may come back the same."""
        if capacity is None or self._model.grammar_refusal:
            return
        self._worker_fault = _worker_fault(capacity.grammar_version)
        if self._worker_fault:
            logger.warning("structured output is refused: %s", self._worker_fault)

    async def check(self, grammar: Grammar, tenant: str) -> None:
        """Return if the grammar can be used. Raises RefusedError, also where too many wait to be checked."""
        self.check_served(grammar)
        text = grammar.text.encode()
        key = (grammar.kind, grammar.end_token_ids, sha256(text).digest())
        verdict = self._verdicts.get(key)
        if verdict is None:
            async with self._turn(tenant, key, len(text)) as turns:
                verdict = await self._first_verdict(grammar, key, turns)
        self._verdicts[key] = verdict
        self._verdicts.move_to_end(key)
        if len(self._verdicts) > _MAX_VERDICTS:
            self._verdicts.popitem(last=False)
        if verdict:
            raise invalid(_field_of(grammar), f"{grammar.kind.name.lower()} cannot be used: {verdict}")

    def check_served(self, grammar: Grammar) -> None:
        """Return if grammars are served now. Raises RefusedError."""
        if self.refusal:
            raise RefusedError(Reason.FAILED_PRECONDITION, self.refusal, _field_of(grammar))

    @asynccontextmanager
    async def _turn(self, tenant: str, key: _Key, size: int) -> AsyncIterator[_Turns]:
        """Wait for the tenant's checks of the same grammar that came before. Raises RefusedError."""
        turns = self._turns.get(tenant) or _Turns()
        if key not in turns.waiting and len(turns.waiting) >= MAX_TENANT_WAITING:
            raise RefusedError(
                Reason.RESOURCE_EXHAUSTED,
                f"{len(turns.waiting)} new grammars of this tenant wait to be checked, the limit is "
                f"{MAX_TENANT_WAITING}; try again later",
            )
        with self._waiting.held(tenant, size):
            self._turns[tenant] = turns
            same = turns.waiting.setdefault(key, _Same())
            same.num_waiting += 1
            try:
                async with same.lock:
                    yield turns
            finally:
                same.num_waiting -= 1
                if not same.num_waiting:
                    del turns.waiting[key]
                if not turns.waiting:
                    del self._turns[tenant]

    async def _first_verdict(self, grammar: Grammar, key: _Key, turns: _Turns) -> str:
        """Return what a check before it has found of the same grammar, or check it behind the tenant's others."""
        if key not in self._verdicts:
            async with turns.lock:
                if key not in self._verdicts:  # another tenant's may have been the same
                    return await self._compile(grammar)
        return self._verdicts[key]

    async def _compile(self, grammar: Grammar) -> str:
        """Return why a grammar cannot be used, or nothing."""
        run = asyncio.get_running_loop().run_in_executor
        try:
            seconds, verdict = await run(self._thread, self._compile_on_thread, grammar)
        except GrammarError as error:
            raise RefusedError(Reason.FAILED_PRECONDITION, str(error), _field_of(grammar)) from None
        self._on_checked(seconds, not verdict)
        return verdict

    # On the thread

    def _read_tokenizer(self) -> None:
        """Start the process, which reads the tokenizer."""
        model = self._model
        assert model.tokenizer_path is not None
        try:
            text = self._tokenizer_json or read_tokenizer(model.tokenizer_path)
            trials = Trials(text, model.vocab_size, model.grammar_end_token_ids)
        except (ValueError, OSError) as error:
            self._tokenizer_fault = (
                f"llguidance {version()} cannot read the checkpoint's tokenizer: {_shortened(str(error))}"
            )
            logger.warning("structured output is refused: %s", self._tokenizer_fault)
        else:
            self._trials = trials
        self._tokenizer_json = None

    def _compile_on_thread(self, grammar: Grammar) -> tuple[float, str]:
        """Return how many seconds it took, and why the grammar cannot be used, or nothing."""
        assert self._trials is not None, "no grammar is checked where the tokenizer cannot be read"
        began = time.perf_counter()
        verdict = self._trials.run(grammar.kind.name.lower(), grammar.text, grammar.end_token_ids)
        return time.perf_counter() - began, _shortened(verdict)


def _field_of(grammar: Grammar) -> str:
    """Return the path of the field that a request's grammar stood in."""
    return f"sampling.{grammar.kind.name.lower()}"


def _worker_fault(grammar_version: str) -> str:
    """Return why a worker takes no grammars, or nothing."""
    if not grammar_version:
        return "the worker reads no grammars; its log says why"
    if grammar_version != version():
        return (
            f"the worker reads grammars by llguidance {grammar_version}, the scheduler by {version()}; install the "
            "same version for both"
        )
    return ""


def _shortened(text: str) -> str:
    encoded = text.encode(errors="replace")
    return text if len(encoded) <= _MAX_ERROR_BYTES else f"{encoded[:_MAX_ERROR_BYTES].decode(errors='ignore')}..."
