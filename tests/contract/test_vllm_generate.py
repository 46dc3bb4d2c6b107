"""VllmEngine's Generate and Abort RPCs: the same tokens as SchedulerService, in the router's messages."""

import asyncio
import contextlib
import json
import math
from pathlib import Path

import grpc
import pytest
from smg_grpc_proto import vllm_engine_pb2
from tokenizers import Tokenizer

from pagewire.common.grammars import GrammarCompiler, GrammarError
from scheduler_service.api.vllm import servicer
from scheduler_service.api.vllm.generate_request import restrict_tool_calls
from testing import scheduler_stack
from testing.scheduler_stack import EOS, VOCAB_SIZE, details, expected_tokens, make_checkpoint, serve
from testing.serving.failures import failure_of
from tests.contract.vllm_client import error_of, generate, request, stub_of

PROMPT = [5, 6, 7, 8, 9, 10, 11]
NAN, INT32_MAX, UINT32_MAX = math.nan, 2**31 - 1, 2**32 - 1

# For every field of SamplingParams: values that must be accepted, and values that must be refused as invalid.
BOUNDARIES: dict[str, tuple[list, list]] = {
    "temperature": ([0, 100], [NAN, -1, 100.001]),
    "top_p": ([0, 1e-6, 1], [NAN, -1, 1.0001]),
    "top_k": ([0, 1, UINT32_MAX], []),
    "min_p": ([0, 1], [NAN, -1, 1.0001]),
    "frequency_penalty": ([-2, 0, 2], [NAN, -2.001, 2.001]),
    "presence_penalty": ([-2, 0, 2], [NAN, -2.001, 2.001]),
    "repetition_penalty": ([0, 1e-6, 100], [NAN, -1, 100.001]),
    "max_tokens": ([1, 3], [0]),
    "min_tokens": ([0, 3], [4, UINT32_MAX]),
    "stop": ([[], ["x" * 256] * 16], [[""], ["x" * 257], ["x"] * 17]),
    "stop_token_ids": ([[], [VOCAB_SIZE - 1] * 64], [[VOCAB_SIZE], [0] * 65]),
    "skip_special_tokens": ([False, True], []),
    "spaces_between_special_tokens": ([False, True], []),
    "ignore_eos": ([False, True], []),
    "n": ([0, 1, 16], [17, UINT32_MAX]),
    "logprobs": ([-1, 0, 20], [-2, 21, INT32_MAX]),
    "prompt_logprobs": ([-1, 0, 20], [-2, 21, INT32_MAX]),
    "seed": ([-(2**31), -1, 0, INT32_MAX], []),
    "include_stop_str_in_output": ([False, True], []),
    "logit_bias": ([{}, {0: -100, VOCAB_SIZE - 1: 100}], [{-1: 0}, {0: NAN}, {0: 100.01}, {VOCAB_SIZE: 0}]),
    "grammar_from_first_token": ([False, True], []),
}
CONSTRAINTS = {field.name for field in vllm_engine_pb2.SamplingParams.DESCRIPTOR.oneofs_by_name["constraint"].fields}
# Fields that are refused for every value.
UNSUPPORTED = {
    "truncate_prompt_tokens": -1,
}


async def test_a_stream_has_chunks_and_one_end(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        expected = expected_tokens(PROMPT, 30)
        output = await generate(stack, request(PROMPT, stream=True, max_tokens=30))
        assert output.streamed == {0: expected}
        assert all(chunk.prompt_tokens == len(PROMPT) for chunk in output.chunks)
        complete = output.complete
        assert (complete.finish_reason, complete.prompt_tokens, complete.cached_tokens) == ("length", len(PROMPT), 0)
        assert complete.WhichOneof("matched_stop") is None
        again = await generate(stack, request([*PROMPT, *expected], stream=True, max_tokens=1))
        assert again.complete.cached_tokens == (len(PROMPT) + 30 - 1) // 4 * 4


async def test_without_a_stream_there_is_only_the_end(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        output = await generate(stack, request(PROMPT, max_tokens=30, n=3))
        assert not output.chunks
        assert {index: list(complete.output_ids) for index, complete in output.completes.items()} == {
            index: expected_tokens(PROMPT, 30, sample_index=index) for index in range(3)
        }
        loads = await stack.until_idle()
        assert loads.num_generation_tokens == 90


async def test_a_text_is_tokenized(checkpoint: Path) -> None:
    prompt = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode("once upon a time").ids
    async with serve(checkpoint) as stack:
        output = await generate(stack, request("once upon a time", max_tokens=5))
        assert list(output.complete.output_ids) == expected_tokens(prompt, 5)
        assert output.complete.prompt_tokens == len(prompt)


async def test_max_tokens_are_as_many_as_fit_if_unset(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        for sampling in ({}, {"max_tokens": 256 - len(PROMPT)}):
            output = await generate(stack, request(PROMPT, **sampling))
            assert len(output.complete.output_ids) == 256 - len(PROMPT), sampling
            assert output.complete.finish_reason == "length"


async def test_more_max_tokens_than_fit_are_refused(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        for max_tokens in (256 - len(PROMPT) + 1, UINT32_MAX):
            error = await failure_of(
                generate(stack, request(PROMPT, max_tokens=max_tokens)), grpc.StatusCode.INVALID_ARGUMENT
            )
            assert details(error)[0].field_violations[0].field == "sampling_params.max_tokens"
            assert f"lower max_tokens to {256 - len(PROMPT)} or shorten the prompt" in error.details()
            assert "max_completion_tokens, max_output_tokens and max_new_tokens are max_tokens here" in error.details()


async def test_a_limit_without_an_end_is_said_as_one(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        error = await failure_of(generate(stack, request(PROMPT, max_tokens=0)))
        assert error.details().startswith("max_tokens is 0, but must be at least 1")


@pytest.mark.parametrize("stream", [False, True])
async def test_stop_tokens(checkpoint: Path, stream: bool) -> None:
    tokens = expected_tokens(PROMPT, 60)
    stop = next(token for i, token in enumerate(tokens) if i > 5 and token not in tokens[:i])
    end = tokens.index(stop) + 1
    async with serve(checkpoint) as stack:
        output = await generate(stack, request(PROMPT, stream=stream, max_tokens=60, stop_token_ids=[stop]))
        assert list(output.complete.output_ids) == tokens[:end]
        assert (output.complete.finish_reason, output.complete.matched_token_id) == ("stop", stop)


async def test_the_models_own_end_token_is_not_told_as_a_match(tmp_path: Path) -> None:
    tokens = expected_tokens(PROMPT, 60)
    eos = next(token for i, token in enumerate(tokens) if i > 5 and token not in tokens[:i])
    checkpoint = make_checkpoint(tmp_path / "model", eos_token_id=eos)
    async with serve(checkpoint) as stack:
        complete = (await generate(stack, request(PROMPT, max_tokens=60))).complete
        assert list(complete.output_ids) == tokens[: tokens.index(eos) + 1]
        assert complete.finish_reason == "stop"
        assert complete.WhichOneof("matched_stop") is None
        ignoring = (await generate(stack, request(PROMPT, max_tokens=60, ignore_eos=True))).complete
        assert list(ignoring.output_ids) == tokens


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stop_text_ends_the_sequence_itself(checkpoint: Path, stream: bool) -> None:
    tokenizer = Tokenizer.from_file(str(checkpoint / "tokenizer.json"))
    tokens = expected_tokens(PROMPT, 100)
    text = tokenizer.decode(tokens)
    stop = next(
        text[i : i + 3]
        for i in range(20, len(text))
        if "\ufffd" not in text[i : i + 3] and text.find(text[i : i + 3]) == i
    )
    async with serve(checkpoint) as stack:
        output = await generate(stack, request(PROMPT, stream=stream, max_tokens=200, stop=["never seen", stop]))
        output_ids = list(output.complete.output_ids)
        assert output_ids == tokens[: len(output_ids)]
        assert stop in tokenizer.decode(output_ids)
        assert stop not in tokenizer.decode(output_ids[:-1])
        assert (output.complete.finish_reason, output.complete.matched_stop_str) == ("stop", stop)
        await stack.until_idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_logprobs(checkpoint: Path, stream: bool) -> None:
    """The fake worker's most likely tokens are 0, 1, ... with logprobs -1, -2, ..."""
    async with serve(checkpoint) as stack:
        plain = await stack.generate(scheduler_stack.request(PROMPT, max_tokens=9, logprobs=2, prompt_logprobs=3))
        output = await generate(stack, request(PROMPT, stream=stream, max_tokens=9, logprobs=2, prompt_logprobs=3))
        parts = [chunk.output_logprobs for chunk in output.chunks] or [output.complete.output_logprobs]
        ours = [entry for response in plain.responses for entry in response.logprobs]
        assert [token_id for part in parts for token_id in part.token_ids] == expected_tokens(PROMPT, 9)
        assert [value for part in parts for value in part.token_logprobs] == [entry.logprob for entry in ours]
        for part in parts:
            for top in part.top_logprobs:
                assert (list(top.token_ids), list(top.values)) == ([0, 1], [-1, -2])
            assert len(part.top_logprobs) == len(part.token_ids)
        prompt = output.chunks[0].input_logprobs if stream else output.complete.input_logprobs
        assert not any(chunk.HasField("input_logprobs") for chunk in output.chunks[1:])
        ours = [entry for response in plain.responses for entry in response.prompt_logprobs]
        assert list(prompt.token_ids) == PROMPT
        assert not prompt.token_logprobs[0].HasField("value")
        assert [entry.value for entry in prompt.token_logprobs[1:]] == [entry.logprob for entry in ours]
        assert [len(top.values) for top in prompt.top_logprobs] == [0, *[3] * (len(PROMPT) - 1)]


async def test_no_logprobs_unless_asked_for(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        output = await generate(stack, request(PROMPT, stream=True, max_tokens=3))
        assert not any(chunk.HasField("output_logprobs") for chunk in output.chunks)
        bare = await generate(stack, request(PROMPT, max_tokens=3, logprobs=0))
        assert len(bare.complete.output_logprobs.token_logprobs) == 3
        assert not bare.complete.output_logprobs.top_logprobs
        every = (await generate(stack, request(PROMPT, max_tokens=2, logprobs=-1, prompt_logprobs=-1))).complete
        assert [len(top.values) for top in every.output_logprobs.top_logprobs] == [VOCAB_SIZE] * 2
        expected = [0, *[VOCAB_SIZE] * (len(PROMPT) - 1)]
        assert [len(top.values) for top in every.input_logprobs.top_logprobs] == expected


def test_every_sampling_field_has_boundaries() -> None:
    fields = {field.name for field in vllm_engine_pb2.SamplingParams.DESCRIPTOR.fields}
    assert {*BOUNDARIES, *UNSUPPORTED, *CONSTRAINTS} == fields


async def test_every_sampling_field_at_its_boundaries(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        for field, (good, bad) in BOUNDARIES.items():
            for value in good:
                error = await error_of(stack, request(PROMPT, **({"max_tokens": 3} | {field: value})))
                assert error is None, f"{field}={value!r}: {error}"
            for value in bad:
                error = await error_of(stack, request(PROMPT, **({"max_tokens": 3} | {field: value})))
                assert error is not None, f"{field}={value!r} was taken"
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, f"{field}={value!r}: {error}"
                violation = details(error)[0].field_violations[0]
                assert violation.field.startswith(f"sampling_params.{field}"), f"{field}={value!r}: {violation}"
        await stack.until_idle()


async def test_unsupported_fields_are_invalid_arguments(checkpoint: Path) -> None:
    """A router maps UNIMPLEMENTED to HTTP 501, which HTTP clients retry."""
    async with serve(checkpoint) as stack:
        for field, value in UNSUPPORTED.items():
            error = await error_of(stack, request(PROMPT, **{field: value}))
            assert error is not None, f"{field} was taken"
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert field in error.details()
            assert details(error)[0].field_violations[0].field == f"sampling_params.{field}"
        for fields in (
            {"mm_inputs": {}},
            {"extra_mm_inputs": [{}]},
            {"media_refs": {}},
            {"kv_transfer_params": {}},
            {"kv_transfer_params_json": ""},
        ):
            message = request(PROMPT)
            message.MergeFrom(vllm_engine_pb2.GenerateRequest(**fields))
            error = await error_of(stack, message)
            assert error is not None, f"{fields} was taken"
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert [*fields] == [details(error)[0].field_violations[0].field]
            assert f"leave {next(iter(fields))} unset" in error.details()


@pytest.fixture(scope="module")
def with_end(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose end token is in its tokenizer, as grammars require."""
    return make_checkpoint(tmp_path_factory.mktemp("models") / "with_end", eos_token_id=0)


@pytest.mark.parametrize(
    ("constraint", "kind", "text"),
    [
        ({"json_schema": '{"type": "object"}'}, "JSON_SCHEMA", '{"type": "object"}'),
        ({"json_object": True}, "JSON_OBJECT", ""),
        ({"regex": "a+"}, "REGEX", "a+"),
        ({"grammar": 'start: "a"'}, "GRAMMAR", 'start: "a"'),
        ({"choice": {"choices": ["é", "b"]}}, "CHOICE", '["é", "b"]'),
    ],
)
@pytest.mark.parametrize("begins", [{}, {"grammar_from_first_token": True}, {"grammar_from_first_token": False}])
async def test_constraints_come_to_the_worker(
    with_end: Path, constraint: dict[str, object], kind: str, text: str, begins: dict[str, bool]
) -> None:
    """Constraints apply from the first token, whatever the request's flags say."""
    async with serve(with_end) as stack:
        await generate(stack, request(PROMPT, max_tokens=2, **constraint, **begins))
        (added,) = stack.worker.grammars
        assert (added.kind.name, added.text, *added.end_token_ids) == (kind, text, 0)
        assert stack.worker.opened_grammar_ids == [added.grammar_id]


async def test_constraints_that_say_nothing_or_cannot_be_read_are_refused(with_end: Path) -> None:
    bad = {
        "json_schema": ["", "{", '{"type": "thing"}'],
        "regex": ["", "("],
        "grammar": ["", "start:: 5"],
        "structural_tag": ["", "{"],
        "json_object": [False],
        "choice": [{}],
    }
    assert bad.keys() == CONSTRAINTS
    async with serve(with_end) as stack:
        for field, values in bad.items():
            for value in values:
                error = await error_of(stack, request(PROMPT, **{field: value}))
                assert error is not None, f"{field}={value!r} was taken"
                assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, f"{field}={value!r}: {error}"
                assert details(error)[0].field_violations[0].field == f"sampling_params.{field}"
        assert stack.worker.grammars == []


async def test_constraints_are_refused_by_the_names_that_http_clients_send(with_end: Path) -> None:
    async with serve(with_end) as stack:
        for field, name in (("json_schema", "response_format"), ("json_schema", "tool_choice"), ("grammar", "ebnf")):
            await failure_of(
                generate(stack, request(PROMPT, **{field: "("})),
                grpc.StatusCode.INVALID_ARGUMENT,
                f"{field} cannot be used: ",
                name,
            )


def call_of(name: str, parameters: object, **more: object) -> dict[str, object]:
    properties = {"name": {"type": "string", "enum": [name]}, "parameters": parameters}
    return {"properties": properties, "required": ["name", "parameters"], **more}


def calls_of(*calls: object) -> str:
    items = {"type": "object", "anyOf": calls}
    return json.dumps({"type": "array", "minItems": 1, "items": items, "$defs": {}}, separators=(",", ":"))


def test_forced_calls_have_nothing_but_names_and_parameters() -> None:
    closed = restrict_tool_calls(calls_of(call_of("a", {"type": "object"}), call_of("é", {"const": 10**30})))
    expected = calls_of(
        call_of("a", {"type": "object"}, additionalProperties=False),
        call_of("é", {"const": 10**30}, additionalProperties=False),
    )
    spelling = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
    assert json.loads(closed) == json.loads(expected) | {"x-guidance": spelling}


def test_forced_calls_are_spelt_in_one_way() -> None:
    """Forced tool calls have exactly one spelling.

    With a space before a comma or bracket, the router would return this call and the following calls as text.
    """
    tokenizer = Path("models/storyteller/tokenizer.json").read_text(encoding="utf-8")
    compiler, encode = GrammarCompiler(tokenizer, 1024), Tokenizer.from_str(tokenizer).encode
    parameters = {"type": "object", "properties": {"n": {"type": "integer"}}, "required": ["n"]}
    call = {"name": "a", "parameters": {"n": 1}}
    text = json.dumps([call, call])
    spaced = {text.replace(sign, space + sign) for sign in ("}", "]", "{", ",") for space in (" ", "\n")}
    taken = []
    for each in (text, *spaced, text.replace(" ", "")):
        matcher = compiler.compile("json_schema", restrict_tool_calls(calls_of(call_of("a", parameters))), (0,))
        with contextlib.suppress(GrammarError):
            matcher.consume([*encode(each, add_special_tokens=False).ids, 0])
            taken.append(each)
    assert taken == [text]


async def test_a_slow_router_gets_token_by_token(with_end: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A slow router gets one token in each chunk, because it would lose tool calls in a longer chunk.

    It does not report which requests have optional tools.
    """
    monkeypatch.setattr(servicer, "send_headers_if_silent", lambda active, context: active.wait_for_end())
    async with serve(with_end) as stack:
        output = await generate(stack, request(PROMPT, stream=True, n=2, max_tokens=9, logprobs=1))
    assert len(output.chunks) == 18
    for chunk in output.chunks:
        assert len(chunk.token_ids) == 1
        assert chunk.output_logprobs.token_ids == chunk.token_ids


@pytest.mark.parametrize(
    "schema",
    [
        "", "{}", '{"type":"array"}', calls_of(call_of("a", {}))[:-1], calls_of(call_of("a", {}, title="mine")),
        calls_of(call_of("a", {}), 5), calls_of(call_of("a", {}), {"properties": 5, "required": []}),
        calls_of(call_of("a", {"const": "x" * 2**19})),
        calls_of(call_of("a", {"const": "MANY"})).replace('"MANY"', "[" * 100_000),
        calls_of(call_of("a", {"const": "HUGE"})).replace('"HUGE"', "1e999"),
        calls_of(call_of("a", {"const": "HUGE"})).replace('"HUGE"', "1" * 5000),
    ],
    ids=lambda schema: schema[:40],
)  # fmt: skip
def test_other_schemas_stay_as_they_are(schema: str) -> None:
    assert restrict_tool_calls(schema) == schema


async def test_bad_prompts(checkpoint: Path) -> None:
    cases = [
        (vllm_engine_pb2.GenerateRequest(), "input"),
        (vllm_engine_pb2.GenerateRequest(tokenized={}), "tokenized.input_ids"),
        (request([1] * 256), "tokenized.input_ids"),
        (request([1, VOCAB_SIZE]), "tokenized.input_ids[1]"),
        (request(""), "text"),
        (request(PROMPT, request_id="x" * 129), "request_id"),
        (vllm_engine_pb2.GenerateRequest(tokenized={"input_ids": PROMPT}, data_parallel_rank=1), "data_parallel_rank"),
    ]
    async with serve(checkpoint) as stack:
        for message, field in cases:
            error = await error_of(stack, message)
            assert error is not None, f"{field}: {message} was taken"
            assert error.code() is grpc.StatusCode.INVALID_ARGUMENT, f"{field}: {error}"
            assert details(error)[0].field_violations[0].field == field


async def test_a_full_queue_is_resource_exhausted_before_the_first_message(checkpoint: Path) -> None:
    async with serve(checkpoint, max_num_seqs=1, max_waiting_requests=1) as stack:
        stack.worker.step_seconds = 0.005
        calls = [asyncio.create_task(generate(stack, request(PROMPT, max_tokens=100)))]
        await stack.until(lambda loads: loads.num_running == 1)
        calls.append(asyncio.create_task(generate(stack, request(PROMPT, max_tokens=2))))
        await stack.until(lambda loads: loads.num_waiting == 1)
        error = await failure_of(generate(stack, request(PROMPT)), grpc.StatusCode.RESOURCE_EXHAUSTED)
        assert details(error)[1].retry_delay.seconds == 1
        await asyncio.gather(*calls)


async def test_abort_ends_the_stream_and_may_come_again(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        stack.worker.step_seconds = 0.005
        abort = vllm_engine_pb2.AbortRequest(request_ids=["one", "unknown", "two"])
        calls = [
            asyncio.create_task(generate(stack, request(PROMPT, stream=True, request_id=name, max_tokens=240)))
            for name in ("one", "two", "three")
        ]
        await stack.until(lambda loads: loads.num_running == 3)
        for _ in range(2):
            await stub_of(stack).Abort(abort)
        for call in calls[:2]:
            assert (await call).complete.finish_reason == "abort"
        stack.worker.step_seconds = 0
        assert (await calls[2]).complete.finish_reason == "length"
        await stack.until_idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_goes_away_frees_its_blocks(checkpoint: Path, stream: bool) -> None:
    async with serve(checkpoint) as stack:
        stack.worker.step_seconds = 0.005
        call = stub_of(stack).Generate(request(PROMPT, stream=stream, max_tokens=240, n=2))
        await stack.until(lambda loads: loads.num_generation_tokens > 4)
        call.cancel()
        loads = await stack.until_idle()
        assert loads.num_generation_tokens < 2 * 240


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_that_fails_ends_with_its_status(checkpoint: Path, stream: bool) -> None:
    """A request that fails ends with its status. The fake worker's logits after its last token are invalid."""
    async with serve(checkpoint) as stack:
        await failure_of(
            generate(stack, request([*PROMPT, VOCAB_SIZE - 1], stream=stream, max_tokens=5, n=2)),
            grpc.StatusCode.INTERNAL,
        )
        await stack.until_idle()


async def test_ids_are_those_of_scheduler_service_too(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        stack.worker.step_seconds = 0.005
        call = asyncio.create_task(generate(stack, request(PROMPT, request_id="same", max_tokens=200)))
        await stack.until(lambda loads: loads.num_running == 1)
        await failure_of(generate(stack, request(PROMPT, request_id="same")), grpc.StatusCode.ALREADY_EXISTS)
        call.cancel()
        assert EOS not in expected_tokens(PROMPT, 200)
        await stack.until_idle()
