"""A simulation of detached results, output records and both ends of `GenerateMany` in one virtual-time event loop.

The production code runs from the core to the clients. The simulated workers come and go, the networks break, and the
clients read at their own pace. A seed determines a history: each actor has its own `random.Random`, and time jumps from
event to event.
"""

import asyncio
import gc
import logging
import zlib
from collections import Counter
from collections.abc import Callable, Coroutine
from typing import Any
from unittest import mock

import grpc

from pagewire.client import channels
from pagewire.client.errors import PagewireError
from scheduler_service.api.grpc import shared_call
from scheduler_service.core import explain
from scheduler_service.core.request import EndReason
from scheduler_service.serving.active_request import ActiveRequest
from tests.sim.outputs.clients import PATIENCE, Client, SlowClient
from tests.sim.outputs.detached_ledger import DetachedLedger
from tests.sim.outputs.request import SimulatedRequest
from tests.sim.outputs.route import Moment, Route
from tests.sim.outputs.scenario import Task, Way, draw_scenario
from tests.sim.outputs.view import View
from tests.sim.outputs.virtual_loop import StuckError, VirtualLoop
from tests.sim.outputs.world import World

_MAX_TURNS = 300_000
# Seconds after which a request whose client has gone uses nothing, including networks and queues.
_GONE_AFTER = 15.0
_SETTLED_AFTER = 30.0
# The bytes of an output without tokens, with a margin, and the bytes of a token with its text.
_EMPTY_BYTES, _TOKEN_BYTES = 4160, 20
StatusCode = grpc.StatusCode


class Simulation:
    def __init__(self, seed: int, trace: Callable[[str], None] | None = None) -> None:
        self.scenario = draw_scenario(seed)
        self.trace = trace
        self.reached: Counter[str] = Counter()
        self.log_hash = seed
        self.num_events = 0
        self.is_stopping = False
        self._errors: list[BaseException] = []
        self._tasks: list[asyncio.Task[Any]] = []

    def run(self) -> None:
        """Run one history to the end of every request. Raises AssertionError or any error of the code under test."""
        scenario, self.loop = self.scenario, VirtualLoop(_MAX_TURNS)
        disabled = logging.root.manager.disable
        logging.disable()  # the loss of a worker would be logged for an operator
        if self.trace is not None:
            self.trace(str(scenario))
        try:
            with (
                mock.patch.object(shared_call, "_MAX_MESSAGE_WEIGHT", scenario.max_message_weight),
                mock.patch.object(shared_call, "_MAX_UNREAD_FAILURES", scenario.max_unread_failures),
                mock.patch.object(channels, "MAX_SHARED_BYTES", scenario.max_shared_bytes),
            ):
                self._run()
        finally:
            logging.disable(disabled)
            self.loop.close()

    def _run(self) -> None:
        gc.disable()
        try:
            self.loop.run_until_complete(self._main())
        except StuckError as stuck:
            self._errors.append(stuck)
        except Exception as error:
            self._errors.append(error)
        gc.enable()
        errors = [*self._errors, *self.loop.errors]
        self.loop.end()
        if errors:
            raise errors[0]

    async def _main(self) -> None:
        scenario = self.scenario
        self.world = world = World(scenario, self._errors.append)
        self._routes = {
            False: Route((world.direct,), lambda: self._is_served, lambda: world.worker.num_losses, self.loop.time),
            True: Route(
                (world.before, world.between),
                lambda: self._is_served and world.link.availability.is_serving,
                lambda: world.worker.num_losses,
                self.loop.time,
            ),
        }
        detached = [task.request.key for task in scenario.tasks if task.way is Way.DETACHED]
        self.ledger = DetachedLedger(world.detached, scenario, detached, self.is_served)
        self.loop.after_turn = self.guarded(self._audit)
        self.loop.call_later(scenario.begins_at, world.worker.begin)
        for time, index, seconds in scenario.cuts:
            network = (world.direct, world.before, world.between)[index]
            self.loop.call_later(time, network.cut, seconds)
        for time in scenario.bad_rows:
            self.loop.call_later(time, world.worker.corrupt)
        for time, seconds in scenario.losses:
            self.loop.call_later(time, world.worker.lose, seconds)
        clients = [Client(self, task) for task in (*scenario.tasks, *scenario.http_tasks)]
        slow = [SlowClient(self, each) for each in scenario.slow_calls]
        running = [*(self.begin(client.run()) for client in clients), *(self.begin(each.run()) for each in slow)]
        if scenario.stops_at is not None:
            self.begin(self._stop(scenario.stops_at, 0.5))
        await asyncio.gather(*running)
        await asyncio.sleep(_SETTLED_AFTER)
        for _ in range(PATIENCE):  # wait for detached requests whose client has gone
            if any(map(self.is_served, detached)):
                await asyncio.sleep(1.0)
        self._check_idle()
        await self._check_quotas()
        await self._check_retention()
        if not self.is_stopping:
            await self._stop(0.0, 5.0)
        for route in self._routes.values():
            await route.connection.close()
        await asyncio.sleep(_SETTLED_AFTER)
        assert not world.direct.calls, "a call goes on"
        assert not world.before.calls, "a call goes on"
        assert not world.between.calls, "a call goes on"
        assert not {*world.server.requests, *world.front_end.requests}, "requests that only a collection frees"
        left = asyncio.all_tasks() - {asyncio.current_task()}
        assert not left, f"tasks are left: {left}"

    async def _stop(self, after: float, patience: float) -> None:
        await asyncio.sleep(after)
        self.is_stopping = True
        self.note("stop")
        await self.world.front_end.stop(patience)
        self.world.worker.end()
        await self.world.server.stop(patience)

    # Operations for clients

    def begin(self, coroutine: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        """Run a coroutine as a task. An exception in it ends the simulation."""

        async def guarded() -> None:
            try:
                await coroutine
            except Exception as error:
                self._errors.append(error)
                raise

        task = asyncio.create_task(guarded())
        self._tasks.append(task)
        return task

    def guarded(self, function: Callable[..., None]) -> Callable[..., None]:
        """Return a wrapper that records every exception of `function`, even where the code under test catches it."""

        def call(*args: Any) -> None:
            try:
                function(*args)
            except BaseException as error:
                self._errors.append(error)
                raise

        return call

    def note(self, name: str, *values: object) -> None:
        self.num_events += 1
        text = f"{self.loop.time():9.4f} {name} {' '.join(map(str, values))}"
        self.log_hash = (self.log_hash + zlib.crc32(text.encode())) % 2**64
        if self.trace is not None:
            self.trace(text)

    def route(self, *, by_front_end: bool) -> Route:
        return self._routes[by_front_end]

    @property
    def _is_served(self) -> bool:
        return self.world.step_loop.exchange.is_connected and not self.is_stopping

    def kept(self, request: SimulatedRequest) -> ActiveRequest | None:
        """Return the detached request, or None if the server does not have it."""
        detached = self.world.detached
        return detached.find(*request.key) if request.key in detached.by_name else None

    def is_served(self, key: tuple[str, str]) -> bool:
        """Return whether the core has a request with this tenant and name."""
        return key in self.world.step_loop.state.groups

    # Checks

    def must(self, is_so: bool, otherwise: str) -> None:
        assert is_so, otherwise

    def must_be_gone(self, request: SimulatedRequest) -> None:
        """Check after a while that the core has released a request that no client reads."""
        self.loop.call_later(_GONE_AFTER, self.guarded(self._check_gone), request)

    def _check_gone(self, request: SimulatedRequest) -> None:
        assert not self.is_served(request.key), f"S8: {request.key} goes on without its client"

    def check_failure(
        self,
        route: Route,
        request: SimulatedRequest | None,
        failure: PagewireError,
        before: Moment,
        timeout: float | None = None,
        *,
        is_aborted: bool = False,
    ) -> None:
        """Check that a failure has a cause. `request`: None if a whole call has failed."""
        code, scenario = failure.code, self.scenario
        self.note("failed", request and request.name, code, failure)
        self.reached[f"failed: {code.name}"] += 1
        is_wide = request is not None and (request.n > 1 or request.beam_width is not None)
        if code is StatusCode.UNAVAILABLE:
            is_right = route.is_excused(before)
        elif code is StatusCode.RESOURCE_EXHAUSTED:  # also for requests that no longer fit a newly joined worker
            is_right = scenario.options.max_waiting_requests < 100 or scenario.max_requests is not None or is_wide
        elif code is StatusCode.DEADLINE_EXCEEDED:
            is_right = timeout is not None and self.loop.time() >= before.time + timeout - 1e-6
        elif code is StatusCode.INTERNAL:
            reasons = self.world.witness.reasons.get(request.name, set()) if request is not None else set()
            is_right = not reasons.isdisjoint((EndReason.NAN_LOGITS, EndReason.CRASHES_WORKER))
        elif code is StatusCode.INVALID_ARGUMENT:  # several samples may need more blocks than exist
            is_right = request is not None and (request.is_invalid or is_wide)
        else:
            is_right = code is StatusCode.CANCELLED and is_aborted
        assert is_right, f"{request and request.name} failed without a cause: {code.name}: {failure}"

    def check_bounded(self, view: View, *, by_front_end: bool) -> None:
        """Check that a server keeps at most the part of an output that its reader has not received."""
        service = self.world.front_end if by_front_end else self.world.server
        active = service.requests.get(view.request.name)
        for output, sample in zip(active.outputs if active is not None else (), view.samples, strict=False):
            num_waiting = output.num_tokens - sample.num_tokens
            assert output.num_bytes <= _EMPTY_BYTES + _TOKEN_BYTES * num_waiting, "what was read is kept"

    def _audit(self) -> None:
        """Check the invariants that must hold after each turn of the event loop."""
        self.ledger.audit()
        if (most := self.scenario.max_requests) is not None:
            served = Counter(tenant for tenant, _ in self.world.step_loop.state.groups)
            assert max(served.values(), default=0) <= most, "a tenant has more requests than it may"

    def check_forgotten(self, request: SimulatedRequest) -> None:
        """Check that a result may be forgotten, after the server reported that it does not know it."""
        assert request.key in self.ledger.forgotten, f"the result of {request.key} is lost"
        self.reached["a result is forgotten"] += 1

    def check_unread_failures(self) -> None:
        """Check that the number of unread failures is bounded: a client's further requests wait on the wire."""
        scenario = self.scenario
        window = max(scenario.client_weather.window, scenario.link_weather.window)
        most = sum(scenario.max_unread_failures + window + len(slow.requests) for slow in scenario.slow_calls)
        for service in (self.world.server, self.world.front_end):
            assert service.servicer.num_unread_failures <= most, "more fails than is read"

    def _check_idle(self) -> None:
        stats = explain.stats(self.world.step_loop.state)
        assert not self.world.step_loop.state.groups, "S8: requests go on without their clients"
        assert (stats.num_held_blocks, stats.num_held_host_blocks) == (0, 0), f"S8: {stats}"
        counts = self.world.step_loop.token_counts()
        assert counts.num_kept + counts.num_discarded == stats.num_generation_tokens, "tokens that nobody accounts for"
        assert self.world.link.num_running == 0, "S6: samples go on in the front end alone"

    async def _check_quotas(self) -> None:
        """Check that tenants can use their quotas again after all requests have ended."""
        if self.is_stopping or (most := self.scenario.max_requests) is None:
            return
        for tenant in ("", "a", "b"):
            requests = [SimulatedRequest(f"last {tenant} {number}", tenant, (1, 2), 3, 0) for number in range(most)]
            tasks = [Task(each, Way.ALONE, False, 0.0, None, 0.0, None, None, ()) for each in requests]
            await asyncio.gather(*(Client(self, task, must_be_served=True).run() for task in tasks))

    async def _check_retention(self) -> None:
        await asyncio.sleep(self.scenario.retention)
        assert not self.world.detached.num_bytes
        for task in self.scenario.tasks:
            assert task.request.key not in self.world.detached.by_name, "a result is kept for too long"
