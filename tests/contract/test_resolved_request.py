"""Requests that a front end has resolved: they arrive unchanged, and a forged request is refused without effect on
others.
"""

import asyncio
import math
import random
import re
from collections.abc import AsyncIterator, Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import FieldDescriptor
from google.protobuf.message import Message

from pagewire.common.wire.messages import Pooling, SamplingParams, illegal_values
from pagewire.common.wire.sampling_rules import ALL_TOKENS, FILTERS_OFF, MAX_GRAMMAR_BYTES
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2_grpc as pb_grpc
from scheduler_service.api.grpc import resolved_request
from scheduler_service.api.grpc.generate_request import read_request
from scheduler_service.api.grpc.resolved_request import (
    FRONT_END_PROTOCOL,
    decode_resolved,
    encode_resolved,
    read_submitted,
)
from scheduler_service.core.request import Request
from scheduler_service.serving.checkpoint.model_info import ModelInfo, read_model_info
from scheduler_service.serving.checkpoint.sampling_defaults import SUPPRESSING_BIAS
from scheduler_service.serving.parsed_request import SAME_NUMBERS, parse_request
from scheduler_service.serving.refusal import Reason, RefusedError
from scheduler_service.serving.tenants.caller import Call, Caller
from testing.scheduler_stack import EOS, VOCAB_SIZE, expected_tokens, make_checkpoint, request, serve
from testing.serving.front_end import DEADLINE, serve_front_end
from testing.serving.tenants import code_of, credentials, read_to_end, serve_tenants, slow_stack, write_tenants
from tests.contract.bench_stack import stack_of
from tests.contract.shared_stream import SharedStream

ANY_CALL = Call(Caller(None))
PROMPT = [1, 2, 3, 4, 5]
LIMIT = 256


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> ModelInfo:
    return read_model_info(
        str(make_checkpoint(tmp_path_factory.mktemp("models") / "suppressing", suppress_tokens=[3, 9]))
    )


def resolved(message: pb.GenerateRequest, model: ModelInfo, limit: int = LIMIT) -> Request:
    """Return the request that a front end resolves from a client's message."""
    parsed = read_request(message, ANY_CALL, model)
    return parsed.fit(parsed.prompt, model, limit, None)


def read(message: pb.ResolvedRequest, model: ModelInfo, limit: int = LIMIT) -> Request:
    """Return the request that the scheduler decodes from a front end's message. Raises RefusedError."""
    parsed = decode_resolved(pb.ResolvedRequest.FromString(message.SerializeToString()), ANY_CALL, model)
    return parsed.fit(parsed.prompt, model, limit, None)


@pytest.mark.parametrize("seed", range(3))
def test_a_request_arrives_as_it_was_sent(model: ModelInfo, seed: int) -> None:
    print(f"seed {seed}")
    rng = random.Random(seed)
    kinds: set[str | None] = set()
    for _ in range(300):
        message = random_request(rng)
        kinds.add(message.sampling.WhichOneof("structured_output"))
        sent = resolved(message, model)
        encoded = encode_resolved(sent, LIMIT)
        assert read(encoded, model) == sent
        assert bool(encoded.max_tokens) == (sent.max_tokens != LIMIT - len(PROMPT))
    assert kinds == {None, *GRAMMARS} == {None, *(field.name for field in STRUCTURED_OUTPUT.fields)}


def test_an_embedding_arrives_as_it_was_sent(model: ModelInfo) -> None:
    sent = resolved(EMBEDDING, model)
    assert sent.sampling == SamplingParams(pooling=Pooling.LAST)
    assert read(encode_resolved(sent, LIMIT), model) == sent


@pytest.mark.parametrize("limit", [100, 1000])
def test_the_scheduler_limits_max_tokens_of_resolved_requests(model: ModelInfo, limit: int) -> None:
    """The scheduler limits `max_tokens` by its own worker.

    A worker with another capacity may have connected since the front end resolved the request.
    """
    sent = resolved(request(PROMPT), model)
    assert read(encode_resolved(sent, LIMIT), model, limit) == replace(sent, max_tokens=limit - len(PROMPT))
    exact = resolved(request(PROMPT, max_tokens=250), model)
    if limit == 1000:
        assert read(encode_resolved(exact, LIMIT), model, limit) == exact
    else:
        with pytest.raises(
            RefusedError, match=r"together 255; this server allows 100; lower max_tokens to 95"
        ) as error:
            read(encode_resolved(exact, LIMIT), model, limit)
        assert error.value.field == "sampling.max_tokens"


def test_internal_fields_are_not_in_the_message() -> None:
    """Four fields of a request are not in the message.

    Deadlines use the scheduler's own clock, and the other fields come from the RPC.
    """
    names = {field.name for field in pb.ResolvedRequest.DESCRIPTOR.fields}
    assert {*Request.__dataclass_fields__} - names == {"deadline", "traceparent", "output_mode", "has_stop_texts"}


async def test_tokens_of_resolved_requests_come_in_columns_and_without_text(model: ModelInfo) -> None:
    async with stack_of(model.directory) as stack:
        shared = SharedStream(stack)
        sent = encode_resolved(resolved(request(PROMPT, max_tokens=20, n=3), model), LIMIT)
        streams = await shared.submit_resolved(sent)
        async with asyncio.timeout(DEADLINE):
            for stream in streams:
                await stream.ended.wait()
        await shared.close()
    for index, stream in enumerate(streams):
        assert stream.token_ids == expected_tokens(PROMPT, 20, sample_index=index)
        assert [delta.text for delta in stream.deltas] == [""]
        assert stream.last.finish_reason == pb.FINISH_REASON_LENGTH


async def test_each_sample_has_a_stream_of_its_own(model: ModelInfo) -> None:
    async with stack_of(model.directory) as stack:
        sent = encode_resolved(resolved(request(PROMPT, n=4), model), LIMIT)
        call = stack.stub.GenerateMany()
        for stream_id in (0, 3):
            await call.write(pb.GenerateManyRequest(submit={"stream_id": stream_id, "resolved": sent}))
        async with asyncio.timeout(DEADLINE):
            with pytest.raises(grpc.aio.AioRpcError, match="stream_id is 3, but this call has used ids below 4"):
                await read_to_end(call)


# Forged requests


EMBEDDING = pb.GenerateRequest(request_id="e", token_ids={"ids": PROMPT}, embed=True, session_id="chat")
GOOD: dict[str, pb.GenerateRequest] = {
    "sampled": request(PROMPT, max_tokens=9, temperature=0.5, n=2, stop_token_ids=[7, 8], logit_bias={1: 2, 5: -1}),
    "reported": request(PROMPT, max_tokens=9, logprobs=2, prompt_logprobs=1),
    "listed": request(PROMPT, max_tokens=9, logprob_token_ids=[7, 5]),
    "beams": request(PROMPT, max_tokens=9, beam_width=4, n=2),
    "matched": request(PROMPT, max_tokens=9, regex="[a-z]+"),
    "embedded": EMBEDDING,
}
for _name, _message in GOOD.items():
    _message.request_id = _name
Forge = Callable[[pb.ResolvedRequest], object]


def setting(path: str, value: Any) -> Forge:
    """Return a function that sets a field of a message. `path` names nested fields with dots."""

    def forge(message: Message) -> None:
        *parents, name = path.split(".")
        for parent in parents:
            message = getattr(message, parent)
        if isinstance(value, list):
            getattr(message, name)[:] = value
        else:
            setattr(message, name, value)

    return forge


def widened(message: pb.ResolvedRequest, number: int) -> None:
    ids = range(10, 10 + number)
    message.sampling.logit_bias_token_ids[:], message.sampling.logit_bias_values[:] = ids, [1.0] * number


def suppressing(message: pb.ResolvedRequest, token_ids: Sequence[int]) -> None:
    message.sampling.logit_bias_token_ids[:] = token_ids
    message.sampling.logit_bias_values[:] = [SUPPRESSING_BIAS] * len(token_ids)


# The name of the valid request, the change that forges it, and the field that the error names.
FORGED: list[tuple[str, Forge, str]] = [
    *(
        ("sampled", setting("sampling.temperature", value), r"sampling\.tem.*")
        for value in (-1, 101, math.nan, math.inf)
    ),
    *(("sampled", setting("sampling.top_p", value), "sampling.top_p") for value in (0, 2, 1e-50, math.nan)),
    *(("sampled", setting("sampling.min_p", value), "sampling.min_p") for value in (-0.1, 2, math.nan)),
    *(("sampled", setting("sampling.repetition_penalty", value), r"sampling\.rep.*") for value in (0, 101, math.nan)),
    *(("sampled", setting("sampling.presence_penalty", value), r"sampling\.pre.*") for value in (-3, math.nan)),
    *(("sampled", setting("sampling.frequency_penalty", value), r"sampling\.fre.*") for value in (3, math.inf)),
    *(("sampled", setting("n", value), r"sampling\.n") for value in (0, 17, 10**6)),
    ("sampled", setting("max_tokens", 252), r"sampling\.max_tokens"),
    ("sampled", setting("max_tokens", 2**32 - 1), r"sampling\.max_tokens"),
    ("sampled", setting("sampling.min_tokens", 10), r"sampling\.min_tokens"),
    ("sampled", setting("prompt_token_ids", []), r"token_ids\.ids"),
    ("sampled", setting("prompt_token_ids", [1] * LIMIT), r"token_ids\.ids"),
    ("sampled", setting("prompt_token_ids", [1, VOCAB_SIZE, 2]), r"token_ids\.ids\[1\]"),
    ("sampled", setting("prompt_token_ids", [1, 2**32 - 1, 2]), r"token_ids\.ids\[1\]"),
    ("sampled", setting("sampling.stop_token_ids", [8, 7, EOS]), "resolved"),
    ("sampled", setting("sampling.stop_token_ids", [7, 7, EOS]), "resolved"),
    ("sampled", setting("sampling.stop_token_ids", [7, VOCAB_SIZE]), r"sampling\.stop_token_ids\[1\]"),
    ("sampled", setting("sampling.stop_token_ids", [*range(65), EOS]), r"sampling\.stop_token_ids"),
    ("sampled", partial(widened, number=1025), r"sampling\.logit_bias"),
    ("sampled", setting("sampling.logit_bias_token_ids", [1, 3, 5]), "resolved"),
    ("sampled", setting("sampling.logit_bias_token_ids", [3, 1, 5, 9]), "resolved"),
    ("sampled", setting("sampling.logit_bias_token_ids", [1, 1, 5, 9]), "resolved"),
    ("sampled", setting("sampling.logit_bias_token_ids", [1, 3, 5, VOCAB_SIZE]), "resolved"),
    # The checkpoint suppresses exactly tokens 3 and 9.
    ("sampled", partial(suppressing, token_ids=[]), "resolved"),
    ("sampled", partial(suppressing, token_ids=[3]), "resolved"),
    ("sampled", partial(suppressing, token_ids=[3, 9, 10]), "resolved"),
    ("sampled", partial(suppressing, token_ids=range(VOCAB_SIZE)), "resolved"),
    ("sampled", setting("sampling.logit_bias_values", [101, 1, 1, 1]), r"sampling\.logit_bias\[1\]"),
    ("sampled", setting("sampling.logit_bias_values", [math.nan, 1, 1, 1]), r"sampling\.logit_bias\[1\]"),
    ("sampled", setting("sampling.logit_bias_values", [-1e30, 1, 1, 1]), r"sampling\.logit_bias\[1\]"),
    ("sampled", setting("sampling.num_candidates", 4), "resolved"),
    ("sampled", setting("sampling.pooling", pb.POOLING_LAST), "resolved"),
    ("sampled", setting("sampling.pooling", 7), "resolved"),
    ("reported", setting("sampling.num_logprobs", 21), r"sampling\.logprobs"),
    ("reported", setting("sampling.num_prompt_logprobs", 2**32 - 1), r"sampling\.prompt_logprobs"),
    ("listed", setting("sampling.num_logprobs", 3), "resolved"),
    ("listed", setting("sampling.logprob_token_ids", [7, 7]), "resolved"),
    ("listed", setting("sampling.logprob_token_ids", [7, VOCAB_SIZE]), r"sampling\.logprob_token_ids\[1\]"),
    ("listed", setting("sampling.logprob_token_ids", [*range(129)]), r"sampling\.logprob_token_ids"),
    ("listed", lambda message: message.sampling.ClearField("num_logprobs"), "resolved"),
    ("beams", setting("beam.beam_width", 0), r"sampling\.beam_width"),
    ("beams", setting("beam.beam_width", 17), r"sampling\.beam_width"),
    ("beams", setting("n", 5), r"sampling\.n"),
    ("beams", setting("beam.length_penalty", math.nan), r"sampling\.length_penalty"),
    ("beams", setting("beam.early_stopping", 0), "resolved"),
    ("beams", setting("beam.early_stopping", 9), "resolved"),
    ("beams", setting("sampling.temperature", 1), r"sampling\.temperature"),
    ("beams", setting("sampling.num_logprobs", 1), r"sampling\.logprobs"),
    ("beams", setting("sampling.num_candidates", VOCAB_SIZE), "resolved"),
    ("beams", lambda message: message.sampling.ClearField("num_candidates"), "resolved"),
    ("beams", lambda message: message.ClearField("beam"), "resolved"),
    ("matched", setting("grammar.kind", 0), "resolved"),
    ("matched", setting("grammar.kind", 99), "resolved"),
    ("matched", setting("grammar.text", "é" * (MAX_GRAMMAR_BYTES // 2 + 1)), r"sampling\.regex"),
    ("matched", setting("grammar.text", "a" * (2 * MAX_GRAMMAR_BYTES)), "resolved"),
    ("matched", setting("grammar.end_token_ids", []), "resolved"),
    ("matched", setting("grammar.end_token_ids", [7]), "resolved"),
    ("embedded", setting("n", 2), "resolved"),
    ("embedded", setting("max_tokens", 1), "resolved"),
    ("embedded", setting("sampling.top_p", 0.5), "resolved"),
    ("embedded", setting("sampling.pooling", pb.POOLING_MEAN), "resolved"),
    ("embedded", setting("sampling.logit_bias_values", [1]), "resolved"),
    ("embedded", setting("beam.beam_width", 4), "resolved"),
    ("embedded", setting("grammar.text", "a"), "resolved"),
    ("embedded", lambda message: message.ClearField("sampling"), r"sampling\.top_p|sampling\.repetition_penalty"),
    *(("sampled", setting("request_id", name), "request_id") for name in ("", "x" * 129)),
    ("sampled", setting("request_id", "x" * 100_000), "resolved"),
    ("sampled", setting("tenant", "x" * 1025), "tenant"),
    ("sampled", setting("cache_salt", "é" * 1025), "cache_salt"),
    ("sampled", setting("session_id", "x" * 129), "session_id"),
    ("sampled", setting("retention_seconds", 0), "retention_seconds"),
    ("sampled", lambda message: message.MergeFromString(b"\x98\x06\x01"), "resolved"),
    ("sampled", lambda message: message.sampling.MergeFromString(b"\x98\x06\x01"), "resolved"),
    ("sampled", lambda message: message.sampling.MergeFromString(b"\x98\x06\x01" * 50_000), "resolved"),
    ("sampled", setting("sampling.stop_token_ids", [1] * 100_000), "resolved"),
]


def forged(model: ModelInfo, name: str, forge: Forge) -> pb.ResolvedRequest:
    message = encode_resolved(resolved(GOOD[name], model), LIMIT)
    forge(message)
    return message


@pytest.mark.parametrize(("name", "forge", "field"), FORGED)
def test_a_forged_request_is_refused(model: ModelInfo, name: str, forge: Forge, field: str) -> None:
    with pytest.raises(RefusedError) as refused:
        read(forged(model, name, forge), model)
    assert refused.value.reason is Reason.INVALID_ARGUMENT
    assert re.fullmatch(field, refused.value.field), refused.value.field


async def test_forged_requests_fail_alone(model: ModelInfo) -> None:
    async with stack_of(model.directory, max_waiting_requests=1000) as stack:
        stack.worker.step_seconds = 0.005
        shared = SharedStream(stack)
        good = encode_resolved(resolved(request(PROMPT, max_tokens=200), model), LIMIT)
        (running,) = await shared.submit_resolved(good)
        streams = []
        for number, (name, forge, _) in enumerate(FORGED):
            message = forged(model, name, forge)
            message.request_id = message.request_id and f"{number}-{message.request_id}"
            streams += (await shared.submit_resolved(message))[:1]
        async with asyncio.timeout(DEADLINE):
            for stream in (running, *streams):
                await stream.ended.wait()
        for (name, _, field), stream in zip(FORGED, streams, strict=True):
            assert stream.failure is not None, (name, field)
            assert stream.failure.code == grpc.StatusCode.INVALID_ARGUMENT.value[0], stream.failure
        assert running.token_ids == expected_tokens(PROMPT, 200)
        await shared.close()
        assert len(stack.worker.epochs) == 1


@pytest.mark.parametrize("seed", range(4))
def test_accepted_forgeries_equal_valid_requests(model: ModelInfo, seed: int) -> None:
    """Forge random fields at any depth. A message that is still accepted must equal some request that options resolve
    to.
    """
    print(f"seed {seed}")
    rng, num_read, paths, reasons = random.Random(seed), 0, set(), set()
    for _ in range(3000):
        message = encode_resolved(resolved(rng.choice(list(GOOD.values())), model), LIMIT)
        for _ in range(rng.randrange(1, 3)):
            paths.add(forge_one(rng, message))
        try:
            found = read(message, model)
        except RefusedError as refused:
            reasons.add(refused.reason)
            continue
        num_read += 1
        assert not [*illegal_values(found.sampling)]
        assert all(token_id < VOCAB_SIZE for token_id in found.sampling.logit_bias_token_ids)
        assert could_be_asked_for(found, model)
    assert num_read > 300
    assert reasons == {Reason.INVALID_ARGUMENT}
    assert len(paths) == sum(len(kind.fields) for kind in KINDS) - 3  # except three fields that contain messages


KINDS = (
    pb.ResolvedRequest.DESCRIPTOR,
    pb.ResolvedSampling.DESCRIPTOR,
    pb.BeamSearch.DESCRIPTOR,
    pb.Grammar.DESCRIPTOR,
)
INTEGERS = (0, 1, 2, 3, 7, 16, 17, 20, 21, 64, 127, EOS, VOCAB_SIZE, 2**31 - 1)
FLOATS = (0.0, -0.0, 1.0, -1.0, 0.5, 2.0, 100.0, 1e-50, 1e-38, 3e38, math.nan, math.inf, -math.inf, -(2.0**100))


def forge_one(rng: random.Random, message: Message) -> str:
    """Change one random field, at any depth. Return the field's full name."""
    field = rng.choice(message.DESCRIPTOR.fields)
    if field.message_type is not None:
        return forge_one(rng, getattr(message, field.name))
    if rng.random() < 0.2:
        message.ClearField(field.name)
    elif field.is_repeated:
        values = getattr(message, field.name)
        values[:] = rng.choice(([*values, value_of(rng, field)], values[1:], values[::-1], [*values, *values]))
    else:
        setattr(message, field.name, value_of(rng, field))
    return field.full_name


def value_of(rng: random.Random, field: FieldDescriptor) -> Any:
    match field.cpp_type:
        case FieldDescriptor.CPPTYPE_BOOL:
            return rng.random() < 0.5
        case FieldDescriptor.CPPTYPE_FLOAT | FieldDescriptor.CPPTYPE_DOUBLE:
            return rng.choice(FLOATS)
        case FieldDescriptor.CPPTYPE_STRING:
            return rng.choice(("", "x", "[a-z]", "é😀", "a" * 129, "a" * 1025, "\0"))
        case FieldDescriptor.CPPTYPE_INT32:
            return rng.choice((*INTEGERS, -1, -(2**31)))
        case FieldDescriptor.CPPTYPE_ENUM:
            return rng.choice((0, 1, 2, 3, 99))
        case _:
            return rng.choice((*INTEGERS, 2**32 - 1))


def could_be_asked_for(found: Request, model: ModelInfo) -> bool:
    """Return whether the options of a client's request can resolve to this request."""
    sampling, grammar, beam = found.sampling, found.grammar, found.beam
    options: dict[str, Any] | None = None
    if sampling.pooling is Pooling.NONE:
        biases = zip(sampling.logit_bias_token_ids, sampling.logit_bias_values, strict=True)
        options = {
            "n": found.n, "seed": found.seed, "max_tokens": found.max_tokens, "ignore_eos": True,
            "stop_token_ids": sampling.stop_token_ids, "logit_bias": {id: bias for id, bias in biases if bias > -1000},
            "logprob_token_ids": sampling.logprob_token_ids,
        }  # fmt: skip
        options |= {name: getattr(sampling, name) for name in SAME_NUMBERS if beam is None or name not in FILTERS_OFF}
        for name in ("logprobs", "prompt_logprobs"):
            number = getattr(sampling, f"num_{name}")
            options |= {} if number is None else {name: ALL_TOKENS if number == VOCAB_SIZE else number}
        if sampling.logprob_token_ids:
            del options["logprobs"]
        else:
            del options["logprob_token_ids"]
        if beam is not None:
            options |= {"beam_width": beam.beam_width, "length_penalty": beam.length_penalty}
            options |= {"early_stopping": beam.early_stopping}
    parsed = parse_request(
        found.prompt_token_ids, options, ANY_CALL, model, request_id=found.request_id, tenant=found.tenant,
        priority=found.priority, cache_salt=found.cache_salt, session_id=found.session_id,
        will_return=found.will_return, retention_seconds=found.retention_seconds,
    )  # fmt: skip
    asked = parsed.fit(found.prompt_token_ids, model, LIMIT, None)
    # The grammar's text is checked elsewhere.
    kept = replace(asked.sampling, num_candidates=sampling.num_candidates)
    return replace(asked, grammar=grammar, sampling=kept) == found


def test_a_request_of_too_many_bytes_is_not_read(model: ModelInfo, monkeypatch: pytest.MonkeyPatch) -> None:
    """A request that is too large is refused before parsing.

    Parsing 16 MiB of unknown fields would block the event loop for seconds.
    """

    def never(message: object) -> None:
        raise AssertionError("it is read")

    for name in ("unknown_field", "_decode"):
        monkeypatch.setattr(resolved_request, name, never)
    message = encode_resolved(resolved(GOOD["sampled"], model), LIMIT)
    message.prompt_token_ids[:] = [1] * 3_000_000  # up to 5 bytes each: the prompt alone may fill the limit
    message.MergeFromString(b"\x98\x06\x01" * 4_000_000)
    with pytest.raises(RefusedError, match=r"has 12000\d\d\d bytes besides its prompt, the limit is 65536"):
        read(message, model)


@pytest.mark.parametrize("form", ["request", "resolved"])
def test_a_prompt_stays_in_its_message_until_it_fits(model: ModelInfo, form: str) -> None:
    """A prompt stays in its message until its length is checked, because converting millions of tokens would block the
    event loop.
    """
    submission = pb.Submission(request=request([1] * 1_000_000))
    if form == "resolved":
        submission.resolved.CopyFrom(encode_resolved(resolved(GOOD["sampled"], model), LIMIT))
        submission.resolved.prompt_token_ids[:] = submission.request.token_ids.ids
    parsed = read_submitted(submission, ANY_CALL, model)
    assert not isinstance(parsed.prompt, tuple)
    assert parsed.request.prompt_token_ids == ()
    with pytest.raises(RefusedError, match="the prompt has 1000000 tokens, this server allows 256"):
        parsed.fit(parsed.prompt, model, LIMIT, None)


def test_a_resolved_request_counts_before_another_form(model: ModelInfo) -> None:
    """A resolved request takes precedence over another form in the same message.

    So a front end's checks apply to the form that is used.
    """
    both = pb.Submission(request=GOOD["beams"], resolved=encode_resolved(resolved(GOOD["sampled"], model), LIMIT))
    for message in (both, pb.SubmitRequest(request=both.request, resolved=both.resolved)):
        assert read_submitted(message, ANY_CALL, model).request.request_id == "sampled"


def test_texts_of_a_detached_request_are_checked_too(model: ModelInfo) -> None:
    message = pb.SubmitRequest(
        resolved=encode_resolved(resolved(GOOD["sampled"], model), LIMIT), stop=["a", "b"], include_stop_text=True
    )
    parsed = read_submitted(message, ANY_CALL, model)
    assert (parsed.stop, parsed.include_stop_text, parsed.skip_special_tokens) == (("a", "b"), True, False)
    for stop, name in ((["x"] * 17, "sampled"), (["x" * 257], "sampled"), ([""], "sampled"), (["x"], "beams")):
        message = pb.SubmitRequest(resolved=encode_resolved(resolved(GOOD[name], model), LIMIT), stop=stop)
        with pytest.raises(RefusedError, match="stop") as refused:
            read_submitted(message, ANY_CALL, model)
        assert refused.value.field.startswith("sampling.stop")


# Tenants


async def test_a_forged_tenant_is_refused(checkpoint: Path, tmp_path: Path) -> None:
    tenants = tmp_path / "tenants.yaml"
    write_tenants(tenants)
    model, revisions = read_model_info(str(checkpoint)), {"": "", "said": "0" * 64}
    good = encode_resolved(resolved(request(PROMPT, max_tokens=2), model), LIMIT)
    expected = {
        ("acme", "globex", ""): grpc.StatusCode.PERMISSION_DENIED,
        ("acme", "acme", "said"): grpc.StatusCode.PERMISSION_DENIED,
        ("acme", "acme", ""): None,
        ("acme", "", ""): None,
        ("root", "globex", "said"): None,
        ("root", "stranger", "said"): grpc.StatusCode.UNAUTHENTICATED,
        ("root", "", "said"): grpc.StatusCode.UNAUTHENTICATED,
    }
    async with slow_stack(checkpoint, tenants) as stack:
        for (caller, named, revision), code in expected.items():
            shared = SharedStream(stack, metadata=credentials(caller))
            good.tenant, good.request_id = named, f"{caller}-{named}-{revision}"
            (stream,) = await shared.submit_resolved(good, tenants_revision=revisions[revision])
            async with asyncio.timeout(DEADLINE):
                await stream.ended.wait()
            found = stream.failure and stream.failure.code
            assert found == (code and code.value[0]), (caller, named, revision, stream.failure)
            await shared.close()


async def test_no_client_forges_a_tenant_through_a_front_end(checkpoint: Path, tmp_path: Path) -> None:
    """The scheduler trusts the front end, so the front end must check its clients' tenants as the scheduler would."""
    tenants = tmp_path / "tenants.yaml"
    write_tenants(tenants)
    good = encode_resolved(resolved(request(PROMPT, max_tokens=2), read_model_info(str(checkpoint))), LIMIT)
    async with serve_tenants(checkpoint, tmp_path, tenants) as (stack, front):
        for tenant, code in (("globex", grpc.StatusCode.PERMISSION_DENIED), ("acme", None), ("", None)):
            good.tenant, good.request_id = tenant, f"of-{tenant}"
            for server in (front, stack):
                shared = SharedStream(server, metadata=credentials("acme"))
                (stream,) = await shared.submit_resolved(good)
                async with asyncio.timeout(DEADLINE):
                    await stream.ended.wait()
                assert (stream.failure and stream.failure.code) == (code and code.value[0]), stream.failure
                await shared.close()
            for decoy in (None, GOOD["sampled"]):
                good.request_id = f"detached-{tenant}-{decoy is None}"
                message = pb.SubmitRequest(resolved=good, request=decoy)
                assert await code_of(front.stub.Submit(message, metadata=credentials("acme"))) is code
                named = pb.GetResultRequest(request_id=good.request_id)
                kept = await code_of(stack.stub.GetResult(named, metadata=credentials("acme")))
                assert kept is (code and grpc.StatusCode.NOT_FOUND)


# Other protocol versions


class OtherScheduler(pb_grpc.SchedulerServiceServicer):
    """A fake scheduler that sends its server info and must not receive any request."""

    def __init__(self, info: pb.GetServerInfoResponse) -> None:
        self.info, self.commands = info, 0

    async def GenerateMany(
        self, requests: AsyncIterator[pb.GenerateManyRequest], context: grpc.aio.ServicerContext
    ) -> AsyncIterator[pb.GenerateManyResponse]:
        yield pb.GenerateManyResponse(server_info=self.info)
        async for _ in requests:
            self.commands += 1


@pytest.mark.parametrize("version", [0, FRONT_END_PROTOCOL + 1])
async def test_a_scheduler_of_another_protocol_is_sent_nothing(checkpoint: Path, version: int) -> None:
    """A scheduler with another protocol version gets no request.

    An older release reports version 0, and would not find the prompt.
    """
    async with serve(checkpoint) as stack:
        info = await stack.stub.GetServerInfo(pb.GetServerInfoRequest())
    assert info.front_end_protocol == FRONT_END_PROTOCOL
    info.front_end_protocol = version
    server, scheduler = grpc.aio.server(), OtherScheduler(info)
    pb_grpc.add_SchedulerServiceServicer_to_server(scheduler, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    told = (
        f"it speaks version {version} of the front-end protocol, this front end {FRONT_END_PROTOCOL}; install the same"
    )
    async with serve_front_end(checkpoint, f"127.0.0.1:{port}", waits=False) as front, asyncio.timeout(DEADLINE):
        while True:  # until the front end has received the scheduler's server info
            with pytest.raises(grpc.aio.AioRpcError) as refused:
                await front.generate(request(PROMPT), timeout=5)
            assert refused.value.code() is grpc.StatusCode.UNAVAILABLE
            if told in refused.value.details():
                break
    assert not scheduler.commands
    await server.stop(0)


STRUCTURED_OUTPUT = pb.SamplingParams.DESCRIPTOR.oneofs_by_name["structured_output"]
GRAMMARS: dict[str, object] = {
    "json_schema": '{"type": "object"}',
    "json_object": True,
    "regex": "[a-z]+é",
    "choice": {"texts": ["yes", 'n"o', "", "é\n"]},
    "grammar": 'start: "a"',
    "structural_tag": '{"format": {"type": "any_text"}}',
}


def random_request(rng: random.Random) -> pb.GenerateRequest:
    sampling: dict[str, object] = {
        "n": rng.randrange(1, 5), "seed": rng.getrandbits(64), "max_tokens": rng.randrange(20, 252),
        "min_tokens": rng.randrange(20), "stop_token_ids": rng.sample([7, 8, EOS], k=rng.randrange(4)),
        "ignore_eos": rng.random() < 0.5, "repetition_penalty": rng.choice([0.5, 1.0, 1.25]),
        "presence_penalty": rng.choice([-1.0, 0.5]), "logit_bias": {3: 1.5, 1: -2.0},
        "skip_special_tokens": rng.random() < 0.5,
    }  # fmt: skip
    if rng.random() < 0.3:
        sampling |= {"beam_width": 5, "length_penalty": rng.choice([0.0, 0.75]), "early_stopping": rng.randrange(1, 4)}
        sampling = {key: sampling[key] for key in rng.sample(sorted(sampling), k=rng.randrange(len(sampling)))}
        sampling["beam_width"] = 5
    else:
        sampling |= {
            "temperature": rng.choice([0.0, 0.5]), "top_p": 0.75, "top_k": 5, "min_p": 0.25, "prompt_logprobs": 1,
            "logprobs": rng.randrange(3),
        }  # fmt: skip
        sampling = {key: sampling[key] for key in rng.sample(sorted(sampling), k=rng.randrange(len(sampling)))}
    # An unset max_tokens is filled with the remaining context, and seeds and ids are random, so this request sets them.
    sampling["seed"] = rng.getrandbits(64)
    if rng.random() < 0.5:
        kind = rng.choice(list(GRAMMARS))
        sampling[kind] = GRAMMARS[kind]
    return pb.GenerateRequest(
        request_id="r",
        tenant=rng.choice(["", "t"]),
        cache_salt=rng.choice(["", "s"]),
        priority=rng.randrange(-5, 5),
        session_id=rng.choice(["", "chat"]),
        will_return=rng.choice([None, False, True]),
        retention_seconds=rng.choice([None, 1, 2**32 - 1]),
        sampling=pb.SamplingParams(**sampling),
        token_ids=pb.TokenIds(ids=PROMPT),
    )
