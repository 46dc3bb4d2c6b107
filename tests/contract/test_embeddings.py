"""Embeddings over gRPC: in our own API, the vLLM API of a router, a shared RPC, a front end, and the client."""

import asyncio
import json
import logging
import re
import struct
from pathlib import Path

import grpc
import grpc.aio
import pytest
from smg_grpc_proto import vllm_engine_pb2
from tokenizers import Tokenizer

from pagewire import AsyncClient, Cancelled, Client, InvalidRequest
from pagewire.common.wire.messages import Pooling
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from scheduler_service.serving.checkpoint.model_info import read_model_info
from testing.core.simulated_worker import reference_embedding
from testing.scheduler_stack import VOCAB_SIZE, Stack, details, make_checkpoint, request, serve
from testing.serving.failures import failure_of
from testing.serving.front_end import serve_front_end
from testing.serving.tenants import PROMPT as TENANTS_PROMPT
from testing.serving.tenants import credentials, write_tenants
from tests.contract.pooling import MODULES, write_pooling
from tests.contract.shared_stream import SharedStream
from tests.contract.vllm_client import stub_of

PROMPT = [5, 6, 7, 8, 9, 10, 11]


@pytest.fixture(scope="module")
def mean_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = make_checkpoint(tmp_path_factory.mktemp("models") / "mean")
    write_pooling(path, pooling_mode_mean_tokens=True, pooling_mode_lasttoken=False)
    return path


def numbers(prompt: list[int], pooling: Pooling = Pooling.LAST) -> list[float]:
    return list(struct.unpack("<2f", reference_embedding(prompt, pooling)))


def embed_request(prompt: list[int] | str, **fields: object) -> pb.EmbedRequest:
    if isinstance(prompt, str):
        return pb.EmbedRequest(text=prompt, **fields)
    return pb.EmbedRequest(token_ids=pb.TokenIds(ids=prompt), **fields)


async def test_tokens_and_texts_are_embedded(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        response = await stack.stub.Embed(embed_request(PROMPT, request_id="mine"))
        assert (response.request_id, list(response.embedding)) == ("mine", numbers(PROMPT))
        assert response.usage == pb.Usage(prompt_tokens=len(PROMPT))
        again = await stack.stub.Embed(embed_request(PROMPT))
        assert (list(again.embedding), again.usage.cached_tokens) == (numbers(PROMPT), 4)
        text = "once upon a time " * 20
        ids = Tokenizer.from_file(str(checkpoint / "tokenizer.json")).encode(text).ids
        assert len(ids) > 64, "the prompt has several chunks"
        assert list((await stack.stub.Embed(embed_request(text))).embedding) == numbers(ids)
        loads = await stack.until_idle()
        assert (loads.num_generation_tokens, loads.num_prompt_tokens) == (0, 2 * len(PROMPT) + len(ids))


async def test_the_checkpoint_says_how_to_pool(mean_checkpoint: Path) -> None:
    async with serve(mean_checkpoint) as stack:
        for _ in range(2):
            response = await stack.stub.Embed(embed_request(PROMPT))
            assert list(response.embedding) == numbers(PROMPT, Pooling.MEAN)
            assert response.usage.cached_tokens == 0


@pytest.mark.parametrize(
    ("message", "field", "text"),
    [
        (pb.EmbedRequest(), "prompt", "no prompt"),
        (embed_request([]), "token_ids.ids", "send at least 1"),
        (embed_request(""), "text", "send at least 1"),
        (embed_request([VOCAB_SIZE]), "token_ids.ids[0]", "must be from 0 to"),
        (embed_request([1] * 256), "token_ids.ids", "shorten the prompt to 255 tokens"),
        (embed_request("once " * 300), "text", "shorten"),
        (embed_request(PROMPT, request_id="x" * 129), "request_id", "must have 1 to 128"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_what_is_no_prompt_is_refused(checkpoint: Path, message: pb.EmbedRequest, field: str, text: str) -> None:
    async with serve(checkpoint) as stack:
        error = await failure_of(stack.stub.Embed(message), grpc.StatusCode.INVALID_ARGUMENT, text)
        assert details(error)[0].field_violations[0].field == field


async def test_embeddings_are_neither_sampled_nor_detached(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        message = request(PROMPT, max_tokens=3)
        message.embed = True
        with pytest.raises(grpc.aio.AioRpcError, match="leave sampling unset"):
            await stack.generate(message)
        message.ClearField("sampling")
        error = await failure_of(stack.stub.Submit(pb.SubmitRequest(request=message)))
        assert "cannot be detached" in error.details()
        (response,) = (await stack.generate(message)).responses
        assert list(response.embedding) == numbers(PROMPT)
        assert (response.finish_reason, response.text) == (pb.FINISH_REASON_STOP, "")


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"architectures": ["Qwen3Model"]}, "Qwen3Model"),
        ({"architectures": ["Qwen2ForCausalLM"], "is_causal": False}, "Qwen2ForCausalLM"),
    ],
)
async def test_a_model_that_only_embeds_generates_nothing(
    tmp_path: Path, settings: dict[str, object], reason: str
) -> None:
    path = make_checkpoint(tmp_path / "model")
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps({**config, **settings}))
    async with serve(path) as stack:
        assert len((await stack.stub.Embed(embed_request(PROMPT))).embedding) > 0
        error = await failure_of(anext(aiter(stack.stub.Generate(request(PROMPT)))), grpc.StatusCode.INVALID_ARGUMENT)
        assert error.details() == f"this checkpoint of {reason} generates no text; ask for embeddings"


@pytest.mark.parametrize(
    ("modules", "config", "text"),
    [
        (MODULES, {"pooling_mode_cls_token": True}, "specifies pooling_mode_cls_token, which is not supported"),
        (
            MODULES,
            {"pooling_mode_mean_tokens": True, "pooling_mode_max_tokens": True},
            "specifies pooling_mode_max_tokens and pooling_mode_mean_tokens",
        ),
        (MODULES, {"pooling_mode": "weightedmean"}, "specifies weightedmean, which"),
        (MODULES, {}, "specifies no pooling mode"),
        (MODULES, {"pooling_mode_lasttoken": True, "include_prompt": False}, "include_prompt is false"),
        (
            [*MODULES, {"path": "3_Dense", "type": "sentence_transformers.models.Dense"}],
            {"pooling_mode_lasttoken": True},
            "has the order Transformer, Pooling, Normalize, Dense, but Transformer, Pooling, Dense, Normalize is supp",
        ),
        (
            [*MODULES, {"path": "3_LayerNorm", "type": "sentence_transformers.models.LayerNorm"}],
            {"pooling_mode_lasttoken": True},
            "has a module LayerNorm, which is not supported",
        ),
    ],
)
async def test_a_pooling_that_is_not_computed_is_named_and_text_is_served(
    tmp_path: Path, modules: object, config: dict[str, object], text: str
) -> None:
    path = make_checkpoint(tmp_path / "model")
    write_pooling(path, modules, **config)
    assert any(text in warning for warning in read_model_info(str(path)).warnings())
    async with serve(path) as stack:
        await failure_of(stack.stub.Embed(embed_request(PROMPT)), grpc.StatusCode.INVALID_ARGUMENT, text)
        assert len((await stack.generate(request(PROMPT, max_tokens=3))).token_ids[0]) == 3


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({}, None),
        ({"activation_function": "torch.nn.modules.linear.Identity", "bias": False, "use_residual": False}, None),
        (
            {"activation_function": "torch.nn.modules.activation.Softplus"},
            "activation_function is torch.nn.*Softplus, but",
        ),
        ({"activation_function": "mine.Tanh"}, "activation_function is mine.Tanh, but must be one of Identity, Tanh"),
        ({"use_residual": True}, "use_residual is true, but must be false"),
        (
            {"module_input_name": "token_embeddings"},
            'module_input_name is "token_embeddings", but must be "sentence_embed',
        ),
        ({"module_output_name": "x"}, 'module_output_name is "x", but must be "sentence_embedding"'),
    ],
)
def test_settings_of_dense_modules_are_supported_or_named(
    tmp_path: Path, settings: dict[str, object], text: str | None
) -> None:
    path = make_checkpoint(tmp_path / "model")
    dense = {"path": "2_Dense", "type": "sentence_transformers.base.modules.dense.Dense"}
    write_pooling(path, [*MODULES[:2], dense], pooling_mode="mean")
    (path / "2_Dense").mkdir()
    (path / "2_Dense" / "config.json").write_text(json.dumps({"in_features": 2, "out_features": 3, **settings}))
    info = read_model_info(str(path))
    if text is None:
        assert (info.embedding_size, info.embedding.refusal, len(info.embedding.dense)) == (3, "", 1)
    else:
        assert re.search(text, info.embedding.refusal)
    (path / "2_Dense" / "config.json").write_text(json.dumps({"in_features": "2", "out_features": 3}))
    with pytest.raises(ValueError, match=r"2_Dense/config.json must have the whole numbers in_features and out_feat"):
        read_model_info(str(path))


@pytest.mark.parametrize(
    ("modules", "text"),
    [
        ("[", "modules.json is not JSON"),
        ("{}", "must contain a list of modules"),
        ('[{"type": 3}]', "each with a type"),
    ],
)
def test_a_broken_modules_file_is_one_line(tmp_path: Path, modules: str, text: str) -> None:
    path = make_checkpoint(tmp_path / "model")
    (path / "modules.json").write_text(modules)
    with pytest.raises(ValueError, match=text):
        read_model_info(str(path))


@pytest.mark.parametrize(
    ("config", "pooling"),
    [
        ({"pooling_mode_mean_tokens": True, "pooling_mode_cls_token": False}, Pooling.MEAN),
        ({"pooling_mode_lasttoken": True}, Pooling.LAST),
        ({"pooling_mode": "mean"}, Pooling.MEAN),
        ({"pooling_mode": "lasttoken", "include_prompt": True}, Pooling.LAST),
    ],
)
def test_both_ways_to_write_a_pooling_are_read(tmp_path: Path, config: dict[str, object], pooling: Pooling) -> None:
    path = make_checkpoint(tmp_path / "model")
    assert read_model_info(str(path)).embedding.pooling is Pooling.LAST, "without a word the last token's"
    write_pooling(path, **config)
    assert read_model_info(str(path)).embedding.pooling is pooling


PROMPTS = {"query": "once upon ", "document": "", "code": "a time: "}


def write_prompts(path: Path, **settings: object) -> None:
    (path / "config_sentence_transformers.json").write_text(json.dumps(settings))


async def test_named_prompts_precede_texts(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model")
    given = {name: prompt for name, prompt in PROMPTS.items() if prompt}  # the others need no entry
    write_prompts(path, prompts=given, default_prompt_name="code", similarity_fn_name="cosine")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    async with serve(path) as stack, AsyncClient(stack.url) as client:
        for name, prompt in {**PROMPTS, None: PROMPTS["code"]}.items():
            expected = numbers(tokenizer.encode(f"{prompt}there was").ids)
            response = await stack.stub.Embed(embed_request("there was", prompt_name=name))
            assert list(response.embedding) == expected
            one, other = await client.embed(["there was", "a"], prompt_name=name)
            assert list(one.values) == expected != list(other.values)
        assert list((await client.embed(prompt_token_ids=PROMPT)).values) == numbers(PROMPT)
        for refused, text in {
            "poem": "prompt_name is 'poem', but must be one of query, document, code",
            "": "prompt_name is '', but must be one of",
        }.items():
            message = embed_request("there was", prompt_name=refused)
            error = await failure_of(stack.stub.Embed(message), grpc.StatusCode.INVALID_ARGUMENT, text)
            assert details(error)[0].field_violations[0].field == "prompt_name"
        with pytest.raises(InvalidRequest, match="applies to texts, but the input is token ids; leave it unset"):
            await client.embed(prompt_token_ids=PROMPT, prompt_name="query")
        with pytest.raises(TypeError, match="prompt_name"):
            await client.embed("a", prompt_name=3)
        message = request(PROMPT, max_tokens=3)
        message.prompt_name = "query"
        with pytest.raises(grpc.aio.AioRpcError, match="prompt_name applies to embeddings; leave it unset, or set em"):
            await stack.generate(message)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"prompts": ["x"]}, r'config_sentence_transformers.json: prompts is \["x"\], but must be an object of texts'),
        ({"prompts": {"query": 3}}, 'prompts is {"query": 3}, but'),
        ({"prompts": PROMPTS, "default_prompt_name": "poem"}, 'default_prompt_name is "poem", but must be one of'),
    ],
)
def test_broken_prompts_are_one_line(tmp_path: Path, settings: dict[str, object], text: str) -> None:
    path = make_checkpoint(tmp_path / "model")
    write_prompts(path, **settings)
    with pytest.raises(ValueError, match=text):
        read_model_info(str(path))


async def test_a_checkpoint_without_prompts_says_so(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        message = embed_request("there was", prompt_name="query")
        text = "prompt_name is 'query', but must be unset: the checkpoint has no prompts"
        await failure_of(stack.stub.Embed(message), grpc.StatusCode.INVALID_ARGUMENT, text)


# A router


async def test_a_routers_requests_are_embedded(mean_checkpoint: Path) -> None:
    async with serve(mean_checkpoint) as stack:
        message = vllm_engine_pb2.EmbedRequest(request_id="embd-1", tokenized={"input_ids": PROMPT})
        response = await stub_of(stack).Embed(message)
        assert list(response.embedding) == numbers(PROMPT, Pooling.MEAN)
        assert (response.prompt_tokens, response.embedding_dim) == (len(PROMPT), 2)
        for input_ids in ([], [1] * 256, [VOCAB_SIZE]):
            bad = vllm_engine_pb2.EmbedRequest(tokenized={"input_ids": input_ids})
            error = await failure_of(stub_of(stack).Embed(bad), grpc.StatusCode.INVALID_ARGUMENT)
            assert details(error)[0].field_violations[0].field.startswith("tokenized.input_ids")


async def until_running(stack: Stack) -> None:
    await stack.until(lambda loads: loads.num_running == 1)


async def test_an_aborted_embedding_is_cancelled(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        await stack.until(lambda loads: loads.worker_connected)
        stack.worker.is_silent = True
        message = vllm_engine_pb2.EmbedRequest(request_id="one", tokenized={"input_ids": PROMPT})
        call = stub_of(stack).Embed(message)
        await until_running(stack)
        await stub_of(stack).Abort(vllm_engine_pb2.AbortRequest(request_ids=["one"]))
        assert (await failure_of(call)).code() is grpc.StatusCode.CANCELLED


async def test_a_client_that_leaves_takes_its_embedding_with_it(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        await stack.until(lambda loads: loads.worker_connected)
        stack.worker.is_silent = True
        call = stack.stub.Embed(embed_request(PROMPT))
        await until_running(stack)
        call.cancel()
        await stack.until(lambda loads: not loads.num_running and not loads.num_waiting)


@pytest.mark.parametrize("pooling", [Pooling.LAST, Pooling.MEAN])
async def test_embeddings_survive_a_lost_worker(checkpoint: Path, mean_checkpoint: Path, pooling: Pooling) -> None:
    prompt = list(range(100))
    async with serve(mean_checkpoint if pooling is Pooling.MEAN else checkpoint) as stack:
        await stack.until(lambda loads: loads.worker_connected)
        stack.worker.is_silent = True
        call = stack.stub.Embed(embed_request(prompt))
        await until_running(stack)
        await stack.worker.kill()
        stack.worker.is_silent = False
        await stack.worker.start()
        assert list((await call).embedding) == numbers(prompt, pooling)


async def test_hidden_states_that_are_no_numbers_are_an_error(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        error = await failure_of(stack.stub.Embed(embed_request([*PROMPT, VOCAB_SIZE - 1])))
        assert (error.code(), "not numbers" in error.details()) == (grpc.StatusCode.INTERNAL, True)


# Many requests, and requests through a front end


async def test_many_embeddings_share_a_call_with_other_requests(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack:
        shared = SharedStream(stack)
        messages = []
        for i in range(30):
            message = pb.GenerateRequest(token_ids=pb.TokenIds(ids=PROMPT[: 1 + i % 7]), embed=i % 2 == 0)
            if i % 2:
                message.sampling.max_tokens = 4
            messages.append(message)
        generated = await asyncio.gather(
            *(shared.generate(message, token_only=i % 3 == 0) for i, message in enumerate(messages))
        )
        for message, (stream,) in zip(messages, generated, strict=True):
            assert stream.last is not None
            expected = numbers(list(message.token_ids.ids)) if message.embed else []
            assert list(stream.last.embedding) == expected
        await shared.close()


async def test_front_ends_pass_embeddings_on(mean_checkpoint: Path) -> None:
    async with serve(mean_checkpoint) as stack, serve_front_end(mean_checkpoint, stack.url) as front:
        response = await front.stub.Embed(embed_request(PROMPT, request_id="far"))
        assert (response.request_id, list(response.embedding)) == ("far", numbers(PROMPT, Pooling.MEAN))
        assert response.usage.prompt_tokens == len(PROMPT)
        text = "once upon a time"
        near, far = [await each.stub.Embed(embed_request(text)) for each in (stack, front)]
        assert near.embedding == far.embedding
        await failure_of(front.stub.Embed(embed_request([VOCAB_SIZE - 1])), grpc.StatusCode.INTERNAL)


async def test_the_client_embeds_one_prompt_and_many(checkpoint: Path) -> None:
    async with serve(checkpoint) as stack, AsyncClient(stack.url) as client:
        one = await client.embed(prompt_token_ids=PROMPT, request_id="one")
        assert (one.request_id, list(one.values)) == ("one", numbers(PROMPT))
        assert (one.usage.prompt_tokens, one.usage.completion_tokens) == (len(PROMPT), 0)
        prompts = [PROMPT[: 1 + i % 7] for i in range(40)]
        many = await client.embed(prompts)
        assert [list(embedding.values) for embedding in many] == [numbers(prompt) for prompt in prompts]
        assert await client.embed([]) == []
        text = await asyncio.to_thread(Client(stack.url).embed, "once upon a time")
        assert text.values == (await client.embed(["once upon a time"]))[0].values
        with pytest.raises(InvalidRequest, match="prompt 1: the prompt has no tokens"):
            await client.embed([PROMPT, []])
        stack.worker.is_silent = True
        running = asyncio.create_task(client.embed(prompt_token_ids=[9, 9], request_id="gone"))
        await until_running(stack)
        await client.abort("gone")
        with pytest.raises(Cancelled, match="aborted before its embedding"):
            await running


async def test_quotas_hold_and_the_log_tells(
    checkpoint: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A tenant with a limit of one request can send the next request after any outcome of the previous one."""
    path = tmp_path / "tenants.yaml"
    limits = {"max_requests": 1, "max_sequences": 1, "max_queued_tokens": 40, "max_blocks": 10}
    write_tenants(path, acme=limits)
    caplog.set_level(logging.INFO)
    async with serve(checkpoint, tenants=str(path), log_requests=True) as stack:
        for _ in range(3):
            response = await stack.stub.Embed(embed_request(TENANTS_PROMPT), metadata=credentials("acme"))
            assert list(response.embedding) == numbers(TENANTS_PROMPT)
        error = await failure_of(stack.stub.Embed(embed_request([1] * 41), metadata=credentials("acme")))
        assert "may queue 40" in error.details()
    lines = [record.getMessage() for record in caplog.records if "num_output_tokens=0" in record.getMessage()]
    assert len(lines) == 3
    assert all(": stop (tenant=acme" in line and "num_prompt_tokens=40" in line for line in lines)
