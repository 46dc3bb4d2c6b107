"""Detached requests: submit, read from any client and repeatedly, retention and removal."""

import asyncio
import contextlib
import random
import re
from array import array
from functools import partial
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import grpc
import pytest
from tokenizers import Tokenizer

from pagewire import AsyncClient, NotFound
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from scheduler_service import server
from scheduler_service.api.grpc.generate_response import whole_response
from scheduler_service.api.grpc.scheduler_servicer import result_of
from scheduler_service.core.request import EndReason, SequenceEnd, TokenLogprobs
from scheduler_service.serving.checkpoint.tokenizer import Tokenizer as ServedTokenizer
from scheduler_service.serving.detached import DetachedRequests
from scheduler_service.serving.output import Delta, OutputReader, SampleRecord
from testing.scheduler_stack import VOCAB_SIZE, details, expected_tokens, request, serve, status_of
from testing.seeds import seeded
from testing.serving.failures import failure_of
from testing.serving.front_end import serve_both
from testing.serving.tenants import code_of
from tests.contract.detached import Attached, Server, attach, submit, until_ended

PROMPT = [5, 6, 7, 8, 9, 10, 11]


async def test_every_token_can_be_read_from_any_other(checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    async with serve(checkpoint) as stack:
        name = await submit(stack, "once upon a time", max_tokens=60, seed=3)
        tokens = expected_tokens(tokenizer.encode("once upon a time").ids, 60, seed=3)
        whole = await attach(stack, name)
        assert whole.token_ids[0] == tokens
        assert whole.texts[0] == tokenizer.decode(tokens)
        assert whole.last[0].finish_reason == pb.FINISH_REASON_LENGTH
        rests = await asyncio.gather(*(attach(stack, name, first) for first in range(61)))
        for first, rest in enumerate(rests):
            assert rest.token_ids[0] == tokens[first:]
            assert whole.texts[0].endswith(rest.texts[0])
            assert rest.last[0].usage == whole.last[0].usage
        # A token's text is the text that it adds. So the text from a later token on is a suffix of the text from an
        # earlier one.
        lengths = [len(rest.texts[0]) for rest in rests]
        assert lengths == sorted(lengths, reverse=True)
        assert lengths[-1] <= 1


async def test_readers_come_and_go_while_it_runs(checkpoint: Path) -> None:
    seed = 11
    rng = seeded(seed)
    async with serve(checkpoint) as stack:
        stack.worker.step_seconds = 0.002
        name = await submit(stack, PROMPT, max_tokens=150, n=2, seed=4)
        expected = [expected_tokens(PROMPT, 150, seed=4, sample_index=index) for index in range(2)]

        async def read_some() -> None:
            """Read some deltas, leave, and attach again at the next token of each sample, until all
            samples have ended.
            """
            attached = Attached([0, 0])
            while len(attached.last) < 2:
                first_tokens = [len(token_ids) for token_ids in attached.token_ids]
                ended = set(attached.last)
                call = stack.stub.Attach(pb.AttachRequest(request_id=name, from_tokens=first_tokens))
                num_left = rng.randrange(1, 60)
                async for response in call:
                    if response.index in ended:
                        assert not response.token_ids
                        assert response.HasField("usage")
                        continue
                    attached.add(response)
                    num_left -= 1
                    if num_left == 0:
                        break
                call.cancel()
            assert attached.token_ids == expected
            texts.append(attached.texts)

        texts: list[list[str]] = []
        await asyncio.gather(*(read_some() for _ in range(10)))
        assert texts == texts[:1] * 10
        again = await attach(stack, name, n=2)
        assert (again.token_ids, again.texts) == (expected, texts[0])
        await stack.until_idle()


async def test_a_result_assembled_before_the_end_is_still_running() -> None:
    """The result may lack the last tokens, so its state must still be "running"."""

    class Output(SampleRecord):
        def delta(self, first_token: int, num_tokens: int) -> Delta:
            active.has_ended = True
            return super().delta(first_token, num_tokens)

    output = Output(0, is_kept=True)
    request = SimpleNamespace(request_id="a")
    active: Any = SimpleNamespace(outputs=[output], has_ended=False, error=None, request=request, max_delta_tokens=1)
    assert (await result_of(active)).state == pb.RESULT_STATE_RUNNING
    assert (await result_of(active)).state == pb.RESULT_STATE_FINISHED


async def test_result_has_all_there_is_so_far(checkpoint: Path) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    async with serve(checkpoint) as stack:
        stack.worker.step_seconds = 0.005
        name = await submit(stack, PROMPT, name="mine", max_tokens=60, n=2, logprobs=1, prompt_logprobs=0)
        assert name == "mine"
        await stack.until(lambda loads: loads.num_generation_tokens > 10)
        early = await stack.stub.GetResult(pb.GetResultRequest(request_id="mine"))
        assert early.state == pb.RESULT_STATE_RUNNING
        result = await until_ended(stack, "mine")
        assert not result.HasField("failure")
        for index, (output, before) in enumerate(zip(result.outputs, early.outputs, strict=True)):
            tokens = expected_tokens(PROMPT, 60, sample_index=index)
            assert (output.index, list(output.token_ids), output.text) == (index, tokens, tokenizer.decode(tokens))
            assert (output.finish_reason, output.usage.completion_tokens) == (pb.FINISH_REASON_LENGTH, 60)
            assert [entry.token_id for entry in output.logprobs] == tokens
            assert output.cumulative_logprob == pytest.approx(sum(entry.logprob for entry in output.logprobs))
            assert list(before.token_ids) == tokens[: len(before.token_ids)]
            assert output.text.startswith(before.text)
            assert before.finish_reason == pb.FINISH_REASON_UNSPECIFIED
            assert not before.HasField("usage")
        assert 0 < len(early.outputs[0].token_ids) < 60
        assert [entry.token_id for entry in result.outputs[0].prompt_logprobs] == PROMPT[1:]
        assert not result.outputs[1].prompt_logprobs
        attached = await attach(stack, "mine", n=2)
        assert attached.prompt_logprobs == PROMPT[1:]
        assert attached.last[1].cumulative_logprob == pytest.approx(result.outputs[1].cumulative_logprob)
        assert (await attach(stack, "mine", 1, n=2)).prompt_logprobs == []


async def test_hypotheses_can_be_read_like_samples(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        generated = await stack.generate(request(PROMPT, beam_width=3, n=3, max_tokens=12))
        name = await submit(stack, PROMPT, beam_width=3, n=3, max_tokens=12)
        attached = await attach(stack, name, n=3)
        for index in range(3):
            assert attached.token_ids[index] == generated.token_ids[index]
            assert attached.texts[index] == generated.texts[index]
            assert attached.last[index].cumulative_logprob == generated.last[index].cumulative_logprob
        rest = await attach(stack, name, 5, n=3)
        assert rest.token_ids == [token_ids[5:] for token_ids in attached.token_ids]
        assert rest.last[2].cumulative_logprob == generated.last[2].cumulative_logprob


async def test_positions_that_are_not_there(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        name = await submit(stack, PROMPT, max_tokens=7, n=2)
        await until_ended(stack, name)
        assert (await attach(stack, name, 7, n=2)).token_ids == [[], []]
        for message, field in (
            (pb.AttachRequest(request_id=name, from_token=8), "from_token"),
            (pb.AttachRequest(request_id=name, from_tokens=[7, 8]), "from_tokens[1]"),
            (pb.AttachRequest(request_id=name, from_tokens=[7], from_token=2**32 - 1), "from_token"),
        ):
            error = await failure_of(stack.stub.Attach(message).read(), grpc.StatusCode.OUT_OF_RANGE, "has 7 tokens")
            assert details(error)[0].field_violations[0].field == field
        error = await failure_of(
            stack.stub.Attach(pb.AttachRequest(request_id=name, from_tokens=[1, 1, 1])).read(),
            grpc.StatusCode.INVALID_ARGUMENT,
        )
        assert details(error)[0].field_violations[0].field == "from_tokens"
        stack.worker.step_seconds = 0.05
        name = await submit(stack, PROMPT, max_tokens=100)
        await failure_of(
            stack.stub.Attach(pb.AttachRequest(request_id=name, from_token=100)).read(), grpc.StatusCode.OUT_OF_RANGE
        )
        await stack.stub.Abort(pb.AbortRequest(request_id=name))


async def test_unknown_foreign_and_expired_ids_look_alike(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "DetachedRequests", partial(DetachedRequests, max_ended=2))
    async with serve(checkpoint, detached_retention=0.3) as stack:
        stack.worker.step_seconds = 0.001

        async def texts_of(request_id: str, tenant: str) -> set[str]:
            errors = [
                await failure_of(stack.stub.Attach(pb.AttachRequest(request_id=request_id, tenant=tenant)).read()),
                await failure_of(stack.stub.GetResult(pb.GetResultRequest(request_id=request_id, tenant=tenant))),
            ]
            assert {error.code() for error in errors} == {grpc.StatusCode.NOT_FOUND}
            return {error.details() for error in errors}

        await submit(stack, PROMPT, name="mine", tenant="me", max_tokens=3)
        await until_ended(stack, "mine", "me")
        foreign = await texts_of("mine", "you")
        async with asyncio.timeout(10):
            while True:
                try:
                    await stack.stub.GetResult(pb.GetResultRequest(request_id="mine", tenant="me"))
                except grpc.aio.AioRpcError:
                    break
                await asyncio.sleep(0.02)  # no event reports the expiry
        assert await texts_of("mine", "me") == foreign
        assert {text.replace("other", "mine") for text in await texts_of("other", "me")} == foreign
        # The name can be used again.
        await submit(stack, PROMPT, name="mine", tenant="me", max_tokens=3)
        # Beyond the maximum number of results, the oldest result of the tenant with the most results is removed.
        # Running requests stay.
        running = await submit(stack, PROMPT, max_tokens=200)
        await until_ended(stack, "mine", "me")
        for name in ("a", "b"):
            await submit(stack, PROMPT, name=name, tenant="me", max_tokens=3)
            await until_ended(stack, name, "me")
        assert await texts_of("mine", "me") == foreign
        assert (await until_ended(stack, running)).state == pb.RESULT_STATE_FINISHED


async def test_results_are_kept_up_to_a_size(checkpoint: Path) -> None:
    """The oldest result of the tenant with the largest total size is removed. Another tenant's small result stays."""
    async with serve(checkpoint, max_detached_bytes=20_000) as stack:
        for tenant in ("small", "large"):
            for index in range(1 if tenant == "small" else 5):
                await submit(stack, PROMPT, name=str(index), tenant=tenant, max_tokens=100)
                await until_ended(stack, str(index), tenant)

        async def is_kept(name: str, tenant: str) -> bool:
            with contextlib.suppress(grpc.aio.AioRpcError):
                await stack.stub.GetResult(pb.GetResultRequest(request_id=name, tenant=tenant))
                return True
            return False

        assert await is_kept("0", "small")
        kept = [await is_kept(str(index), "large") for index in range(5)]
        assert kept == sorted(kept)
        assert kept[-1]
        assert not kept[0]


async def keep(server: Server, name: str, record: bytes, tenant: str = "") -> None:
    await server.stub.KeepRecord(pb.KeepRecordRequest(request_id=name, tenant=tenant, record=record))


async def result(server: Server, name: str, tenant: str = "") -> pb.GetResultResponse:
    return await server.stub.GetResult(pb.GetResultRequest(request_id=name, tenant=tenant))


async def forget(server: Server, name: str, tenant: str = "") -> None:
    await server.stub.DeleteResult(pb.DeleteResultRequest(request_id=name, tenant=tenant))


async def test_records_are_kept_beside_requests_and_alone(checkpoint: Path) -> None:
    async with serve_both(checkpoint) as (stack, front):
        submitted = pb.SubmitRequest(request=request(PROMPT, max_tokens=3), record=b"beside")
        beside = (await front.stub.Submit(submitted)).request_id
        await keep(front, "alone", b"by itself")
        for server in (stack, front):
            assert (await until_ended(server, beside)).record == b"beside"
            assert len((await result(server, beside)).outputs[0].token_ids) == 3
            finished = pb.GetResultResponse(request_id="alone", state=pb.RESULT_STATE_FINISHED, record=b"by itself")
            assert await result(server, "alone") == finished
            unattached = await failure_of(attach(server, "alone"))
            foreign = await failure_of(result(server, "alone", "you"))
            assert unattached.code() is foreign.code() is grpc.StatusCode.NOT_FOUND
            assert unattached.details() == foreign.details()
            async with AsyncClient(server.url) as client:
                assert (await client.result(beside)).state == "finished"
                with pytest.raises(NotFound, match="alone"):
                    await client.result("alone")


async def test_the_name_of_a_record_is_taken_as_long_as_it_is_kept(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        await submit(stack, PROMPT, name="request", max_tokens=3)
        await keep(stack, "record", b"1")
        taken = [keep(stack, "request", b"2"), keep(stack, "record", b"2"), submit(stack, PROMPT, name="record")]
        for call in taken:
            error = await failure_of(call, grpc.StatusCode.ALREADY_EXISTS)
            assert "is in use by a kept result or response" in (error.details() or "")
            assert details(error)[0].field_violations[0].field == "request_id"
        await keep(stack, "record", b"another's", "you")
        for name in ("", "x" * 129):
            assert (await failure_of(keep(stack, name, b"1"))).code() is grpc.StatusCode.INVALID_ARGUMENT
    async with serve(checkpoint, detached_retention=0.1) as stack:
        await keep(stack, "record", b"1")
        async with asyncio.timeout(10):
            while True:
                try:
                    await keep(stack, "record", b"2")
                    break
                except grpc.aio.AioRpcError:
                    await asyncio.sleep(0.02)  # no event reports the expiry


async def test_forget_removes_immediately(checkpoint: Path) -> None:
    async with serve_both(checkpoint) as (stack, front):
        stack.worker.step_seconds = 0.01
        unknown = (await failure_of(result(stack, "name"))).details()
        for server in (stack, front):
            await keep(server, "name", b"1")
            assert (await failure_of(forget(server, "name", "you"))).code() is grpc.StatusCode.NOT_FOUND
            await forget(server, "name")
            assert (await failure_of(result(server, "name"))).details() == unknown
            await submit(server, PROMPT, name="name", max_tokens=200)
            call = server.stub.Attach(pb.AttachRequest(request_id="name"))
            last = await call.read()
            await forget(server, "name")
            assert (await failure_of(forget(server, "name"))).details() == unknown
            while (response := await call.read()) is not grpc.aio.EOF:
                last = response
            assert last.finish_reason == pb.FINISH_REASON_ABORT
            await stack.until_idle()
            await submit(server, PROMPT, name="name", max_tokens=3)
            await until_ended(server, "name")
            await forget(server, "name")
            assert (await failure_of(result(server, "name"))).details() == unknown


async def test_records_are_kept_up_to_the_size_of_results(checkpoint: Path) -> None:
    """The oldest result or record of the tenant with the largest total size is removed. Another
    tenant's record stays.
    """
    async with serve(checkpoint, max_detached_bytes=20_000) as stack:
        await keep(stack, "0", bytes(3000), "small")
        await submit(stack, PROMPT, name="0", tenant="large", max_tokens=3)
        await until_ended(stack, "0", "large")
        for index in range(1, 4):
            await keep(stack, str(index), bytes(8000), "large")
        kept = [await code_of(result(stack, str(index), "large")) is None for index in range(4)]
        assert kept == [False, False, True, True]
        assert len((await result(stack, "0", "small")).record) == 3000


async def test_records_of_requests_that_run_are_bounded(checkpoint: Path) -> None:
    async with serve(checkpoint, max_detached_bytes=10_000) as stack:
        stack.worker.step_seconds = 0.01

        async def submit_with(num_bytes: int) -> str:
            message = pb.SubmitRequest(request=request(PROMPT, max_tokens=200), record=bytes(num_bytes))
            return (await stack.stub.Submit(message)).request_id

        await forget(stack, await submit_with(12_000))  # one alone fits
        name = await submit_with(6000)
        error = await failure_of(submit_with(6000), grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert "--max-detached-bytes" in (error.details() or "")
        await stack.stub.Abort(pb.AbortRequest(request_id=name))
        await until_ended(stack, name)
        await submit_with(6000)


async def test_no_tenant_takes_the_room_of_others_records(checkpoint: Path) -> None:
    """If all records together exceed the limit, each tenant may use the limit divided by the number of tenants with
    records.
    """
    async with serve(checkpoint, max_detached_bytes=10_000) as stack:
        stack.worker.step_seconds = 0.01

        async def submit_with(tenant: str, num_bytes: int) -> None:
            message = pb.SubmitRequest(request=request(PROMPT, max_tokens=200), record=bytes(num_bytes))
            message.request.tenant = tenant
            await stack.stub.Submit(message)

        await submit_with("a", 9000)
        await submit_with("b", 2000)
        for tenant, num_bytes in (("a", 2000), ("b", 3001), ("c", 3334)):
            error = await failure_of(submit_with(tenant, num_bytes), grpc.StatusCode.RESOURCE_EXHAUSTED)
            assert re.findall(r"\d+", error.details() or "") == [str(num_bytes)]  # only its own size
        await submit_with("b", 3000)
        await submit_with("c", 3333)
        await submit_with("a", 0)


async def test_records_of_requests_that_are_made_ready_are_bounded(checkpoint: Path) -> None:
    """A request that is refused later releases the memory of its record."""
    async with serve(checkpoint, max_detached_bytes=10_000) as stack:
        stack.worker.step_seconds = 0.01

        async def submit_with(**sampling: int) -> grpc.StatusCode | None:
            message = pb.SubmitRequest(request=request("once upon a time", **sampling), record=bytes(6000))
            return await code_of(stack.stub.Submit(message))

        assert await submit_with(max_tokens=100_000) is grpc.StatusCode.INVALID_ARGUMENT
        codes = await asyncio.gather(*(submit_with(max_tokens=200) for _ in range(4)))
        assert sorted(codes, key=str) == [None, *[grpc.StatusCode.RESOURCE_EXHAUSTED] * 3]


async def test_a_large_result_is_made_between_the_turns_of_others() -> None:
    rng = random.Random(1)
    output = SampleRecord(0, with_logprobs=True, is_kept=True)
    entries = []
    for _ in range(3000):
        top = tuple((rng.randrange(1000), rng.random()) for _ in range(rng.randrange(4)))
        entries.append(TokenLogprobs(rng.randrange(1000), rng.random(), rng.randrange(1, 9), top))
        output.add([entries[-1].token_id], entries[-1:])
        output.process_output()
    making = asyncio.create_task(whole_response("id", output))
    num_turns = 0
    while not making.done():
        num_turns += 1
        await asyncio.sleep(0)
    whole = making.result()
    assert num_turns >= 3000 // 256
    assert list(whole.token_ids) == [entry.token_id for entry in entries]
    read = [
        TokenLogprobs(each.token_id, each.logprob, each.rank, tuple((top.token_id, top.logprob) for top in each.top))
        for each in whole.logprobs
    ]
    assert read == [approximately(entry) for entry in entries]
    assert output.num_bytes < 3000 * 100


def approximately(entry: TokenLogprobs) -> TokenLogprobs:
    """Return the logprobs rounded to the wire format's 32-bit floats."""

    def narrowed(value: float) -> float:
        return array("f", [value])[0]

    top = tuple((token_id, narrowed(logprob)) for token_id, logprob in entry.top)
    return TokenLogprobs(entry.token_id, narrowed(entry.logprob), entry.rank, top)


async def test_a_reader_outlives_the_retention(checkpoint: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "DetachedRequests", partial(DetachedRequests, max_ended=0))
    async with serve(checkpoint) as stack:
        stack.worker.step_seconds = 0.005
        name = await submit(stack, PROMPT, max_tokens=30)
        assert (await attach(stack, name)).token_ids[0] == expected_tokens(PROMPT, 30)
        await failure_of(stack.stub.GetResult(pb.GetResultRequest(request_id=name)), grpc.StatusCode.NOT_FOUND)


async def test_ids_are_taken_as_long_as_they_are_known(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        await submit(stack, PROMPT, name="mine", tenant="me", max_tokens=3)
        for _ in range(2):  # while the request may run, and after its end
            message = request(PROMPT, max_tokens=3)
            message.request_id, message.tenant = "mine", "me"
            submitted = await failure_of(stack.stub.Submit(pb.SubmitRequest(request=message)))
            generated = await failure_of(stack.generate(message))
            assert {submitted.code(), generated.code()} == {grpc.StatusCode.ALREADY_EXISTS}
            assert details(generated)[0].field_violations[0].field == "request_id"
            message.tenant = "you"
            assert await status_of(stack, message) is None
            await until_ended(stack, "mine", "me")


async def test_submit_refuses_as_generate_does(checkpoint: Path) -> None:
    async with serve(checkpoint, max_num_seqs=1, max_waiting_requests=2) as stack:
        for message, code, field in (
            (pb.GenerateRequest(), grpc.StatusCode.INVALID_ARGUMENT, "prompt"),
            (request(PROMPT, top_p=2), grpc.StatusCode.INVALID_ARGUMENT, "sampling.top_p"),
            (request([VOCAB_SIZE]), grpc.StatusCode.INVALID_ARGUMENT, "token_ids.ids[0]"),
            (request(PROMPT, max_tokens=255), grpc.StatusCode.INVALID_ARGUMENT, "sampling.max_tokens"),
        ):
            error = await failure_of(stack.stub.Submit(pb.SubmitRequest(request=message)), code)
            assert details(error)[0].field_violations[0].field == field
        assert (await failure_of(stack.stub.Submit(pb.SubmitRequest()))).code() is grpc.StatusCode.INVALID_ARGUMENT
        stack.worker.step_seconds = 0.02
        submitted = await asyncio.gather(*(submit(stack, PROMPT) for _ in range(10)), return_exceptions=True)
        refused = [error for error in submitted if isinstance(error, grpc.aio.AioRpcError)]
        assert 0 < len(refused) < 10
        assert {error.code() for error in refused} == {grpc.StatusCode.RESOURCE_EXHAUSTED}
        assert details(refused[0])[1].retry_delay.seconds > 0


async def test_abort_ends_a_detached_request_but_cancelling_a_reader_does_not(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        stack.worker.step_seconds = 0.005
        name = await submit(stack, PROMPT)
        call = stack.stub.Attach(pb.AttachRequest(request_id=name))
        await call.read()
        call.cancel()
        reading = asyncio.create_task(attach(stack, name))
        await stack.until(lambda loads: loads.num_generation_tokens > 10)
        await stack.stub.Abort(pb.AbortRequest(request_id=name))
        attached = await reading
        assert attached.last[0].finish_reason == pb.FINISH_REASON_ABORT
        assert len(attached.token_ids[0]) > 10
        assert attached.token_ids[0] == expected_tokens(PROMPT, len(attached.token_ids[0]))
        assert (await until_ended(stack, name)).state == pb.RESULT_STATE_FINISHED
        await failure_of(stack.stub.Abort(pb.AbortRequest(request_id=name)), grpc.StatusCode.NOT_FOUND)


async def test_a_failure_is_reported_to_all_readers(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        stack.worker.step_seconds = 0.005
        name = await submit(stack, [1, 2, VOCAB_SIZE - 1, 4], n=2)
        for _ in range(2):
            error = await failure_of(attach(stack, name, n=2), grpc.StatusCode.INTERNAL, "not numbers")
        result = await until_ended(stack, name)
        assert result.state == pb.RESULT_STATE_FAILED
        assert (result.failure.code, result.failure.message) == (error.code().value[0], error.details())
        await stack.until_idle()


async def test_drain_waits_for_detached_requests(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        stack.worker.step_seconds = 0.005
        name = await submit(stack, PROMPT, max_tokens=100)
        await stack.until(lambda loads: loads.num_generation_tokens > 5)
        stack.stop.set()
        assert (await attach(stack, name)).token_ids[0] == expected_tokens(PROMPT, 100)
        assert await stack.running == 0


# Stored outputs


def end_of(num_tokens: int, stop_token_id: int | None = None) -> SequenceEnd:
    reason = EndReason.LENGTH if stop_token_id is None else EndReason.STOP
    return SequenceEnd(0, reason, 5, 0, num_tokens, stop_token_id, "", 0.0, None, None)


@pytest.mark.parametrize("seed", range(20))
def test_text_from_any_token_on_is_the_rest_of_the_whole(checkpoint: Path, seed: int) -> None:
    """Includes partial characters, held-back text, a last token without text, late ends, and deltas of any size."""
    rng = seeded(seed)
    tokenizer = ServedTokenizer(checkpoint / "tokenizer.json")
    token_ids = [rng.randrange(VOCAB_SIZE - 1) for _ in range(rng.randrange(1, 120))]
    stop = ["zzzz", "q"] if seed % 2 else []
    decoder = tokenizer.text_decoder(
        (5, 6), stop=stop, min_tokens=0, include_stop_text=bool(seed % 3), skip_special_tokens=True
    )
    output = SampleRecord(0, decoder, keep_stop_token_text=seed % 4 == 0, is_kept=True)
    live = OutputReader(output, 0)
    received: list[Delta] = []
    done = 0
    while done < len(token_ids):
        size = rng.randrange(1, 9)
        chunk = token_ids[done : done + size]
        is_last = done + size >= len(token_ids)
        end = end_of(len(token_ids), rng.choice([None, chunk[-1]])) if is_last and rng.random() < 0.5 else None
        output.add(chunk, end=end)
        output.process_output()
        done += len(chunk)
        if rng.random() < 0.5:
            received += live.take()
    if output.end is None:
        output.add([], end=end_of(output.num_tokens))
        output.process_output()
    received += live.take()
    whole = asyncio.run(whole_response("id", output))
    assert whole.HasField("usage")
    assert "".join(response.text for response in received) == whole.text
    assert [token for response in received for token in response.token_ids] == list(whole.token_ids)
    texts = []
    for first in range(output.num_tokens + 1):
        rest = list(OutputReader(output, first).take())
        assert [token for response in rest for token in response.token_ids] == list(whole.token_ids)[first:]
        texts.append("".join(response.text for response in rest))
    assert texts[0] == whole.text
    for first, (text, rest_text) in enumerate(pairwise(texts)):
        assert text.endswith(rest_text)
        if first + 1 < output.num_tokens:  # the text of the last token may include the text that is flushed after it
            assert text == output.delta(first, 1).text + rest_text
