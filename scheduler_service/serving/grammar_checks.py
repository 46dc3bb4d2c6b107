"""Checks of the grammars in requests. A request is only queued if the worker can read its grammar.

Verdicts are cached by content. A new grammar is compiled in a separate process of low priority, one grammar at a time
(`pagewire.common.grammars.trial`), while a thread waits for the result. A grammar that passed is not checked again, so
a worker that returns receives it whatever the load of the machine. At most one grammar of each tenant is in the
thread's queue, so the thread serves the tenants in turn.
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

MAX_WAITING_BYTES = 64 * 1024 * 1024  # of all waiting grammars; a quarter of it for one tenant
MAX_TENANT_WAITING = 128  # grammars of one tenant
_MAX_VERDICTS = 4096
_MAX_ERROR_BYTES = 1000  # a gRPC status has at most 8 KiB, and contains the error three times

_Key = tuple[GrammarKind, tuple[int, ...], bytes]


@dataclass(slots=True)
class _WaitingChecks:
    """The requests of a tenant that wait for the check of the same grammar. One of them holds the lock while the
    grammar is checked. The others then use its result."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    num_waiting: int = 0


@dataclass(slots=True)
class _TenantGrammars:
    """The grammars of one tenant that wait to be checked."""

    lock: asyncio.Lock = field(default_factory=asyncio.Lock)  # held by the grammar in the thread's queue
    waiting: dict[_Key, _WaitingChecks] = field(default_factory=dict)


class GrammarChecks(Observer):
    """The checks of the grammars in a scheduler's requests, with a cache of results. All methods must be called on the
    event loop's thread.

    The object observes the workers, because a worker must have the same version of the grammar library as this process.
    """

    def __init__(
        self, model: ModelInfo, on_checked: Callable[[float, bool], None], tokenizer_json: str | None = None
    ) -> None:
        """Prepare the checks of the grammars in requests. `on_checked` is called after each compilation of a grammar.
        Its arguments are the duration in seconds, and whether the grammar is valid. `tokenizer_json` is the text of the
        model's tokenizer, if the caller has already read it."""
        self._model = model
        self._tokenizer_json = tokenizer_json
        self._on_checked = on_checked
        self._trials: Trials | None = None  # created on the thread
        self._tokenizer_fault = ""  # why `_trials` could not be created
        self._worker_fault = ""  # why the current or the last worker supports no grammars
        self._verdicts: OrderedDict[_Key, str] = OrderedDict()  # why a grammar is refused, or ""
        self._turns: dict[str, _TenantGrammars] = {}  # of the tenants with waiting grammars
        self._waiting = TenantBytes("new grammars", MAX_WAITING_BYTES, MAX_WAITING_BYTES // 4)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="grammars")

    async def start(self) -> None:
        """Load the model's tokenizer into the grammar library, on a thread, and return when it is loaded. The library
        holds the interpreter's lock during this time, for about a second with a large vocabulary."""
        if not self._model.grammar_refusal:
            await asyncio.get_running_loop().run_in_executor(self._thread, self._read_tokenizer)

    def close(self) -> None:
        """Stop checking grammars, and end the process and the thread that compile them."""
        if self._trials is not None:
            self._trials.close()
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def refusal(self) -> str:
        """The reason why the server does not support structured output (output that matches a grammar), or an empty
        string. The model, the tokenizer or the worker may be the cause."""
        return self._model.grammar_refusal or self._tokenizer_fault or self._worker_fault

    @property
    def num_waiting_bytes(self) -> int:
        """The size of all grammars that wait to be checked, in bytes."""
        return self._waiting.num_bytes

    @property
    def num_verdicts(self) -> int:
        """The number of cached results of grammar checks."""
        return len(self._verdicts)

    def worker_changed(self, capacity: WorkerCapacity | None) -> None:
        """Compare a new worker's version of the grammar library with the version in this process. If `capacity` is
        None, the worker was lost; do nothing, because the same worker may return."""
        if capacity is None or self._model.grammar_refusal:
            return
        self._worker_fault = _worker_fault(capacity.grammar_version)
        if self._worker_fault:
            logger.warning("structured output is refused: %s", self._worker_fault)

    async def check(self, grammar: Grammar, tenant: str) -> None:
        """Check that a tenant's grammar can be compiled. Return without a value if it can. Raise RefusedError if the
        grammar is invalid, if the server does not support grammars now, or if too many grammars wait to be checked."""
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
        """Raise RefusedError if the server does not support grammars now, for example because the worker has another
        version of the grammar library."""
        if self.refusal:
            raise RefusedError(Reason.FAILED_PRECONDITION, self.refusal, _field_of(grammar))

    @asynccontextmanager
    async def _turn(self, tenant: str, key: _Key, size: int) -> AsyncIterator[_TenantGrammars]:
        """A context manager for the block that checks a tenant's grammar. Before the block begins, it waits until the
        tenant's earlier checks of the same grammar have ended. Raise RefusedError if too many grammars wait to be
        checked."""
        turns = self._turns.get(tenant) or _TenantGrammars()
        if key not in turns.waiting and len(turns.waiting) >= MAX_TENANT_WAITING:
            raise RefusedError(
                Reason.RESOURCE_EXHAUSTED,
                f"{len(turns.waiting)} new grammars of this tenant wait to be checked, the limit is "
                f"{MAX_TENANT_WAITING}; try again later",
            )
        with self._waiting.held(tenant, size):
            self._turns[tenant] = turns
            same = turns.waiting.setdefault(key, _WaitingChecks())
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

    async def _first_verdict(self, grammar: Grammar, key: _Key, turns: _TenantGrammars) -> str:
        """Return the reason why a grammar cannot be used, or an empty string if it can. Use the cached result if the
        same grammar was checked in the meantime. Otherwise wait for the check of the tenant's other grammars, then
        compile this grammar."""
        if key not in self._verdicts:
            async with turns.lock:
                if key not in self._verdicts:  # another tenant may have sent the same grammar
                    return await self._compile(grammar)
        return self._verdicts[key]

    async def _compile(self, grammar: Grammar) -> str:
        """Compile a grammar in another process. Return the reason why the grammar cannot be used, or an empty string if
        the grammar is valid. Raise RefusedError if the process that compiles grammars fails."""
        run = asyncio.get_running_loop().run_in_executor
        try:
            seconds, verdict = await run(self._thread, self._compile_on_thread, grammar)
        except GrammarError as error:
            raise RefusedError(Reason.FAILED_PRECONDITION, str(error), _field_of(grammar)) from None
        self._on_checked(seconds, not verdict)
        return verdict

    # Called on the thread

    def _read_tokenizer(self) -> None:
        """Read the model's tokenizer, and create the process that compiles grammars for it. If this fails, all requests
        with grammars are refused."""
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
        """Compile a grammar in another process and wait for the result. Return a tuple: the duration in seconds, and
        the reason why the grammar cannot be used, which is an empty string if the grammar is valid."""
        assert self._trials is not None, "no grammar is checked where the tokenizer cannot be read"
        began = time.perf_counter()
        verdict = self._trials.run(grammar.kind.name.lower(), grammar.text, grammar.end_token_ids)
        return time.perf_counter() - began, _shortened(verdict)


def _field_of(grammar: Grammar) -> str:
    """Return the path of the request field that contains the grammar, for error messages."""
    return f"sampling.{grammar.kind.name.lower()}"


def _worker_fault(grammar_version: str) -> str:
    """Return the reason why the server cannot use grammars with a worker that has this version of the grammar library,
    or an empty string if it can. `grammar_version` is empty if the worker supports no grammars."""
    if not grammar_version:
        return "the worker supports no grammars; its log has the reason"
    if grammar_version != version():
        return (
            f"the worker has llguidance {grammar_version}, but the scheduler has {version()}; install the same version "
            "for both"
        )
    return ""


def _shortened(text: str) -> str:
    encoded = text.encode(errors="replace")
    return text if len(encoded) <= _MAX_ERROR_BYTES else f"{encoded[:_MAX_ERROR_BYTES].decode(errors='ignore')}..."
