"""Tenants over gRPC: authentication, quotas, and isolation between tenants."""

import asyncio
import contextlib
import gc
import logging
import re
import resource
from functools import partial
from pathlib import Path

import grpc
import grpc.aio
import pytest
from cryptography import x509

from pagewire import AsyncClient, Client, SamplingParams
from pagewire.cli import command
from pagewire.client.errors import PagewireError
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from scheduler_service import server
from scheduler_service.config import SchedulerConfig
from scheduler_service.serving.detached import DetachedRequests
from scheduler_service.serving.tenants.tenant_file import TenantFile, parse_tenants
from testing.scheduler_stack import Stack, request, serve
from testing.serving.certificates import Authority
from testing.serving.failures import failure_of
from testing.serving.tenants import (
    KEYS,
    PROMPT,
    code_of,
    credentials,
    digest,
    generate,
    remove_tenant,
    slow_stack,
    write_tenants,
)


def look(file: TenantFile) -> None:
    file.file.look(file.file.take)


def write_text(path: Path, text: str) -> None:
    path.write_text(text)


async def test_only_known_callers_are_served(checkpoint: Path, tenants: Path) -> None:
    async with serve(checkpoint, tenants=str(tenants)) as stack:
        bad = [
            None,
            (("authorization", "Bearer nobody's"),),
            (("authorization", f"Bearer {digest(KEYS['acme'])}"),),  # a digest in the file is not a valid key
            (("authorization", f"Basic {KEYS['acme']}"),),
            (("authorization", "Bearer "),),
        ]
        for metadata in bad:
            for call in (
                stack.stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=metadata),
                stack.stub.Submit(pb.SubmitRequest(request=request(PROMPT, max_tokens=2)), metadata=metadata),
                stack.stub.Generate(request(PROMPT, max_tokens=2), metadata=metadata).read(),
            ):
                assert await code_of(call) is grpc.StatusCode.UNAUTHENTICATED
        result = await generate(stack, request(PROMPT, max_tokens=2), "acme")
        assert len(result.token_ids[0]) == 2
        lower_case = (("authorization", f"bearer {KEYS['acme']}"),)
        assert await code_of(stack.stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=lower_case)) is None


async def test_no_tenants_priority_stands_above_a_fair_share(checkpoint: Path, tenants: Path) -> None:
    """The server has one row, and globex sends requests continuously at the highest priority. Acme's request must still
    run.
    """
    async with serve(checkpoint, tenants=str(tenants), max_num_seqs=1) as stack:
        stack.worker.step_seconds = 0.005
        num_hostile = 0
        queue_is_full = asyncio.Event()

        async def send_without_end() -> None:
            nonlocal num_hostile
            while True:
                message = request(PROMPT, max_tokens=5)
                message.priority = -(2**31)
                await generate(stack, message, "globex")
                num_hostile += 1
                queue_is_full.set()

        hostile = [asyncio.create_task(send_without_end()) for _ in range(8)]
        await queue_is_full.wait()
        before = num_hostile
        async with asyncio.timeout(20):
            await generate(stack, request(PROMPT, max_tokens=5), "acme")
        assert num_hostile - before <= 8
        for task in hostile:
            task.cancel()
        await asyncio.gather(*hostile, return_exceptions=True)


async def test_our_client_and_command_send_a_key(
    checkpoint: Path, tenants: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def complete(url: str) -> str:
        with Client(url, api_key=KEYS["acme"]) as client:
            return client.complete("once", SamplingParams(max_tokens=3, seed=1)).outputs[0].text

    def run_command(url: str) -> int:
        return command.main(["complete", "--url", url, "--max-tokens", "3", "--seed", "1", "once"])

    async with serve(checkpoint, tenants=str(tenants)) as stack:
        text = await asyncio.to_thread(complete, stack.url)
        async with AsyncClient(stack.url, api_key=KEYS["globex"]) as client:
            completion = await client.complete("once", SamplingParams(max_tokens=3, seed=1))
            assert completion.outputs[0].text == text
            assert (await client.info()).has_tokenizer
        async with AsyncClient(stack.url) as client:
            with pytest.raises(PagewireError) as error:
                await client.info()
            assert error.value.code is grpc.StatusCode.UNAUTHENTICATED
        monkeypatch.setenv("PAGEWIRE_API_KEY", KEYS["acme"])
        assert await asyncio.to_thread(run_command, stack.url) == 0
        assert text in capsys.readouterr().out
        monkeypatch.setenv("PAGEWIRE_API_KEY", "nobody's")
        assert await asyncio.to_thread(run_command, stack.url) == 1
        assert "UNAUTHENTICATED" in capsys.readouterr().err


@pytest.mark.parametrize("key", ["", " x", "ü", "a\nb"])
def test_a_key_that_no_header_can_hold_is_refused(key: str) -> None:
    with pytest.raises(ValueError, match="api_key"):
        AsyncClient("127.0.0.1:1", api_key=key)


async def test_errors_and_logs_hold_no_key(checkpoint: Path, tenants: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    async with serve(checkpoint, tenants=str(tenants)) as stack:
        metadata = (("authorization", "Bearer guessed-secret"),)
        error = await failure_of(stack.stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=metadata))
        await generate(stack, request(PROMPT, max_tokens=2), "acme")
    assert "guessed-secret" not in error.details()
    assert not any(secret in caplog.text for secret in ("guessed-secret", *KEYS.values()))


async def test_nothing_of_another_tenant_is_seen(checkpoint: Path, tenants: Path) -> None:
    async with slow_stack(checkpoint, tenants) as stack:
        message = request(PROMPT, max_tokens=150)
        message.request_id = "mine"
        submitted = pb.SubmitRequest(request=message)
        await stack.stub.Submit(submitted, metadata=credentials("acme"))
        assert (
            await code_of(stack.stub.Submit(submitted, metadata=credentials("acme"))) is grpc.StatusCode.ALREADY_EXISTS
        )

        async def codes(tenant: str, field: str = "") -> list[grpc.StatusCode | None]:
            """Return the status codes of four RPCs about one request. The last RPC aborts the request."""
            stub, metadata = stack.stub, credentials(tenant)
            named = {"tenant": field, "request_id": "mine"}
            return [
                await code_of(stub.GetRequest(pb.GetRequestRequest(**named), metadata=metadata)),
                await code_of(stub.GetResult(pb.GetResultRequest(**named), metadata=metadata)),
                await code_of(stub.Attach(pb.AttachRequest(**named), metadata=metadata).read()),
                await code_of(stub.Abort(pb.AbortRequest(**named), metadata=metadata)),
            ]

        assert await codes("globex") == [grpc.StatusCode.NOT_FOUND] * 4
        assert await codes("globex", "acme") == [grpc.StatusCode.PERMISSION_DENIED] * 4
        # Another tenant can use the same request id.
        await stack.stub.Submit(submitted, metadata=credentials("globex"))
        report = await stack.stub.GetRequest(pb.GetRequestRequest(request_id="mine"), metadata=credentials("globex"))
        assert report.tenant == "globex"
        assert all(not holder.request_id or holder.request_id == "mine" for holder in report.holders)
        for metadata, code in ((credentials("acme"), grpc.StatusCode.PERMISSION_DENIED), (credentials("root"), None)):
            assert await code_of(stack.stub.GetBlocks(pb.GetBlocksRequest(), metadata=metadata)) is code
            events = stack.stub.SubscribeKvEvents(pb.SubscribeKvEventsRequest(), metadata=metadata)
            assert await code_of(events.read()) is code
            events.cancel()
        # An operator acts for the tenant that it names.
        assert await codes("root") == [grpc.StatusCode.NOT_FOUND] * 4
        assert await codes("root", "acme") == [None] * 4


async def test_a_prefix_is_not_shared_between_tenants(checkpoint: Path, tenants: Path) -> None:
    async with serve(checkpoint, tenants=str(tenants)) as stack:
        message = request(PROMPT, max_tokens=2)
        cached = {}
        for name in ("acme", "acme", "globex", "root"):
            result = await generate(stack, message, name)
            cached.setdefault(name, []).append(result.last[0].usage.cached_tokens)
        assert cached["acme"][0] == 0
        assert cached["acme"][1] > 0
        assert cached["globex"] == cached["root"] == [0]


async def test_only_operators_are_told_what_the_server_is_doing(
    checkpoint: Path, tenants: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    async with serve(checkpoint, tenants=str(tenants)) as stack:
        for tenant, code in (("acme", grpc.StatusCode.PERMISSION_DENIED), ("root", None)):
            asked = stack.stub.GetLoads(pb.GetLoadsRequest(), metadata=credentials(tenant))
            assert await code_of(asked) is code
            shared = stack.stub.GenerateMany(metadata=credentials(tenant))
            await shared.write(pb.GenerateManyRequest(get_loads={}))
            await shared.done_writing()

            async def loads_in(call: grpc.aio.StreamStreamCall = shared) -> bool:
                told = [message.loads.worker_connected async for message in call if message.HasField("loads")]
                assert len(told) == 1, "they are told when they are asked for"
                return told[0]

            assert await code_of(loads_in()) is code
            monkeypatch.setenv("PAGEWIRE_API_KEY", KEYS[tenant])
            assert await asyncio.to_thread(command.main, ["status", "--url", stack.url]) == 0
            text = capsys.readouterr().out
            assert ("only operators may see it" in text) == (tenant == "acme")
            assert "vocabulary" in text


async def test_quotas_hold_one_tenant_and_no_other(checkpoint: Path, tenants: Path) -> None:
    write_tenants(tenants, acme={"max_requests": 2})
    async with slow_stack(checkpoint, tenants) as stack:
        running = [asyncio.create_task(generate(stack, request(PROMPT, max_tokens=100), "acme")) for _ in range(2)]
        await until_requests(stack, 2)
        await failure_of(
            generate(stack, request(PROMPT, max_tokens=2), "acme"),
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "uses 2 requests, the request needs 1 more, and the quota is 2",
        )
        assert len((await generate(stack, request(PROMPT, max_tokens=2), "globex")).token_ids[0]) == 2
        running[0].cancel()  # a client that disconnects returns its quota
        await until_requests(stack, 1)
        assert len((await generate(stack, request(PROMPT, max_tokens=2), "acme")).token_ids[0]) == 2
        running[1].cancel()
        await asyncio.gather(*running, return_exceptions=True)


async def until_requests(stack: Stack, number: int) -> None:
    async with asyncio.timeout(10):
        while True:
            loads = await stack.stub.GetLoads(pb.GetLoadsRequest(), metadata=credentials("root"))
            if loads.num_running + loads.num_waiting == number:
                return
            await asyncio.sleep(0.01)


async def test_blocks_and_queued_tokens_have_quotas(checkpoint: Path, tenants: Path) -> None:
    # With blocks of 4 tokens, 40 + 100 tokens need 35 blocks.
    write_tenants(tenants, acme={"max_blocks": 40}, globex={"max_queued_tokens": 60})
    async with slow_stack(checkpoint, tenants) as stack:
        large = asyncio.create_task(generate(stack, request(PROMPT, max_tokens=100), "acme"))
        await until_requests(stack, 1)
        await failure_of(
            generate(stack, request(PROMPT, max_tokens=2), "acme"),
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "uses 35 blocks, the request needs 11 more, and the quota is 40",
        )
        assert len((await generate(stack, request(PROMPT[:10], max_tokens=2), "acme")).token_ids[0]) == 2
        large.cancel()
        # A request that can never fit is an invalid argument.
        for message, tenant, field in (
            (request(PROMPT, max_tokens=100, n=2), "acme", "lower max_tokens"),
            (request(PROMPT * 2, max_tokens=2), "globex", "shorten it"),
        ):
            await failure_of(generate(stack, message, tenant), grpc.StatusCode.INVALID_ARGUMENT, field)
        # The prompt's 40 tokens count as queued until the first token arrives.
        both = await asyncio.gather(
            *(generate(stack, request(PROMPT, max_tokens=20), "globex") for _ in range(2)), return_exceptions=True
        )
        codes = [result.code() for result in both if isinstance(result, grpc.aio.AioRpcError)]
        assert codes == [grpc.StatusCode.RESOURCE_EXHAUSTED]
        assert len((await generate(stack, request(PROMPT, max_tokens=2), "globex")).token_ids[0]) == 2


async def test_samples_and_beams_have_a_quota(checkpoint: Path, tenants: Path) -> None:
    write_tenants(tenants, acme={"max_sequences": 4})
    async with slow_stack(checkpoint, tenants) as stack:
        running = asyncio.create_task(generate(stack, request(PROMPT, max_tokens=100, n=3), "acme"))
        await until_requests(stack, 3)
        await failure_of(
            generate(stack, request(PROMPT, max_tokens=2, beam_width=2, temperature=0), "acme"),
            grpc.StatusCode.RESOURCE_EXHAUSTED,
            "uses 3 sequences, the request needs 2 more, and the quota is 4",
        )
        assert len((await generate(stack, request(PROMPT, max_tokens=2), "acme")).token_ids[0]) == 2
        running.cancel()
        for message, what in (
            (request(PROMPT, max_tokens=2, n=5), "5 samples"),
            (request(PROMPT, max_tokens=2, beam_width=5, temperature=0), "5 beams"),
        ):
            await failure_of(
                generate(stack, message, "acme"),
                grpc.StatusCode.INVALID_ARGUMENT,
                f"has {what}, this tenant may have 4",
            )
        await asyncio.gather(running, return_exceptions=True)


async def test_every_claim_is_given_back(checkpoint: Path, tenants: Path) -> None:
    """All quotas of a request are released.

    The quota is exactly one request of three samples, and the next request must be accepted after any outcome of the
    previous one.
    """
    write_tenants(tenants, acme={"max_requests": 1, "max_sequences": 3, "max_queued_tokens": 40, "max_blocks": 100})
    async with slow_stack(checkpoint, tenants) as stack:
        for message in (
            request(PROMPT, max_tokens=3, n=3),
            request(PROMPT, max_tokens=3, beam_width=2, temperature=0),
            request("once upon a time", max_tokens=3),
        ):
            await generate(stack, message, "acme")
            bad = request(PROMPT, max_tokens=3, top_p=7.0)
            assert await code_of(generate(stack, bad, "acme")) is grpc.StatusCode.INVALID_ARGUMENT
        call = stack.stub.Generate(request(PROMPT, max_tokens=100), metadata=credentials("acme"))
        await call.read()
        call.cancel()
        await until_requests(stack, 0)
        submitted = pb.SubmitRequest(request=request(PROMPT, max_tokens=100))
        answer = await stack.stub.Submit(submitted, metadata=credentials("acme"))
        named = pb.AbortRequest(request_id=answer.request_id)
        await stack.stub.Abort(named, metadata=credentials("acme"))
        await until_requests(stack, 0)
        assert len((await generate(stack, request(PROMPT, max_tokens=2), "acme")).token_ids[0]) == 2


async def test_results_that_others_keep_are_not_pushed_out(
    checkpoint: Path, tenants: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(server, "DetachedRequests", partial(DetachedRequests, max_ended=3))
    async with serve(checkpoint, tenants=str(tenants)) as stack:

        async def submit_and_wait(tenant: str) -> str:
            submitted = pb.SubmitRequest(request=request(PROMPT, max_tokens=1))
            answer = await stack.stub.Submit(submitted, metadata=credentials(tenant))
            attached = stack.stub.Attach(pb.AttachRequest(request_id=answer.request_id), metadata=credentials(tenant))
            async for _ in attached:
                pass
            return answer.request_id

        async def is_kept(tenant: str, request_id: str) -> bool:
            call = stack.stub.GetResult(pb.GetResultRequest(request_id=request_id), metadata=credentials(tenant))
            return await code_of(call) is None

        kept = await submit_and_wait("acme")
        flood = [await submit_and_wait("globex") for _ in range(6)]
        assert await is_kept("acme", kept)
        assert [await is_kept("globex", request_id) for request_id in flood] == [False] * 4 + [True] * 2


async def until_code(stack: Stack, tenant: str, code: grpc.StatusCode | None) -> None:
    """Wait until the server has read a tenants file by which an RPC of this tenant ends with `code`."""
    async with asyncio.timeout(10):
        while await code_of_tenant(stack, tenant) is not code:
            pass


async def code_of_tenant(stack: Stack, tenant: str) -> grpc.StatusCode | None:
    return await code_of(stack.stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=credentials(tenant)))


async def test_the_file_is_read_again_when_it_changes(
    checkpoint: Path, tenants: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(checkpoint, tenants=str(tenants)) as stack:
        code = partial(code_of_tenant, stack)
        assert await code("acme") is None
        write_tenants(tenants, acme={"api_keys": []})
        await until_code(stack, "acme", grpc.StatusCode.UNAUTHENTICATED)
        assert await code("globex") is None
        write_text(tenants, "tenants: [nonsense")
        while not any("the previous contents stay in use" in line for line in caplog.messages):
            assert await code("globex") is None, "what was known stays known"
        assert await code("acme") is grpc.StatusCode.UNAUTHENTICATED
        write_tenants(tenants)
        await until_code(stack, "acme", None)


def test_a_file_that_could_not_be_opened_is_read_again(tenants: Path) -> None:
    """A changed file is read again if the first attempt failed because the process had no free file descriptor."""
    file = TenantFile(str(tenants))
    write_tenants(tenants, acme={"api_keys": []})
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (0, limits[1]))
    try:
        look(file)
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert file.by_key(KEYS["acme"]) is not None, "what was known stays known"
    look(file)
    assert file.by_key(KEYS["acme"]) is None


def test_each_state_of_a_file_is_told_once(tenants: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Each state of the tenants file is logged once, however often the file is checked."""
    caplog.set_level(logging.INFO)
    file = TenantFile(str(tenants))

    def told() -> list[str]:
        caplog.clear()
        for _ in range(5):
            look(file)
            assert file.by_key(KEYS["globex"]) is not None, "what was known stays known"
        return caplog.messages

    assert told() == []
    tenants.unlink()
    tenants.mkdir()  # the path exists, but cannot be read
    [line] = told()
    assert line.endswith("; the previous contents stay in use: 3 tenants")
    assert told() == []
    tenants.rmdir()
    write_text(tenants, "tenants: [nonsense")
    [line] = told()
    assert "not YAML" in line
    assert told() == []
    tenants.unlink()
    [line] = told()
    assert "No such file" in line
    write_tenants(tenants)
    [line] = told()
    assert line == "--tenants: the files match what is in use again: 3 tenants"
    tenants.unlink()
    tenants.mkdir()
    assert len(told()) == 1, "it was well in between"


async def test_a_revoked_tenants_calls_end(checkpoint: Path, tenants: Path) -> None:
    """Streams end, and so do RPCs that stay open for more requests, including their queued requests."""
    async with slow_stack(checkpoint, tenants) as stack:
        stream = stack.stub.Generate(request(PROMPT, max_tokens=200), metadata=credentials("acme"))
        await stream.read()
        shared = stack.stub.GenerateMany(metadata=credentials("acme"))
        await shared.write(submission(0))
        while not (await shared.read()).deltas:
            pass
        other = stack.stub.Generate(request(PROMPT, max_tokens=200), metadata=credentials("globex"))
        await other.read()
        write_tenants(tenants, acme={"api_keys": []})
        with contextlib.suppress(grpc.aio.AioRpcError, asyncio.InvalidStateError):
            await shared.write(submission(16))
        for call in (stream, shared):
            async with asyncio.timeout(10):
                while await code_of(call.read()) is None:
                    pass
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
        await until_requests(stack, 1)
        assert await code_of(other.read()) is None
        other.cancel()


def num_ended_tasks() -> int:
    """Return the number of ended tasks of this test's event loop. Tasks of other tests may be freed at any time."""
    gc.collect()
    loop = asyncio.get_running_loop()
    tasks = [each for each in gc.get_objects() if type(each) is asyncio.Task]
    return sum(task.done() and task.get_loop() is loop for task in tasks)


async def test_calls_that_have_ended_are_forgotten(checkpoint: Path, tenants: Path) -> None:
    async with serve(checkpoint, tenants=str(tenants)) as stack:
        before = num_ended_tasks()
        for _ in range(20):
            await stack.stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=credentials("acme"))
        assert num_ended_tasks() < before + 20


@pytest.mark.parametrize("is_back", [False, True], ids=["gone", "back at once"])
async def test_requests_of_a_removed_tenant_are_ended(checkpoint: Path, tenants: Path, is_back: bool) -> None:
    """The tenant's RPCs, requests that an operator sent for it, and detached requests end, even if the tenant soon
    returns.
    """
    async with slow_stack(checkpoint, tenants) as stack:
        for_acme = request(PROMPT, max_tokens=200)
        for_acme.tenant = "acme"
        calls = [
            stack.stub.Generate(request(PROMPT, max_tokens=200), metadata=credentials("acme")),
            stack.stub.Generate(for_acme, metadata=credentials("root")),
        ]
        for call in calls:
            await call.read()
        submission = pb.SubmitRequest(request=request(PROMPT, max_tokens=200))
        submitted = await stack.stub.Submit(submission, metadata=credentials("acme"))
        other = stack.stub.Generate(request(PROMPT, max_tokens=200), metadata=credentials("globex"))
        await other.read()
        await until_requests(stack, 4)
        remove_tenant(tenants, "acme")
        if is_back:
            await until_code(stack, "acme", grpc.StatusCode.UNAUTHENTICATED)
            write_tenants(tenants)
        async with asyncio.timeout(10):
            for call in calls:
                while await code_of(call.read()) is None:
                    pass
                assert await call.code() is grpc.StatusCode.UNAUTHENTICATED
            await until_requests(stack, 1)
        assert await code_of(other.read()) is None
        other.cancel()
        write_tenants(tenants)
        await until_code(stack, "acme", None)
        kept = pb.GetResultRequest(request_id=submitted.request_id)
        result = await stack.stub.GetResult(kept, metadata=credentials("acme"))
        assert (result.state, result.failure.code) == (pb.RESULT_STATE_FAILED, 16)


async def test_an_operator_names_tenants_without_limits(checkpoint: Path, tenants: Path) -> None:
    write_tenants(tenants, acme={"max_requests": 0})
    async with serve(checkpoint, tenants=str(tenants)) as stack:
        for named, code in (("made up", None), ("acme", grpc.StatusCode.RESOURCE_EXHAUSTED)):
            message = request(PROMPT, max_tokens=2)
            message.tenant = named
            assert await code_of(generate(stack, message, "root")) is code


async def test_a_server_without_tenants_refuses_a_key_that_it_would_ignore(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        assert await code_of(stack.stub.GetServerInfo(pb.GetServerInfoRequest())) is None
        with pytest.raises(grpc.aio.AioRpcError, match="start it with --api-key or --tenants") as error:
            await generate(stack, request(PROMPT, max_tokens=2), "acme")
        assert error.value.code() is grpc.StatusCode.UNAUTHENTICATED


def submission(stream_id: int) -> pb.GenerateManyRequest:
    return pb.GenerateManyRequest(submit=pb.Submission(stream_id=stream_id, request=request(PROMPT, max_tokens=200)))


def authority_of_tenants(folder: Path) -> tuple[Authority, dict[str, str]]:
    """Return an authority whose certificates name tenants, and the options of a scheduler that uses it."""
    authority = Authority("pagewire")
    cert, key = authority.issue("localhost").write(folder, "server")
    write_tenants(folder / "tenants.yaml", initech={"certificates": ["initech.test"]})
    files = {"tls_cert": cert, "tls_key": key, "tls_client_ca": authority.write(folder)}
    return authority, {**files, "host": "localhost", "tenants": str(folder / "tenants.yaml")}


async def test_certificates_name_tenants_too(checkpoint: Path, tmp_path: Path) -> None:
    authority, options = authority_of_tenants(tmp_path)
    async with serve(checkpoint, **options) as stack:
        for name, code in (("initech.test", None), ("stranger.test", grpc.StatusCode.UNAUTHENTICATED)):
            client = authority.issue(name)
            secure = grpc.ssl_channel_credentials(authority.cert, client.key, client.cert)
            async with grpc.aio.secure_channel(stack.url.removeprefix("grpc://"), secure) as channel:
                stub = type(stack.stub)(channel)
                assert await code_of(stub.GetServerInfo(pb.GetServerInfoRequest(), timeout=10)) is code
                # A wrong key is an error even if the certificate is valid.
                metadata = (("authorization", "Bearer nobody's"),)
                call = stub.GetServerInfo(pb.GetServerInfoRequest(), metadata=metadata, timeout=10)
                assert await code_of(call) is grpc.StatusCode.UNAUTHENTICATED


async def test_only_dns_names_of_a_certificate_name_a_tenant(checkpoint: Path, tmp_path: Path) -> None:
    """An e-mail address or URI with the same text does not identify the tenant."""
    authority, options = authority_of_tenants(tmp_path)
    others = (x509.RFC822Name("initech.test"), x509.UniformResourceIdentifier("initech.test"))
    async with serve(checkpoint, **options) as stack:
        for other in others:
            client = authority.issue("stranger.test", other_names=[other])
            secure = grpc.ssl_channel_credentials(authority.cert, client.key, client.cert)
            async with grpc.aio.secure_channel(stack.url.removeprefix("grpc://"), secure) as channel:
                call = type(stack.stub)(channel).GetServerInfo(pb.GetServerInfoRequest(), timeout=10)
                assert await code_of(call) is grpc.StatusCode.UNAUTHENTICATED


async def test_anonymous_callers_may_be_a_tenant(checkpoint: Path, tenants: Path) -> None:
    write_tenants(tenants, gateway={"anonymous": True, "max_requests": 0})
    async with serve(checkpoint, tenants=str(tenants)) as stack:
        assert await code_of(stack.stub.GetServerInfo(pb.GetServerInfoRequest())) is None
        await failure_of(stack.generate(request(PROMPT, max_tokens=2)), grpc.StatusCode.RESOURCE_EXHAUSTED)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("", "expected one key, tenants"),
        ("tenants: {a: {api_key: []}}", "unknown key 'api_key'"),
        ("tenants: {a: {api_keys: [plain]}}", "64 hexadecimal digits"),
        ("tenants: {a: {max_requests: -1}}", "max_requests is -1"),
        ("tenants: {a: {max_blocks: yes}}", "max_blocks is True"),
        ("tenants: {a: {operator: 1}}", "operator is 1"),
        ("tenants: {a: {certificates: x}}", "must be a list of texts"),
        ("tenants: {a: {anonymous: true}, b: {anonymous: true}}", "have the same credentials"),
        ("tenants: {a: {certificates: [x]}, b: {certificates: [x]}}", "have the same credentials"),
        ("tenants: {a: 3}", "must be a mapping"),
        ("a: [", "not YAML"),
        ("tenants: {a: {max_requests: 1}, b: {}, a: {operator: true}}", "found 'a' twice"),
        ("tenants: {a: {max_blocks: 1, max_blocks: 2}}", "found 'max_blocks' twice"),
        ("tenants: {? [a] : 3}", "not YAML"),
        ("[" * 100_000, "nested too deeply"),
        ("tenants: " + "{a: " * 100_000, "nested too deeply"),
        ("tenants: {a: {operator: !!bool maybe}}", "not YAML: an invalid value: KeyError('maybe')"),
        ("tenants: {a: {max_blocks: !!float ''}}", "not YAML: an invalid value: IndexError"),
        ("tenants: {2026-02-30: {}}", "not YAML: day "),
    ],
)
def test_a_bad_file_is_refused_with_a_reason(text: str, complaint: str) -> None:
    with pytest.raises(ValueError, match=re.escape(complaint)) as error:
        parse_tenants(text)
    assert "plain" not in str(error.value)


async def test_a_missing_file_is_one_clear_line(checkpoint: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = SchedulerConfig(model=str(checkpoint), port=0, metrics_port=0, tenants="/nowhere/tenants.yaml")
    assert await server.run(config, stop=asyncio.Event(), ready=lambda url: None) == 1
    (record,) = [record for record in caplog.records if record.levelno >= logging.ERROR]
    assert record.getMessage() == "--tenants is /nowhere/tenants.yaml, which cannot be read: No such file or directory"
