"""The session of a request, in every API, as the scheduler's recording shows it."""

import asyncio
from pathlib import Path

import grpc
import pytest
import yaml

from pagewire import AsyncClient, Client, InvalidRequest, Session
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from scheduler_service.core.request import Request
from scheduler_service.serving.recording import RecordingReader
from scheduler_service.serving.tenants.tenant_file import parse_tenants
from testing.scheduler_stack import details, request, serve, status_of
from testing.serving.failures import failure_of
from testing.serving.front_end import serve_front_end
from testing.serving.tenants import credentials, key_file, write_tenants
from tests.contract.shared_stream import SharedStream
from tests.contract.vllm_client import generate as generate_vllm
from tests.contract.vllm_client import request as vllm_request
from tests.contract.vllm_client import stub_of

PROMPT = list(range(1, 20))
HEADER = (("x-session-id", "of-the-call"),)
Said = tuple[str, bool | None, int | None]


@pytest.fixture
def recording(tmp_path: Path) -> Path:
    return tmp_path / "recording"


def recorded(path: Path) -> list[Request]:
    """Return the requests that reached the core, in order. The scheduler must have ended."""
    with path.open() as file:
        return [event.arguments[0] for event in RecordingReader(file).events() if event.name == "add"]


def said(path: Path) -> list[Said]:
    return [(request.session_id, request.will_return, request.retention_seconds) for request in recorded(path)]


def message(**fields: object) -> pb.GenerateRequest:
    made = request(PROMPT, max_tokens=2)
    made.MergeFrom(pb.GenerateRequest(**fields))
    return made


async def test_what_a_request_says_comes_to_the_core(checkpoint: Path, recording: Path) -> None:
    fields = [
        {},
        {"session_id": "chat-7", "will_return": True, "retention_seconds": 60},
        {"session_id": "é" * 128, "will_return": False},
        {"retention_seconds": 1, "embed": True},
    ]
    async with serve(checkpoint, record=str(recording)) as stack:
        for given in fields:
            sent = message(**given)
            if sent.embed:
                sent.ClearField("sampling")
            await stack.generate(sent)
        await stack.stub.Submit(pb.SubmitRequest(request=message(**fields[1])))
        await stack.until_idle()
    names = ("session_id", "will_return", "retention_seconds")
    defaults = {"session_id": ""}
    assert said(recording) == [tuple((defaults | each).get(name) for name in names) for each in [*fields, fields[1]]]


@pytest.mark.parametrize(
    ("fields", "field", "complaint"),
    [
        ({"session_id": "x" * 129}, "session_id", "session_id has 129 characters, at most 128 are allowed"),
        ({"retention_seconds": 0}, "retention_seconds", "retention_seconds is 0, but must be at least 1"),
    ],
)
async def test_what_cannot_be_is_refused(
    checkpoint: Path, fields: dict[str, object], field: str, complaint: str
) -> None:
    async with serve(checkpoint) as stack:
        error = await status_of(stack, message(**fields))
    assert error is not None
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
    assert error.details().startswith(complaint)
    assert details(error)[0].field_violations[0].field == field


async def test_metadata_names_the_session_of_requests_that_name_none(checkpoint: Path, recording: Path) -> None:
    async with serve(checkpoint, record=str(recording)) as stack:
        await stack.generate(message(will_return=True), metadata=HEADER)
        await stack.generate(message(session_id="own"), metadata=HEADER)
        await stack.generate(message())
        await stack.stub.Submit(pb.SubmitRequest(request=message()), metadata=HEADER)
        await stack.stub.Embed(pb.EmbedRequest(token_ids=pb.TokenIds(ids=PROMPT)), metadata=HEADER)
        await generate_vllm(stack, vllm_request(PROMPT, max_tokens=2), metadata=HEADER)
        await generate_vllm(stack, vllm_request(PROMPT, stream=True, max_tokens=2))
        await stack.until_idle()
        error = await status_of(stack, message(), metadata=(("x-session-id", "x" * 129),))
        refused = await failure_of(
            stub_of(stack).Generate(vllm_request(PROMPT), metadata=(("x-session-id", "x" * 129),)).read()
        )
    assert said(recording) == [
        ("of-the-call", True, None),
        ("own", None, None),
        ("", None, None),
        *[("of-the-call", None, None)] * 3,
        ("", None, None),
    ]
    for failure in (error, refused):
        assert failure is not None
        assert failure.code() is grpc.StatusCode.INVALID_ARGUMENT
        assert "session_id has 129 characters" in failure.details()


async def test_requests_that_share_a_call_have_sessions_of_their_own(checkpoint: Path, recording: Path) -> None:
    async with serve(checkpoint, record=str(recording)) as stack:
        for metadata in ((), HEADER):
            shared = SharedStream(stack, metadata=metadata)
            for fields in ({"session_id": "a", "will_return": True}, {"session_id": "b"}, {}):
                await shared.generate(message(**fields))
            await shared.close()
    own = [("a", True, None), ("b", None, None)]
    assert said(recording) == [*own, ("", None, None), *own, ("of-the-call", None, None)]


async def test_a_front_end_hands_sessions_on(checkpoint: Path, recording: Path) -> None:
    async with (
        serve(checkpoint, record=str(recording), max_retention_seconds=50) as stack,
        serve_front_end(checkpoint, stack.url) as front,
    ):
        await front.generate(message(session_id="own", will_return=False, retention_seconds=60), metadata=HEADER)
        await front.generate(message(will_return=True, retention_seconds=40), metadata=HEADER)
        await front.generate(message())
        error = await status_of(front, message(retention_seconds=0))
    assert said(recording) == [("own", False, 50), ("of-the-call", True, 40), ("", None, None)]
    assert error is not None
    assert error.code() is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(("limit", "left"), [(None, [1, 300, 300]), (40, [1, 40, 40]), (0, [None, None, None])])
async def test_hints_of_retention_are_bounded(
    checkpoint: Path, recording: Path, limit: int | None, left: list[int | None]
) -> None:
    options = {} if limit is None else {"max_retention_seconds": limit}
    async with serve(checkpoint, record=str(recording), **options) as stack:
        for hint in (1, 301, 2**32 - 1):
            await stack.generate(message(retention_seconds=hint))
    assert [each.retention_seconds for each in recorded(recording)] == left


async def test_tenants_have_bounds_of_their_own(checkpoint: Path, recording: Path, tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.yaml"
    write_tenants(tenants, acme={"max_retention_seconds": 3600}, globex={"max_retention_seconds": 0})
    options = {"tenants": str(tenants), "scheduler_api_key_file": key_file(tmp_path, "root")}
    async with (
        serve(checkpoint, record=str(recording), tenants=str(tenants), max_retention_seconds=20) as stack,
        serve_front_end(checkpoint, stack.url, **options) as front,
    ):
        for server in (stack, front):
            for tenant in ("acme", "globex", "root"):
                await server.generate(message(retention_seconds=10_000), metadata=credentials(tenant))
        # An operator uses the limits of the tenant for which it acts, and the server's limits for an unknown tenant.
        for tenant in ("acme", "stranger"):
            await stack.generate(message(tenant=tenant, retention_seconds=10_000), metadata=credentials("root"))
    expected = [("acme", 3600), ("globex", None), ("root", 20)]
    expected += [*expected, ("acme", 3600), ("stranger", 20)]
    assert [(each.tenant, each.retention_seconds) for each in recorded(recording)] == expected


def test_the_bound_of_a_tenant_is_a_number_from_0_on() -> None:
    def limit(value: object) -> int | None:
        file = yaml.safe_dump({"tenants": {"acme": {"max_retention_seconds": value}}})
        return parse_tenants(file)["acme"].quota.max_retention_seconds

    assert (limit(0), limit(7), limit(None)) == (0, 7, None)
    for wrong in (-1, 1.5, True, "1h"):
        with pytest.raises(
            ValueError, match=r"'acme': max_retention_seconds is .*, but must be a whole number, at least 0"
        ):
            limit(wrong)


async def test_the_client_says_it_in_every_call(checkpoint: Path, recording: Path) -> None:
    session, expected = Session("agent", will_return=True, retention_seconds=30), ("agent", True, 30)
    async with serve(checkpoint, record=str(recording)) as stack, AsyncClient(stack.url) as client:
        await client.complete("once", max_tokens=1, session=session)
        await client.complete(["once", PROMPT], max_tokens=1, session=session)
        await asyncio.to_thread(Client(client.url).complete, "once", max_tokens=1, session=session)
        await asyncio.to_thread(lambda: list(Client(client.url).stream("once", max_tokens=1, session=session)))
        assert [output async for output in client.stream("once", max_tokens=1, session=session)]
        messages = [{"role": "user", "content": "once"}]
        await client.chat(messages, max_tokens=1, chat_template="{{ messages[0].content }}", session=session)
        await client.submit("once", max_tokens=1, session=session)
        await client.complete("once", max_tokens=1, session=Session(will_return=False))
        await client.complete("once", max_tokens=1)
        with pytest.raises(InvalidRequest, match="retention_seconds"):
            await client.complete("once", session=Session(retention_seconds=-1))
        with pytest.raises(TypeError, match=r"session must be a Session.*'agent'"):
            await client.complete("once", session="agent")
        await stack.until_idle()
    assert said(recording) == [*[expected] * 8, ("", False, None), ("", None, None)]
