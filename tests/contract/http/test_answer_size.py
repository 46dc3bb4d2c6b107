"""The memory that responses need is limited before any token is computed."""

import asyncio
import json
import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from pagewire.common.wire.sampling_rules import faults_in
from scheduler_service.api.http import answering
from scheduler_service.core.request import TokenLogprobs
from scheduler_service.serving import parsed_request
from scheduler_service.serving.output import OutputReader, SampleRecord
from testing.serving.http_server import HttpServer, make_chat_checkpoint, serve_http
from tests.contract.http.shared import CHAT, COMPLETION, MIB, chat, of, shared_server
from tests.contract.pooling import write_pooling

EMBEDDINGS = "/v1/embeddings"


@pytest.mark.parametrize(
    ("field", "path", "asked"),
    [
        ("prompt_logprobs", COMPLETION, {"prompt": [[5] * 200] * 250, "prompt_logprobs": 20}),
        ("prompt_logprobs", COMPLETION, {"prompt": [[5] * 200] * 16, "prompt_logprobs": 20, "n": 16, "stream": True}),
        ("logprobs", COMPLETION, {"prompt": [[5]] * 250, "logprobs": 20, "max_tokens": 200}),
        ("echo", COMPLETION, {"prompt": [[5] * 200] * 1024, "echo": True, "n": 16}),
        ("return_token_ids", COMPLETION, {"prompt": [[5] * 200] * 1024, "return_token_ids": True, "n": 16}),
        ("top_logprobs", CHAT, chat("x") | {"logprobs": True, "top_logprobs": 20, "n": 16, "max_tokens": 200}),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
async def test_response_memory_is_limited_before_computation(
    server: HttpServer, monkeypatch: pytest.MonkeyPatch, field: str, path: str, asked: dict[str, Any]
) -> None:
    monkeypatch.setattr(answering, "MAX_ANSWER_BYTES", 4 * MIB)
    error = await server.refusal(path, **({"max_tokens": 1} | asked))
    assert error["param"] == field
    assert str(4 * MIB) in error["message"]
    assert (await server.stack.loads()).num_prompt_tokens == 0


async def test_embedding_memory_is_limited_before_computation(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answering, "MAX_ANSWER_BYTES", 4 * MIB)
    model = make_chat_checkpoint(tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"hidden_size": 1024}))
    write_pooling(model, pooling_mode_mean_tokens=False, pooling_mode_lasttoken=True)
    async with serve_http(model) as server:
        for asked, fits, beyond in (
            ({}, 160, 200),
            ({"encoding_format": "base64"}, 600, 800),
            ({"dimensions": 128}, 0, 1500),  # more values than the worker's embeddings have
        ):
            if fits:
                assert (await server.post(EMBEDDINGS, input=[[5]] * fits, **asked)).status_code == 200
            before = (await server.stack.loads()).num_prompt_tokens
            error = await server.refusal(EMBEDDINGS, input=[[5]] * beyond, **asked)
            assert (error["param"], str(4 * MIB) in error["message"]) == ("input", True)
            assert (await server.stack.loads()).num_prompt_tokens == before


async def test_answers_of_a_tenant_share_a_bound(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("scheduler_service.serving.intake.MAX_TENANT_ANSWER_BYTES", MIB // 2)
    asked = {"prompt": [5] * 40, "max_tokens": 100, "logprobs": 20, "n": 2, "seed": 0, "ignore_eos": True}
    async with shared_server(model, tmp_path) as server:
        server.stack.worker.step_seconds = 0.01
        tenants = ("acme", "acme", "globex")
        answers = await asyncio.gather(*(server.post(COMPLETION, of(tenant), **asked) for tenant in tenants))
        assert sorted(answer.status_code for answer in answers[:2]) == [200, 429]
        assert any("answers of this tenant" in answer.text for answer in answers[:2])
        assert answers[2].status_code == 200
        assert (await server.post(COMPLETION, of("acme"), **asked)).status_code == 200


async def test_tokens_of_texts_do_not_wait_as_lists(server: HttpServer) -> None:
    """Waiting token ids are stored compactly.

    Peak memory must be smaller than lists of token ids would be, at 8 bytes for each small id.
    """
    text, num = "yz" * 50_000, 24
    whole = (await server.post("/tokenize", prompt=text)).json()["tokens"]
    assert len(whole) > 50_000
    tracemalloc.start()
    try:
        await asyncio.gather(*(server.post("/tokenize", prompt=text) for _ in range(num)))
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak < num * 8 * len(whole)


async def test_no_grammar_is_copied_for_many_prompts(server: HttpServer) -> None:
    """A request with many prompts is refused if the copies of its grammar, one for each prompt, would be too large."""
    choice = ["a" * 60] * 200
    error = await server.refusal(COMPLETION, prompt=["x"] * 1024, structured_outputs={"choice": choice}, max_tokens=1)
    assert error["param"] == "structured_outputs.choice"
    assert "send fewer prompts" in error["message"]
    assert (await server.stack.loads()).num_prompt_tokens == 0
    answer = await server.complete(prompt=["x"] * 16, structured_outputs={"choice": choice}, max_tokens=1)
    assert len(answer["choices"]) == 16


async def test_options_are_read_once_for_all_prompts(server: HttpServer, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[Any] = []

    def faults_of(options: Any) -> Any:
        read.append(options)
        return faults_in(options)

    monkeypatch.setattr(parsed_request, "faults_in", faults_of)
    asked = {"prompt": ["x"] * 16, "logit_bias": dict.fromkeys(range(256), 1), "max_tokens": 8}
    rendered = await server.post("/v1/completions/render", **asked)
    assert len(rendered.json()) == 16
    assert len(read) == 1
    seeded, drawn = await server.complete(**asked), await server.complete(**asked, seed=None)
    assert len({choice["text"] for choice in seeded["choices"]}) == 1
    assert len({choice["text"] for choice in drawn["choices"]}) > 1


@pytest.mark.parametrize("path", ["/v1/responses", "/v1/responses/input_tokens"])
async def test_long_request_ids_are_refused(server: HttpServer, path: str) -> None:
    """Each stored item would contain a copy of the request's id."""
    asked = {"request_id": "r" * 100_000, "input": [{"role": "user", "content": "a"}] * 400}
    tracemalloc.start()
    try:
        error = await server.refusal(path, **asked)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert error["param"] == "request_id"
    assert peak < 8 * MIB


def test_log_probabilities_that_wait_take_few_bytes() -> None:
    entry = TokenLogprobs(5, -0.5, 1, tuple((token_id, -0.5) for token_id in range(20)))
    record = SampleRecord(0, with_logprobs=True, is_whole=True)
    record.add([5] * 1000, [entry] * 1000, [entry] * 1000)
    record.process_output()
    assert record.num_bytes < 2 * 1000 * 21 * 20
    [*_, last] = OutputReader(record, max_tokens=100).take()
    assert list(last.logprobs) == [entry] * 100
    record.forget()
    assert record.num_bytes < 20_000
