"""Simulated clients: each sends requests in its own way, reads at its own pace, and checks what it receives."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Callable
from random import Random
from typing import TYPE_CHECKING, Any

import grpc
import grpc.aio

from pagewire.client.errors import PagewireError
from pagewire.client.wire import decode_error, decode_failure
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from scheduler_service.core.request import EndReason
from tests.sim.outputs.http_network import read_over_http
from tests.sim.outputs.request import SimulatedRequest
from tests.sim.outputs.route import Moment
from tests.sim.outputs.scenario import SlowCall, Task, Way
from tests.sim.outputs.view import View

if TYPE_CHECKING:
    from tests.sim.outputs.simulation import Simulation

PATIENCE = 3000  # seconds within which everything must end


class Client:
    """A client with one request. `run` returns when the client has finished with the request."""

    def __init__(self, simulation: Simulation, task: Task, *, must_be_served: bool = False) -> None:
        self.simulation = simulation
        self.must_be_served = must_be_served
        self.task = task
        self.request = task.request
        self.rng = Random(f"client {simulation.scenario.seed} {task.request.name}")
        self.route = simulation.route(by_front_end=task.by_front_end)
        self.is_aborted = False  # by the Abort RPC
        self.began = self.route.moment()

    async def run(self) -> None:
        await asyncio.sleep(self.task.time)
        self.began = self.route.moment()
        if self.task.aborted_after is not None:
            self.simulation.begin(self._abort_later(self.task.aborted_after))
        async with asyncio.timeout(PATIENCE):
            if self.task.way is Way.SHARED:
                await self._read_shared()
            elif self.task.way is Way.ALONE:
                await self._read_alone()
            elif self.task.way in (Way.HTTP_WHOLE, Way.HTTP_STREAMED):
                await self._read_over_http(is_streamed=self.task.way is Way.HTTP_STREAMED)
            else:
                await self._detach()

    async def _abort_later(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
        self.is_aborted = True
        message = pb.AbortRequest(request_id=self.request.name, tenant=self.request.tenant)
        try:
            await self.route.stub().Abort(message)
        except grpc.aio.AioRpcError as error:
            is_right = error.code() in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNAVAILABLE)
            self.simulation.must(is_right, f"Abort failed: {error}")

    def _check_failure(self, failure: PagewireError, before: Moment) -> None:
        assert not self.must_be_served, f"it is not served: {failure}"
        self.simulation.check_failure(
            self.route, self.request, failure, before, self.task.timeout, is_aborted=self.is_aborted
        )

    # Ways of reading

    async def _read_shared(self) -> None:
        """Read on an RPC that the client library shares. No response may arrive after the client has aborted."""
        simulation, view, before = self.simulation, View(self.request), self.began
        over: asyncio.Future[PagewireError | None] = asyncio.get_running_loop().create_future()
        has_given_up = False

        def put(item: pb.GenerateResponse | PagewireError | None) -> None:
            assert not has_given_up, "S6: something comes of a request that was aborted"
            if isinstance(item, pb.GenerateResponse):
                self.take(view, item)
                return
            view.finish(is_well=item is None)
            over.set_result(item)
            if item is not None and aborts:
                aborts[0]()

        aborts: list[Callable[[], None]] = []
        aborts.append(self.route.connection.submit(self.request.message, simulation.guarded(put), self.task.timeout))
        done, _ = await asyncio.wait([over], timeout=self.task.gives_up_after)
        has_given_up = not done
        aborts[0]()
        if done and (failure := over.result()) is not None:
            self._check_failure(failure, before)
        if has_given_up:
            simulation.reached["a shared request is aborted"] += 1
        simulation.must_be_gone(self.request)

    async def _read_alone(self) -> None:
        """Read on a separate RPC, perhaps slowly."""
        view, before = View(self.request), self.began
        reading = self.route.connection.read("Generate", self.request.message, self.task.timeout)
        await self._read(view, reading, before)
        self.simulation.must_be_gone(self.request)

    async def _read_over_http(self, *, is_streamed: bool) -> None:
        view, before, world = View(self.request), self.began, self.simulation.world
        assert world.http is not None
        responses = read_over_http(world.http, world.before, self.request, self.task.timeout, is_streamed=is_streamed)
        await self._read(view, contextlib.aclosing(responses), before)
        if view.is_over and view.has_ended_well:
            self.simulation.reached[f"served {self.task.way.value}"] += 1
        self.simulation.must_be_gone(self.request)

    async def _read(self, view: View, reading: contextlib.AbstractAsyncContextManager[Any], before: Moment) -> bool:
        """Read the responses; return whether it is known how the request has ended."""
        try:
            async with asyncio.timeout(self.task.gives_up_after), reading as responses:
                async for response in responses:
                    self.take(view, response)
                    await asyncio.sleep(self.rng.random() * self.task.read_seconds)
            view.finish(is_well=True)
        except TimeoutError:
            self.simulation.reached["a call is given up"] += 1
            return False
        except PagewireError as failure:
            view.finish(is_well=False)
            self._check_failure(failure, before)
            return failure.code not in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED)
        return True

    def take(self, view: View, response: pb.GenerateResponse) -> None:
        view.take(response)
        self.simulation.note("read", self.request.name, response.index, response.first_token, *response.token_ids)
        if self.task.way is not Way.DETACHED:
            self.simulation.check_bounded(view, by_front_end=self.task.by_front_end)
        sample = view.samples[response.index]
        if sample.end is not None:
            self.simulation.reached[f"ended: {sample.end.value}"] += 1
            assert sample.end is not EndReason.ABORT or self.is_aborted, "it was not aborted"

    # Detached

    async def _detach(self) -> None:
        """Submit the request, attach at random times, and then read from the next unread token to the end."""
        simulation, request = self.simulation, self.request
        before = self.began
        try:
            await self.route.stub().Submit(pb.SubmitRequest(request=request.message))
        except grpc.aio.AioRpcError as error:
            failure = decode_error(error, "")
            self._check_failure(failure, before)
            if failure.code is not grpc.StatusCode.UNAVAILABLE:
                assert request.key not in simulation.world.detached.by_name, "a refused request is kept"
            return
        await self._submit_again()
        for seconds in self.task.attachments:
            simulation.begin(self._attach_once(seconds))
        await self._attach_to_end()
        await self._get_result()

    async def _submit_again(self) -> None:
        """Submit the request again: its name is in use as long as the result is kept."""
        scenario = self.simulation.scenario
        if scenario.retention < 30 or scenario.max_ended < 100 or scenario.max_bytes < 1 << 20:
            return
        try:
            await self.route.stub().Submit(pb.SubmitRequest(request=self.request.message))
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.ALREADY_EXISTS:
                self._check_failure(decode_error(error, ""), self.began)
        else:
            raise AssertionError("a request is taken twice")

    async def _attach_once(self, seconds: float) -> None:
        """Attach after `seconds`, starting at any token that exists."""
        await asyncio.sleep(seconds)
        await self._get_result()
        active = self.simulation.kept(self.request)
        if active is not None:
            first = [self.rng.randint(0, output.num_tokens) for output in active.outputs]
            await self._attach(View(self.request, first), self.task.gives_up_after)

    async def _attach_to_end(self) -> None:
        """Attach repeatedly, each time from the position of the previous reader.

        Together the readers read each token once.
        """
        view, num_attempts = View(self.request), 1
        while not await self._attach(view, None if num_attempts > 3 else self.task.gives_up_after):
            if self.simulation.kept(self.request) is None:
                return
            num_attempts += 1
            await asyncio.sleep(self.rng.random())

    async def _attach(self, view: View, gives_up_after: float | None) -> bool:
        """Attach once; return whether no further reader is needed."""
        message = pb.AttachRequest(
            request_id=self.request.name, tenant=self.request.tenant, from_tokens=view.num_tokens
        )
        before = self.route.moment()
        view.begin_again()
        self.simulation.reached["a detached request is read from amid it"] += any(view.num_tokens)
        reading = self.route.connection.read("Attach", message, None)
        try:
            async with asyncio.timeout(gives_up_after), reading as responses:
                async for response in responses:
                    # An end that an earlier reader received is sent again.
                    if view.samples[response.index].end is None:
                        self.take(view, response)
                    await asyncio.sleep(self.rng.random() * self.task.read_seconds)
            view.finish(is_well=True)
        except TimeoutError:
            return False
        except PagewireError as failure:
            if failure.code is grpc.StatusCode.NOT_FOUND:
                self.simulation.check_forgotten(self.request)
            else:
                self._check_failure(failure, before)
            return failure.code is not grpc.StatusCode.UNAVAILABLE or self.simulation.is_stopping
        return True

    async def _get_result(self) -> None:
        request, simulation, before = self.request, self.simulation, self.route.moment()
        message = pb.GetResultRequest(request_id=request.name, tenant=request.tenant)
        try:
            result = await self.route.stub().GetResult(message)
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.NOT_FOUND:
                simulation.check_forgotten(request)
            else:
                self._check_failure(decode_error(error, ""), before)
            return
        view = View(request)
        for output in result.outputs:
            if output.token_ids or output.text or output.prompt_logprobs or output.HasField("usage"):
                self.take(view, output)
        if result.state == pb.RESULT_STATE_FINISHED:
            view.finish(is_well=True)
        elif result.state == pb.RESULT_STATE_FAILED:
            failure = decode_failure(pb.StreamFailure(code=result.failure.code, message=result.failure.message))
            self._check_failure(failure, self.began)
        else:
            assert result.state == pb.RESULT_STATE_RUNNING
        simulation.reached[f"a result is {pb.ResultState.Name(result.state)}"] += 1


class SlowClient:
    """A client that writes its own messages on one RPC, and reads no response before a given time."""

    def __init__(self, simulation: Simulation, slow: SlowCall) -> None:
        self.simulation = simulation
        self.slow = slow
        self.rng = Random(f"slow client {simulation.scenario.seed} {slow.requests[0].name}")
        self.route = simulation.route(by_front_end=slow.by_front_end)
        self._views: dict[int, View] = {}  # by first stream
        self._first: dict[int, int] = {}  # the request's first stream, by stream
        self._outbox: asyncio.Queue[pb.GenerateManyRequest | None] = asyncio.Queue()  # None: no more messages
        self._is_closed = False
        self._num_messages = 0
        self._weight = 0
        self.began = self.route.moment()

    async def run(self) -> None:
        await asyncio.sleep(self.slow.time)
        self._prepare()
        self.began = before = self.route.moment()
        simulation = self.simulation
        call = self.route.stub().GenerateMany()
        writing = simulation.begin(self._write(call))
        if self.slow.gives_up_after is not None:
            simulation.loop.call_later(self.slow.gives_up_after, call.cancel)
        try:
            await asyncio.sleep(self.slow.reads_from)
            is_late = self.slow.reads_from > 10 and simulation.scenario.step_seconds < 0.1
            found_all_done = is_late and not self.route.is_excused(before)
            if found_all_done:
                self._check_nothing_waits()
            async with asyncio.timeout(PATIENCE):
                async for message in call:
                    self._take(message)
                    self._num_messages += 1
                    if self._is_over and not self._is_closed:
                        self._close()
            if found_all_done:
                self._check_num_messages()
            assert self._is_over or simulation.is_stopping, "S6: the call ends, and an end is missing"
        except asyncio.CancelledError:
            if self.slow.gives_up_after is None:
                raise
        except grpc.aio.AioRpcError as error:
            simulation.check_failure(self.route, None, decode_error(error, ""), before)
        finally:
            writing.cancel()
        for request in self.slow.requests:
            simulation.must_be_gone(request)

    def _prepare(self) -> None:
        stream_id = 0
        invalid = [
            SimulatedRequest(f"{self.slow.requests[0].name}.{number}", "", (1,), 1, 0, is_invalid=True)
            for number in range(self.slow.num_invalid)
        ]
        for request in (*self.slow.requests, *invalid):
            submission = pb.Submission(
                stream_id=stream_id,
                request=request.message,
                token_only=self.slow.token_only,
                tells_kept=self.slow.tells_kept,
            )
            self._outbox.put_nowait(pb.GenerateManyRequest(submit=submission))
            self._views[stream_id] = View(request, has_text=not self.slow.token_only)
            self._first.update(dict.fromkeys(range(stream_id, stream_id + request.n), stream_id))
            stream_id += request.n
        if self.slow.closes_early:
            self._close()

    def _close(self) -> None:
        self._is_closed = True
        self._outbox.put_nowait(None)

    async def _write(self, call: Any) -> None:
        try:
            while (message := await self._outbox.get()) is not None:
                await call.write(message)
            call.half_close()
        except (grpc.aio.AioRpcError, asyncio.InvalidStateError):
            return

    def _check_nothing_waits(self) -> None:
        """Check that requests end even if their client does not read, and that unread failures are bounded."""
        for request in self.slow.requests:
            assert not self.simulation.is_served(request.key), "a request waits for its reader"
        self.simulation.check_unread_failures()
        self.simulation.reached["a slow reader finds all done"] += 1

    def _check_num_messages(self) -> None:
        """Check that outputs were merged into few messages while the client did not read."""
        scenario = self.simulation.scenario
        most = (
            scenario.client_weather.window
            + 4
            + 2 * len(scenario.losses)
            + self._weight // scenario.max_message_weight
            + self.slow.num_invalid
        )
        assert self._num_messages <= most, f"a slow reader gets {self._num_messages} messages, {most} would do"

    @property
    def _is_over(self) -> bool:
        return all(view.is_over for view in self._views.values())

    def _take(self, message: pb.GenerateManyResponse) -> None:
        counts = message.num_tokens or [1] * len(message.stream_ids)
        self._check_weight([*counts, *map(_weight, message.deltas)])
        assert sum(counts) == len(message.token_ids)
        start = 0
        for stream_id, count in zip(message.stream_ids, counts, strict=True):
            view = self._views[self._first[stream_id]]
            assert self.slow.token_only
            assert not view.request.has_logprobs, "tokens without their log-probabilities"
            index = stream_id - self._first[stream_id]
            response = pb.GenerateResponse(
                request_id=view.request.name,
                index=index,
                first_token=view.samples[index].num_tokens,
                token_ids=message.token_ids[start : start + count],
            )
            self._deliver(view, response)
            start += count
        for entry in message.deltas:
            first = self._first[entry.stream_id]
            assert entry.stream_id == first + entry.delta.index
            view = self._views[first]
            self._deliver(view, entry.delta)
            if entry.delta.HasField("usage") and self.slow.tells_kept and not self._is_closed:
                num_kept = self.rng.randint(0, entry.delta.usage.completion_tokens)
                stop = pb.StreamStop(stream_id=entry.stream_id, num_tokens=num_kept)
                self._outbox.put_nowait(pb.GenerateManyRequest(stop=stop))
            if view.has_ended_well:
                view.finish(is_well=True)
        for failed in message.failures:
            view = self._views[failed.stream_id]
            view.finish(is_well=False)
            self.simulation.check_failure(self.route, view.request, decode_failure(failed), self.began)

    def _check_weight(self, weights: list[int]) -> None:
        """Check that nothing was added to a message that was already full."""
        self._weight += sum(weights)
        assert sum(weights[:-1]) < self.simulation.scenario.max_message_weight, "a message is too large"

    def _deliver(self, view: View, response: pb.GenerateResponse) -> None:
        view.take(response)
        self.simulation.note("read", view.request.name, response.index, response.first_token, *response.token_ids)


def _weight(entry: pb.StreamDelta) -> int:
    delta = entry.delta
    num_logprobs = sum(1 + len(entry.top) for entry in (*delta.logprobs, *delta.prompt_logprobs))
    return 1 + len(delta.token_ids) + len(delta.text) + len(delta.embedding) + 32 * num_logprobs
