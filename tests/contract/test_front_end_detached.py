"""Detached requests through front ends: every server knows every request id, and each tenant sees only its own."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable
from pathlib import Path
from typing import Any

import grpc
import pytest

from pagewire import AsyncClient, SamplingParams
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2_grpc as pb_grpc
from scheduler_service.api.grpc import scheduler_servicer
from testing.scheduler_stack import VOCAB_SIZE, details, expected_tokens, request, serve
from testing.serving.failures import failure_of
from testing.serving.front_end import DEADLINE, serve_both, serve_front_end
from testing.serving.tenants import (
    code_of,
    credentials,
    read_to_end,
    remove_tenant,
    serve_tenants,
    write_tenants,
)
from tests.contract.detached import Metadata, Server, attach, submit, until, until_ended

PROMPT = [5, 6, 7, 8, 9, 10, 11]
LOST = grpc.StatusCode.UNAVAILABLE
CALLS: dict[str, Callable[[Server, str, Metadata], Awaitable[Any]]] = {
    "Submit": lambda server, name, metadata: submit(server, PROMPT, name=name, metadata=metadata),
    "Attach": lambda server, name, metadata: attach(server, name, metadata=metadata),
    "GetResult": lambda server, name, metadata: server.stub.GetResult(
        pb.GetResultRequest(request_id=name), metadata=metadata
    ),
    "GetRequest": lambda server, name, metadata: server.stub.GetRequest(
        pb.GetRequestRequest(request_id=name), metadata=metadata
    ),
    "KeepRecord": lambda server, name, metadata: server.stub.KeepRecord(
        pb.KeepRecordRequest(request_id=f"{name}-record", record=b"1"), metadata=metadata
    ),
    "DeleteResult": lambda server, name, metadata: server.stub.DeleteResult(
        pb.DeleteResultRequest(request_id=name), metadata=metadata
    ),
    "Abort": lambda server, name, metadata: server.stub.Abort(pb.AbortRequest(request_id=name), metadata=metadata),
}


async def test_every_server_serves_every_request_id(checkpoint: Path) -> None:
    async with serve_both(checkpoint) as (stack, one), serve_front_end(checkpoint, stack.url) as two:
        stack.worker.step_seconds = 0.002
        doors = (stack, one, two)
        names = [await submit(door, PROMPT, max_tokens=60, seed=seed, n=2) for seed, door in enumerate(doors)]
        for name in names:
            found = await asyncio.gather(
                *(door.stub.GetRequest(pb.GetRequestRequest(request_id=name)) for door in doors)
            )
            assert {(each.request_id, each.num_prompt_tokens) for each in found} == {(name, len(PROMPT))}
            early = [await door.stub.GetResult(pb.GetResultRequest(request_id=name)) for door in doors]
            assert {each.state for each in early} == {pb.RESULT_STATE_RUNNING}
        for seed, name in enumerate(names):
            expected = [expected_tokens(PROMPT, 60, seed=seed, sample_index=index) for index in range(2)]
            wholes = await asyncio.gather(*(attach(door, name, n=2) for door in doors))
            rests = await asyncio.gather(*(attach(door, name, 17, n=2) for door in doors))
            results = [await until_ended(door, name) for door in doors]
            for whole, rest, result in zip(wholes, rests, results, strict=True):
                assert whole.token_ids == expected
                assert whole.texts == wholes[0].texts
                assert rest.token_ids == [token_ids[17:] for token_ids in expected]
                assert result == results[0]
            assert [list(output.token_ids) for output in results[0].outputs] == expected


async def test_the_scheduler_decodes_text_and_stop_texts(checkpoint: Path) -> None:
    async with serve_both(checkpoint) as (stack, front):
        direct = await stack.generate(request("once upon", max_tokens=200, stop=[" ", "q"]))
        name = await submit(front, "once upon", max_tokens=200, stop=[" ", "q"])
        attached = await attach(front, name)
        assert (attached.texts[0], attached.last[0].stop_text) == (direct.texts[0], direct.last[0].stop_text)


@pytest.mark.parametrize(
    "call",
    [
        *(
            lambda server, each=each: CALLS[each](server, "unknown", ())
            for each in CALLS
            if each not in ("Submit", "KeepRecord")
        ),
        lambda server: attach(server, "known", 1000),
        lambda server: server.stub.Attach(pb.AttachRequest(request_id="known", from_tokens=[0, 0])).read(),
        lambda server: submit(server, PROMPT, name="known"),
        lambda server: submit(server, PROMPT, temperature=-1.0),
        lambda server: submit(server, [VOCAB_SIZE]),
        lambda server: submit(server, PROMPT, name="x" * 200),
        lambda server: server.stub.Submit(pb.SubmitRequest()),
        lambda server: attach(server, "failed"),
        lambda server: server.stub.Submit(pb.SubmitRequest(request=request(PROMPT, max_tokens=250))),
    ],
)
async def test_errors_are_the_schedulers(checkpoint: Path, call: Callable[[Server], Any]) -> None:
    async with serve_both(checkpoint) as (stack, front):
        await submit(front, PROMPT, name="known", max_tokens=5)
        await submit(front, [1, 2, VOCAB_SIZE - 1, 4], name="failed")  # the output is NaN only
        await until_ended(front, "failed")
        direct, through = [await failure_of(call(server)) for server in (stack, front)]
        assert (through.code(), through.details()) == (direct.code(), direct.details())
        assert details(through) == details(direct)


async def test_every_server_can_abort_every_request(checkpoint: Path) -> None:
    async with serve_both(checkpoint) as (stack, one), serve_front_end(checkpoint, stack.url) as two:
        stack.worker.step_seconds = 0.01
        for name, door, other in (("a", one, two), ("b", one, stack), ("c", stack, one), ("d", one, one)):
            await submit(door, PROMPT, name=name)
            await other.stub.Abort(pb.AbortRequest(request_id=name))
            assert (await attach(door, name)).last[0].finish_reason == pb.FINISH_REASON_ABORT
        attached = request(PROMPT)
        attached.request_id = "attached"
        running = asyncio.create_task(one.generate(attached))
        await stack.until(lambda loads: loads.num_running == 1)
        await two.stub.Abort(pb.AbortRequest(request_id="attached"))
        assert (await running).last[0].finish_reason == pb.FINISH_REASON_ABORT


async def test_a_reader_that_leaves_or_is_late_leaves_the_request_alone(
    checkpoint: Path, open_attachments: list[object]
) -> None:
    async with serve_both(checkpoint) as (stack, front):
        stack.worker.step_seconds = 0.01
        name = await submit(front, PROMPT, max_tokens=150)
        call = front.stub.Attach(pb.AttachRequest(request_id=name))
        await call.read()
        assert len(open_attachments) == 1
        call.cancel()
        await until(lambda: not open_attachments)
        late = front.stub.Attach(pb.AttachRequest(request_id=name), timeout=0.2)
        assert (await failure_of(read_to_end(late))).code() is grpc.StatusCode.DEADLINE_EXCEEDED
        await until(lambda: not open_attachments)
        assert (await attach(front, name)).token_ids[0] == expected_tokens(PROMPT, 150)


class EndlessScheduler(pb_grpc.SchedulerServiceServicer):
    """A fake scheduler with one request whose output never ends."""

    def __init__(self, info: pb.GetServerInfoResponse) -> None:
        self.info, self.num_sent = info, 0

    async def GenerateMany(self, requests: Any, context: object) -> AsyncIterator[pb.GenerateManyResponse]:
        yield pb.GenerateManyResponse(server_info=self.info)
        await asyncio.Event().wait()

    async def Attach(self, request: pb.AttachRequest, context: object) -> AsyncIterator[pb.GenerateResponse]:
        while True:
            yield pb.GenerateResponse(text="x" * 100_000)
            self.num_sent += 1

    async def GetResult(self, request: pb.GetResultRequest, context: object) -> pb.GetResultResponse:
        return pb.GetResultResponse(outputs=[pb.GenerateResponse(text="x" * 3_000_000)])


async def test_readers_that_read_nothing_do_not_block_others(checkpoint: Path) -> None:
    """Readers that read nothing do not delay others, although all readers share the front end's connection to its
    scheduler.
    """
    async with serve(checkpoint) as stack:
        endless = EndlessScheduler(await stack.stub.GetServerInfo(pb.GetServerInfoRequest()))
    server = grpc.aio.server()
    pb_grpc.add_SchedulerServiceServicer_to_server(endless, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with serve_front_end(checkpoint, f"127.0.0.1:{port}") as front, asyncio.timeout(DEADLINE):
        # A client whose own buffers are small.
        channel = grpc.aio.insecure_channel(front.url, options=(("grpc.http2.bdp_probe", 0),))
        stub = pb_grpc.SchedulerServiceStub(channel)
        calls = [stub.Attach(pb.AttachRequest()) for _ in range(5)]
        await asyncio.gather(*(call.read() for call in calls))
        num_sent = -1
        while num_sent < endless.num_sent:
            num_sent = endless.num_sent
            await asyncio.sleep(0.5)
        assert num_sent < 5 * 10  # messages of 100 kB each
        for _ in range(3):
            result = await front.stub.GetResult(pb.GetResultRequest())
            assert len(result.outputs[0].text) == 3_000_000
        await channel.close()
    await server.stop(0)


async def test_calls_that_are_open_are_bounded(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_service.links.scheduler.forwarder._MAX_CALLS", 1)
    async with serve_both(checkpoint) as (stack, front):
        stack.worker.step_seconds = 0.02
        name = await submit(front, PROMPT, max_tokens=100)
        first = front.stub.Attach(pb.AttachRequest(request_id=name))
        await first.read()
        error = await failure_of(
            front.stub.GetResult(pb.GetResultRequest(request_id=name)), grpc.StatusCode.RESOURCE_EXHAUSTED
        )
        assert details(error)[-1].retry_delay.seconds == 1
        await read_to_end(first)
        await until_ended(front, name)


async def test_a_lost_scheduler_is_unavailable(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack, serve_front_end(checkpoint, stack.url) as front:
        stack.worker.step_seconds = 0.02
        name = await submit(front, PROMPT)
        call = front.stub.Attach(pb.AttachRequest(request_id=name))
        await call.read()
        stack.stop.set()
        stack.stop_now.set()
        await failure_of(read_to_end(call), LOST)
        await stack.running
        await front.until_ready(False)
        for each in CALLS:
            error = await failure_of(CALLS[each](front, name, ()), LOST)
            assert "no connection to the scheduler" in (error.details() or "")
            assert details(error)[-1].retry_delay.seconds == 2


async def test_a_client_continues_at_another_server(checkpoint: Path) -> None:
    async with serve_both(checkpoint) as (stack, one), serve_front_end(checkpoint, stack.url) as two:
        stack.worker.step_seconds = 0.01
        async with AsyncClient(two.url) as client:
            name = await client.submit(None, SamplingParams(max_tokens=200, seed=0), prompt_token_ids=PROMPT)
            call = one.stub.Attach(pb.AttachRequest(request_id=name))
            token_ids = list((await call.read()).token_ids)
            one.stop.set()
            with contextlib.suppress(grpc.aio.AioRpcError):
                while (response := await call.read()) is not grpc.aio.EOF:
                    token_ids += response.token_ids
            assert await call.code() is LOST
            async for output in client.attach(name, from_token=len(token_ids)):
                token_ids += output.token_ids
        assert token_ids == expected_tokens(PROMPT, 200)


async def test_what_is_said_beside_a_request_goes_along(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[Any] = []
    read_submitted = scheduler_servicer.read_submitted
    monkeypatch.setattr(
        scheduler_servicer,
        "read_submitted",
        lambda message, call, model: calls.append(call) or read_submitted(message, call, model),
    )
    trace = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
    async with serve_both(checkpoint) as (_, front):
        await submit(front, PROMPT, metadata=(("x-session-id", "chat"), ("traceparent", trace)))
    assert (calls[0].session_id, calls[0].trace) == ("chat", {"traceparent": trace})


# Tenants


async def test_each_tenant_has_its_own_ids_at_every_door(checkpoint: Path, tenants: Path, tmp_path: Path) -> None:
    acme, globex = credentials("acme"), credentials("globex")
    async with serve_tenants(checkpoint, tmp_path, tenants) as (stack, front):
        for door, other in ((stack, front), (front, stack)):
            name = await submit(door, PROMPT, metadata=acme)
            for each in ("Attach", "GetResult", "GetRequest", "Abort"):
                for server in (stack, front):
                    assert await code_of(CALLS[each](server, name, globex)) is grpc.StatusCode.NOT_FOUND
                    assert await code_of(CALLS[each](server, name, credentials("root"))) is grpc.StatusCode.NOT_FOUND
                    assert await code_of(CALLS[each](server, name, ())) is grpc.StatusCode.UNAUTHENTICATED
            # A request of another tenant with the same id does not conflict.
            assert await submit(other, PROMPT, name=name, metadata=globex) == name
            message = pb.GetResultRequest(request_id=name, tenant="acme")
            for server in (stack, front):
                assert await code_of(server.stub.GetResult(message, metadata=globex)) is (
                    grpc.StatusCode.PERMISSION_DENIED
                )
                assert (await server.stub.GetResult(message, metadata=credentials("root"))).request_id == name
            for tenant in (acme, globex):
                await CALLS["Abort"](other, name, tenant)


async def test_a_tenant_that_only_the_front_end_knows_is_refused(
    checkpoint: Path, tenants: Path, tmp_path: Path
) -> None:
    own = tmp_path / "own.yaml"
    write_tenants(own)
    remove_tenant(tenants, "acme")
    async with serve_tenants(checkpoint, tmp_path, tenants, own) as (_, front):
        for call in CALLS.values():
            error = await failure_of(call(front, "name", credentials("acme")), grpc.StatusCode.UNAUTHENTICATED)
            assert "'acme' is not known to the scheduler; the front end's" in (error.details() or "")
            assert await code_of(call(front, "name", credentials("globex"))) in (None, grpc.StatusCode.NOT_FOUND)


async def test_only_operators_pass_calls_on(checkpoint: Path, tenants: Path, tmp_path: Path) -> None:
    async with serve_tenants(checkpoint, tmp_path, tenants, operator="globex") as (stack, front):
        for call in CALLS.values():
            for tenant in ("acme", "globex"):
                assert await code_of(call(front, "name", credentials(tenant))) is grpc.StatusCode.PERMISSION_DENIED
            forwarded_metadata = (*credentials("acme"), ("x-tenants-revision", "any"))
            assert await code_of(call(stack, "name", forwarded_metadata)) is grpc.StatusCode.PERMISSION_DENIED


async def test_a_front_end_without_tenants_cannot_use_a_scheduler_with_tenants(
    checkpoint: Path, tenants: Path, tmp_path: Path
) -> None:
    """A front end without tenants cannot forward RPCs to a scheduler with tenants.

    This happens if its scheduler was just replaced by one with tenants.
    """
    metadata = (*credentials("root"), ("x-tenants-revision", ""))
    async with serve_tenants(checkpoint, tmp_path, tenants) as (stack, _):
        message = pb.GetResultRequest(request_id="name", tenant="acme")
        await failure_of(stack.stub.GetResult(message, metadata=metadata), grpc.StatusCode.UNAUTHENTICATED)
    async with serve(checkpoint) as stack:
        metadata = (("x-tenants-revision", "any"),)
        await failure_of(stack.stub.GetResult(message, metadata=metadata), grpc.StatusCode.INVALID_ARGUMENT)


async def test_revoked_tenants_lose_what_they_submitted(checkpoint: Path, tenants: Path, tmp_path: Path) -> None:
    own = tmp_path / "own.yaml"
    write_tenants(own)
    acme = credentials("acme")
    async with serve_tenants(checkpoint, tmp_path, tenants, own) as (_, front):
        name = await submit(front, PROMPT, metadata=acme)
        call = front.stub.Attach(pb.AttachRequest(request_id=name), metadata=acme)
        await call.read()
        remove_tenant(tenants, "acme")
        assert (await failure_of(read_to_end(call))).code() is grpc.StatusCode.UNAUTHENTICATED
        for each in CALLS.values():
            assert await code_of(each(front, name, acme)) is grpc.StatusCode.UNAUTHENTICATED


async def test_readers_end_when_the_front_end_knows_them_no_more(
    checkpoint: Path, tenants: Path, tmp_path: Path, open_attachments: list[object]
) -> None:
    own = tmp_path / "own.yaml"
    write_tenants(own)
    acme = credentials("acme")
    async with serve_tenants(checkpoint, tmp_path, tenants, own) as (stack, front):
        name = await submit(front, PROMPT, max_tokens=100, metadata=acme)
        call = front.stub.Attach(pb.AttachRequest(request_id=name), metadata=acme)
        await call.read()
        remove_tenant(own, "acme")
        assert (await failure_of(read_to_end(call))).code() is grpc.StatusCode.UNAUTHENTICATED
        await until(lambda: not open_attachments)
        assert (await attach(stack, name, metadata=acme)).token_ids[0] == expected_tokens(PROMPT, 100)
