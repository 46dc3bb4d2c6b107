"""Structured output over gRPC: refused grammars with their error messages, and the grammars that the
worker receives.
"""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from pathlib import Path

import grpc
import grpc.aio
import pytest

from pagewire.common.grammars import version
from pagewire.common.wire.messages import GrammarKind, RowStatus
from pagewire.common.wire.sampling_rules import MAX_GRAMMAR_BYTES
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from scheduler_service.serving import grammar_checks
from testing.fake_worker import FakeWorker
from testing.scheduler_stack import Stack, details, expected_tokens, make_checkpoint, request, serve, status_of
from testing.serving.failures import failure_of
from testing.serving.front_end import FrontEnd, serve_front_end
from testing.serving.tenants import credentials, write_tenants
from tests.contract.held_checks import held_checks
from tests.contract.shared_stream import SharedStream

END = 0  # the tokenizer's end token
PROMPT = [5, 6, 7, 8, 9]
TOKENS = expected_tokens(PROMPT, 9)  # without the end token
CHOICE = {"texts": ["yes", 'n"o\n', "é"]}
GRAMMARS: dict[str, tuple[object, str]] = {  # by kind: the value in the request, and the text that the worker receives
    "json_schema": ('{"type": "object"}', '{"type": "object"}'),
    "json_object": (True, ""),
    "regex": ("[a-zé]+", "[a-zé]+"),
    "choice": (CHOICE, json.dumps(CHOICE["texts"], ensure_ascii=False)),
    "grammar": ('start: "a" | "é"', 'start: "a" | "é"'),
}
BAD = {"regex": "[a-z"}
SERVERS = pytest.mark.parametrize("is_front_end", [False, True], ids=["scheduler", "front end"])


@pytest.fixture(scope="module")
def model_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("models") / "with_end", eos_token_id=END)


@asynccontextmanager
async def serving(path: Path, *, is_front_end: bool = False, **options: object) -> AsyncIterator[Stack | FrontEnd]:
    """Run a scheduler, or a front end with its scheduler. `worker` is the worker of either."""
    async with serve(path, **options) as stack:
        if not is_front_end:
            yield stack
            return
        async with serve_front_end(path, stack.url) as front:
            front.worker = stack.worker
            yield front


async def test_grammars_come_to_the_worker_as_they_were_written(model_path: Path) -> None:
    for is_front_end in (False, True):
        async with serving(model_path, is_front_end=is_front_end) as server:
            for kind, (given, text) in GRAMMARS.items():
                for ignore_eos in (False, True):
                    message = request(PROMPT, max_tokens=9, ignore_eos=ignore_eos, **{kind: given})
                    assert (await server.generate(message)).token_ids[0] == TOKENS
                    added = server.worker.grammars[-1]
                    assert (added.kind, added.text) == (GrammarKind[kind.upper()], text)
                    assert added.end_token_ids == (END,)
                    assert server.worker.opened_grammar_ids[-1] == added.grammar_id
            assert (await server.generate(request(PROMPT, max_tokens=9))).token_ids[0] == TOKENS
            assert server.worker.opened_grammar_ids[-1] == 0


async def test_every_way_in_takes_grammars(model_path: Path) -> None:
    async with serve(model_path) as stack:
        message = request(PROMPT, max_tokens=9, regex="[a-z]+")
        shared = SharedStream(stack)
        (stream,) = await shared.generate(message, token_only=True)
        assert stream.token_ids == TOKENS
        message.request_id = "detached"
        await stack.stub.Submit(pb.SubmitRequest(request=message))
        attached = [response async for response in stack.stub.Attach(pb.AttachRequest(request_id="detached"))]
        assert [token for response in attached for token in response.token_ids] == TOKENS
        (result,) = (await stack.stub.GetResult(pb.GetResultRequest(request_id="detached"))).outputs
        assert list(result.token_ids) == TOKENS
        await shared.close()
        assert {grammar.text for grammar in stack.worker.grammars} == {"[a-z]+"}


def refusals() -> Iterator[tuple[dict[str, object], str, str]]:
    """Yield sampling parameters, the field at fault, and a part of the error message."""
    for kind in ("json_schema", "regex", "grammar", "structural_tag"):
        yield {kind: ""}, kind, "is empty"
        yield {kind: "x" * (MAX_GRAMMAR_BYTES + 1)}, kind, f"{MAX_GRAMMAR_BYTES + 1} bytes, at most {MAX_GRAMMAR_BYTES}"
        yield {kind: "é" * (MAX_GRAMMAR_BYTES // 2 + 1)}, kind, f"at most {MAX_GRAMMAR_BYTES}"
    yield {"choice": {}}, "choice", "is empty"
    yield {"choice": {"texts": ["x" * 400_000, "y" * 200_000]}}, "choice", f"at most {MAX_GRAMMAR_BYTES}"
    yield {"json_object": False}, "json_object", "false"
    yield BAD, "regex", "unclosed character class"
    yield {"json_schema": "{"}, "json_schema", "json_schema cannot be used"
    yield {"json_schema": '{"type": "nothing"}'}, "json_schema", "nothing"
    yield {"grammar": "start: unknown"}, "grammar", "unknown"
    yield {"structural_tag": "{"}, "structural_tag", "structural_tag cannot be used"


@SERVERS
async def test_what_cannot_be_a_grammar_is_refused(model_path: Path, is_front_end: bool) -> None:
    async with serving(model_path, is_front_end=is_front_end) as server:
        shared = SharedStream(server)
        for sampling, field, words in refusals():
            message = request(PROMPT, **sampling)
            error = await status_of(server, message)
            assert error is not None, sampling
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert words in error.details()
            (violation,) = details(error)[0].field_violations
            assert violation.field == f"sampling.{field}"
            (stream,) = await shared.generate(message)
            assert stream.failure is not None
            failure = (stream.failure.code, stream.failure.message, stream.failure.field)
            assert failure == (grpc.StatusCode.INVALID_ARGUMENT.value[0], error.details(), f"sampling.{field}")
        assert not server.worker.grammars
        await shared.close()


async def test_a_detached_request_hears_of_its_grammar_at_once(model_path: Path) -> None:
    async with serve(model_path) as stack:
        message = request(PROMPT, **BAD)
        message.request_id = "r"
        await failure_of(stack.stub.Submit(pb.SubmitRequest(request=message)), grpc.StatusCode.INVALID_ARGUMENT)
        await failure_of(stack.stub.GetResult(pb.GetResultRequest(request_id="r")), grpc.StatusCode.NOT_FOUND)


@SERVERS
@pytest.mark.parametrize(
    ("eos", "with_tokenizer", "code", "words"),
    [
        (END, False, grpc.StatusCode.INVALID_ARGUMENT, "no tokenizer"),
        ([], True, grpc.StatusCode.INVALID_ARGUMENT, "no end token"),
        (299, True, grpc.StatusCode.FAILED_PRECONDITION, "cannot read the checkpoint's tokenizer"),
    ],
)
async def test_some_checkpoints_serve_all_else(
    tmp_path: Path, is_front_end: bool, eos: object, with_tokenizer: bool, code: grpc.StatusCode, words: str
) -> None:
    path = make_checkpoint(tmp_path / "model", with_tokenizer=with_tokenizer, eos_token_id=eos)
    async with serving(path, is_front_end=is_front_end) as server:
        error = await failure_of(server.generate(request(PROMPT, regex="a")), code, words)
        assert [violation.field for violation in details(error)[0].field_violations] == ["sampling.regex"]
        assert (await server.generate(request(PROMPT, max_tokens=9))).token_ids[0] == TOKENS
        if not is_front_end:
            info = await server.stub.GetServerInfo(pb.GetServerInfoRequest())
            assert words in info.structured_output_refusal


@SERVERS
@pytest.mark.parametrize("theirs", ["0.0.1", ""])
async def test_a_worker_that_reads_grammars_otherwise_serves_all_else(
    model_path: Path, is_front_end: bool, theirs: str
) -> None:
    async with serving(
        model_path, is_front_end=is_front_end, worker=await FakeWorker.started(model_path, grammar_version=theirs)
    ) as server:
        error = await failure_of(server.generate(request(PROMPT, regex="a")), grpc.StatusCode.FAILED_PRECONDITION)
        assert (
            (theirs in error.details() and version() in error.details()) if theirs else "no grammars" in error.details()
        )
        assert (await server.generate(request(PROMPT, max_tokens=9))).token_ids[0] == TOKENS
        info = await server.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert info.structured_output_refusal == error.details()
        assert info.worker.grammar_version == theirs


async def test_a_good_worker_is_told_of(model_path: Path) -> None:
    async with serve(model_path) as stack:
        info = await stack.stub.GetServerInfo(pb.GetServerInfoRequest())
        assert not info.structured_output_refusal
        assert info.worker.grammar_version == version()


async def test_an_embedding_has_no_grammar(model_path: Path) -> None:
    async with serve(model_path) as stack:
        message = request(PROMPT, regex="a")
        message.embed = True
        await failure_of(stack.generate(message), grpc.StatusCode.INVALID_ARGUMENT)


# During a grammar check


async def test_requests_of_one_call_do_not_wait_for_each_others_checks(
    model_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_checks(monkeypatch) as (begun, go_on):
        async with serve(model_path) as stack:
            shared = SharedStream(stack)
            (constrained,) = await shared.submit(request(PROMPT, max_tokens=9, regex="a"))
            assert await asyncio.to_thread(begun.wait, 30)
            (free,) = await shared.generate(request(PROMPT, max_tokens=9))
            assert free.token_ids == TOKENS
            assert not constrained.ended.is_set()
            go_on.set()
            async with asyncio.timeout(30):
                await constrained.ended.wait()
            assert constrained.token_ids == TOKENS
            await shared.close()


@SERVERS
async def test_a_request_is_aborted_while_its_grammar_is_checked(
    model_path: Path, monkeypatch: pytest.MonkeyPatch, is_front_end: bool
) -> None:
    with held_checks(monkeypatch) as (begun, go_on):
        async with serving(model_path, is_front_end=is_front_end) as server:
            shared = SharedStream(server)
            (stream,) = await shared.submit(request(PROMPT, max_tokens=9, regex="a"))
            assert await asyncio.to_thread(begun.wait, 30)
            await shared.abort(stream)
            async with asyncio.timeout(30):
                await stream.ended.wait()
            go_on.set()
            (other,) = await shared.generate(request(PROMPT, max_tokens=9, regex="b"))
            assert other.token_ids == TOKENS
            assert {grammar.text for grammar in server.worker.grammars} == {"b"}
            await shared.close()


async def test_a_timeout_passes_while_a_grammar_is_checked(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with held_checks(monkeypatch) as (begun, go_on):
        async with serve(model_path) as stack:
            await failure_of(stack.generate(request(PROMPT, regex="a"), timeout=0.2), grpc.StatusCode.DEADLINE_EXCEEDED)
            shared = SharedStream(stack)
            (stream,) = await shared.generate(request(PROMPT, regex="b"), timeout_seconds=0.2)
            assert stream.failure is not None
            assert stream.failure.code == grpc.StatusCode.DEADLINE_EXCEEDED.value[0]
            assert begun.is_set()
            go_on.set()
            (other,) = await shared.generate(request(PROMPT, max_tokens=9, regex="c"))
            assert other.token_ids == TOKENS
            assert {grammar.text for grammar in stack.worker.grammars} == {"c"}
            await shared.close()


async def test_quotas_and_limits_are_free_again_after_a_check(
    model_path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_tenants(tmp_path / "tenants.yaml", acme={"max_requests": 1})
    acme = credentials("acme")
    with held_checks(monkeypatch) as (begun, go_on):
        async with serve(model_path, tenants=str(tmp_path / "tenants.yaml")) as stack:
            checking = asyncio.create_task(status_of(stack, request(PROMPT, **BAD), metadata=acme))
            assert await asyncio.to_thread(begun.wait, 30)
            error = await failure_of(stack.generate(request(PROMPT, max_tokens=9), metadata=acme))
            assert error.code() is grpc.StatusCode.RESOURCE_EXHAUSTED, "what is being checked counts"
            go_on.set()
            error = await checking
            assert error is not None
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            for grammar in (BAD, {"regex": "a"}, BAD, {}):
                error = await status_of(stack, request(PROMPT, max_tokens=9, **grammar), metadata=acme)
                assert (None if error is None else error.code()) is (
                    grpc.StatusCode.INVALID_ARGUMENT if grammar is BAD else None
                )


async def test_a_flood_of_grammars_is_told_to_come_back(model_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grammar_checks, "MAX_TENANT_WAITING", 3)
    with held_checks(monkeypatch) as (begun, go_on):
        async with serve(model_path) as stack:
            shared = SharedStream(stack)
            for number in range(3):
                await shared.submit(request(PROMPT, max_tokens=9, regex=f"a{number}"))
            assert await asyncio.to_thread(begun.wait, 30)
            (refused,) = await shared.generate(request(PROMPT, regex="another"))
            assert refused.failure is not None
            assert refused.failure.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
            assert refused.failure.retry_delay_seconds == 1
            assert "the limit is 3" in refused.failure.message
            error = await failure_of(
                stack.generate(request(PROMPT, regex="another")), grpc.StatusCode.RESOURCE_EXHAUSTED
            )
            assert details(error)[1].retry_delay.seconds == 1
            go_on.set()
            await shared.close()
            assert [stream.token_ids for stream in shared.streams.values() if not stream.failure] == [TOKENS] * 3


# The worker's part


@SERVERS
async def test_a_grammar_that_the_worker_cannot_prepare_ends_its_requests(model_path: Path, is_front_end: bool) -> None:
    async with serving(model_path, is_front_end=is_front_end) as server:
        server.worker.bad_grammars["a"] = "there is no more memory"
        await failure_of(
            server.generate(request(PROMPT, max_tokens=9, regex="a")),
            grpc.StatusCode.INTERNAL,
            "there is no more memory",
        )
        assert (await server.generate(request(PROMPT, max_tokens=9, regex="b"))).token_ids[0] == TOKENS
        assert len(server.worker.epochs) == 1


@SERVERS
@pytest.mark.parametrize(
    ("status", "code"),
    [
        (RowStatus.GRAMMAR_FAILED, grpc.StatusCode.INTERNAL),
        (RowStatus.GRAMMAR_DEAD_END, grpc.StatusCode.INVALID_ARGUMENT),
        (RowStatus.GRAMMAR_LIMIT, grpc.StatusCode.RESOURCE_EXHAUSTED),
    ],
)
async def test_a_grammar_that_fails_ends_its_request_alone(
    model_path: Path, is_front_end: bool, status: RowStatus, code: grpc.StatusCode
) -> None:
    async with serving(model_path, is_front_end=is_front_end) as server:
        server.worker.bad_sequences[0] = status
        await failure_of(server.generate(request(PROMPT, max_tokens=9, regex="a")), code, "grammar")
        # The fake worker spoils the tokens that the failed row wrote, so the next request uses another prompt.
        other = PROMPT[::-1]
        assert (await server.generate(request(other, max_tokens=9, regex="a"))).token_ids[0] == expected_tokens(
            other, 9
        )
        assert len(server.worker.epochs) == 1
