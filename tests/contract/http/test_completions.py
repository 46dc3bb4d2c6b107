"""`/v1/completions` over HTTP: the effect of each field, and that streamed and whole responses are equal."""

from pathlib import Path

import pytest
from tokenizers import Tokenizer

from pagewire.client.wire import TIMEOUT_PASSED
from pagewire.common.grammars import GrammarCompiler, Matcher
from pagewire.common.wire.messages import GrammarKind
from scheduler_service.serving.refusal import Reason
from testing.grammars.spelled import allowed_tokens
from testing.scheduler_stack import VOCAB_SIZE, expected_tokens, request
from testing.serving.failures import failure_of
from testing.serving.http_server import HttpServer, joined, server_of_the_module

pytestmark = pytest.mark.asyncio(loop_scope="module")
server = server_of_the_module()

PATH = "/v1/completions"
PROMPT = [5, 6, 7, 8, 9]


async def test_tokens_are_those_of_the_scheduler(server: HttpServer) -> None:
    answer = await server.complete(prompt=PROMPT, seed=0, max_tokens=9, return_token_ids=True)
    (choice,) = answer["choices"]
    assert choice["token_ids"] == expected_tokens(PROMPT, 9)
    assert choice["prompt_token_ids"] == PROMPT
    assert (choice["finish_reason"], choice["stop_reason"], choice["logprobs"]) == ("length", None, None)
    assert answer["object"] == "text_completion"
    assert answer["id"].startswith("cmpl-")
    assert answer["model"] == "chatty"
    usage = answer["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 9, 14)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    await server.stack.until_idle()


async def test_an_output_ends_after_16_tokens_unless_told(server: HttpServer) -> None:
    for unset in ({}, {"max_tokens": None}):
        answer = await server.complete(prompt="once upon", seed=0, **unset)
        assert answer["usage"]["completion_tokens"] == 16


async def test_every_kind_of_prompt(server: HttpServer) -> None:
    one = await server.complete(prompt="once upon", seed=0, max_tokens=5, n=2)
    several = await server.complete(prompt=["once upon", "hello"], seed=0, max_tokens=5, n=2)
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    assert [choice["text"] for choice in several["choices"][:2]] == [choice["text"] for choice in one["choices"]]
    assert several["usage"]["completion_tokens"] == 20
    ids = await server.complete(prompt=[PROMPT, PROMPT], seed=0, max_tokens=5, return_token_ids=True)
    assert [choice["token_ids"] for choice in ids["choices"]] == [expected_tokens(PROMPT, 5)] * 2
    for empty in ([], [[]], ""):
        assert (await server.refusal(PATH, prompt=empty))["param"] == "prompt"
    mixed = await server.complete(prompt=["hello", PROMPT], seed=0, max_tokens=5, return_token_ids=True)
    assert mixed["choices"][1]["token_ids"] == expected_tokens(PROMPT, 5)
    assert (await server.refusal(PATH, prompt=["x", 1]))["param"] == "prompt"
    assert (await server.refusal(PATH, prompt=[1, 300]))["param"] == "prompt"
    assert (await server.refusal(PATH, prompt=[1, -1]))["param"] == "prompt[1]"
    await server.stack.until_idle()


async def test_streamed_is_as_whole(server: HttpServer) -> None:
    """Text, token ids, logprobs with their text offsets, and the finish reason are equal."""
    asked = {"prompt": ["once upon", "hello"], "seed": 0, "n": 2, "logprobs": 2, "return_token_ids": True}
    for more in ({"max_tokens": 40}, {"max_tokens": 200, "stop": ["a", "he"]}, {"max_tokens": 9, "echo": True}):
        server.stack.worker.step_seconds = 0
        whole = (await server.complete(**asked, **more))["choices"]
        server.stack.worker.step_seconds = 0.002
        events = await server.events(PATH, **asked, **more)
        for choice in whole:
            parts = [each for event in events for each in event["choices"] if each["index"] == choice["index"]]
            assert len(parts) > 1
            assert "".join(part["text"] for part in parts) == choice["text"]
            assert joined(part["token_ids"] for part in parts) == choice["token_ids"]
            for column, values in choice["logprobs"].items():
                assert joined(part["logprobs"][column] for part in parts) == values, column
            assert [part["finish_reason"] for part in parts[:-1]] == [None] * (len(parts) - 1)
            for field in ("finish_reason", "stop_reason"):
                assert parts[-1][field] == choice[field]
            assert parts[0]["prompt_token_ids"] == choice["prompt_token_ids"]
        await server.stack.until_idle()


async def test_usage_in_streams(server: HttpServer) -> None:
    server.stack.worker.step_seconds = 0.002
    asked = {"prompt": PROMPT, "max_tokens": 8, "ignore_eos": True, "logprobs": 0}
    assert not any("usage" in event for event in await server.events(PATH, **asked))
    *events, last = await server.events(PATH, **asked, stream_options={"include_usage": True})
    assert {event["usage"] for event in events} == {None}
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 8
    both = {"include_usage": True, "continuous_usage_stats": True}
    *events, last = await server.events(PATH, **asked, stream_options=both)
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(set(counts))
    assert counts[-1] == last["usage"]["completion_tokens"] == 8
    error = await server.refusal(PATH, **asked, stream_options={"include_usage": True})
    assert error["param"] == "stream_options"


async def test_a_text_is_scored(server: HttpServer) -> None:
    """A text is scored as lm-eval requests it: with echo and logprobs, but without new tokens."""
    for stream in (False, True):
        asked = {"prompt": "once upon a time", "max_tokens": 0, "echo": True, "logprobs": 1}
        if stream:
            (event,) = await server.events(PATH, **asked)
            (choice,) = event["choices"]
        else:
            answer = await server.complete(**asked)
            (choice,) = answer["choices"]
            assert answer["usage"]["completion_tokens"] == 0
        assert choice["text"] == "once upon a time"
        logprobs = choice["logprobs"]
        assert "".join(logprobs["tokens"]) == "once upon a time"
        assert logprobs["token_logprobs"][0] is None
        assert all(logprob < 0 for logprob in logprobs["token_logprobs"][1:])
        assert [
            choice["text"][start:][: len(token)]
            for start, token in zip(logprobs["text_offset"], logprobs["tokens"], strict=True)
        ] == logprobs["tokens"]
        assert choice["finish_reason"] == "length"
    assert (await server.refusal(PATH, prompt="x", max_tokens=0))["param"] == "max_tokens"


async def test_logprobs(server: HttpServer) -> None:
    for asked in (0, 1, 5):
        answer = await server.complete(prompt=PROMPT, logprobs=asked, max_tokens=5, seed=0)
        logprobs = answer["choices"][0]["logprobs"]
        assert len(logprobs["tokens"]) == len(logprobs["top_logprobs"]) == 5
        for token, logprob, top in zip(
            logprobs["tokens"], logprobs["token_logprobs"], logprobs["top_logprobs"], strict=True
        ):
            assert next(iter(top.items())) == (token, logprob)
            assert max(asked, 1) <= len(top) <= asked + 1
    ids = await server.complete(prompt=PROMPT, logprobs=0, max_tokens=5, seed=0, return_tokens_as_token_ids=True)
    assert ids["choices"][0]["logprobs"]["tokens"] == [f"token_id:{id}" for id in expected_tokens(PROMPT, 5)]
    prompt = (await server.complete(prompt=PROMPT, prompt_logprobs=2, max_tokens=1))["choices"][0]["prompt_logprobs"]
    assert prompt[0] is None
    assert all(str(token_id) in entry for token_id, entry in zip(PROMPT[1:], prompt[1:], strict=True))


async def test_the_best_are_chosen(server: HttpServer) -> None:
    asked = {"prompt": PROMPT, "seed": 0, "max_tokens": 6, "logprobs": 0, "return_token_ids": True}
    every = (await server.complete(**asked, n=5))["choices"]
    best = (await server.complete(**asked, n=2, best_of=5))["choices"]
    assert [choice["index"] for choice in best] == [0, 1]
    ranked = sorted(every, key=lambda choice: sum(choice["logprobs"]["token_logprobs"]), reverse=True)
    assert [choice["token_ids"] for choice in best] == [choice["token_ids"] for choice in ranked[:2]]
    assert (await server.refusal(PATH, **asked, n=3, best_of=2))["param"] == "best_of"
    assert (await server.refusal(PATH, **asked, best_of=2, stream=True))["param"] == "best_of"


async def test_beam_search(server: HttpServer) -> None:
    answer = await server.complete(prompt=PROMPT, use_beam_search=True, n=3, max_tokens=6, temperature=0)
    assert len({choice["text"] for choice in answer["choices"]}) == 3
    named = await server.complete(prompt=PROMPT, beam_width=3, n=3, max_tokens=6, length_penalty=1.0)
    assert [choice["text"] for choice in named["choices"]] == [choice["text"] for choice in answer["choices"]]
    assert (await server.complete(prompt=PROMPT, length_penalty=1.0))["choices"]


@pytest.mark.parametrize(
    ("asked", "kind", "text"),
    [
        ({"guided_json": {"type": "object"}}, "json_schema", '{"type":"object"}'),
        ({"structured_outputs": {"json": '{"type": "object"}'}}, "json_schema", '{"type": "object"}'),
        ({"structured_outputs": {"json_object": True, "regex": None}}, "json_object", ""),
        ({"structured_outputs": {"choice": ["AAA", "BBB"]}}, "choice", '["AAA", "BBB"]'),
        ({"guided_choice": ["AAA"]}, "choice", '["AAA"]'),
        ({"guided_regex": "[a-z]+"}, "regex", "[a-z]+"),
        ({"structured_outputs": {"grammar": 'start: "a"'}}, "grammar", 'start: "a"'),
        ({"response_format": {"type": "json_object"}}, "json_object", ""),
        ({"response_format": {"type": "json_object", "schema": None}}, "json_object", ""),
        ({"response_format": {"type": "json_object", "schema": {"const": 1}}}, "json_schema", '{"const":1}'),
        (
            {"response_format": {"type": "json_schema", "json_schema": {"schema": {"type": "integer"}}}},
            "json_schema",
            '{"type":"integer"}',
        ),
        (
            {"response_format": {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}},
            "structural_tag",
            '{"type":"structural_tag","format":{"type":"const_string","value":"a"}}',
        ),
    ],
    ids=str,
)
async def test_structured_outputs_come_to_the_worker(
    server: HttpServer, asked: dict[str, object], kind: str, text: str
) -> None:
    await server.complete(prompt=PROMPT, max_tokens=9, **asked)
    added = server.stack.worker.grammars[-1]
    assert (added.kind, added.text) == (GrammarKind[kind.upper()], text)


async def test_what_no_output_can_match_is_refused_by_its_field(server: HttpServer) -> None:
    for field, asked in {
        "guided_regex": {"guided_regex": "[a"},
        "structured_outputs.json": {"structured_outputs": {"json": {"type": "nothing"}}},
        "response_format": {
            "response_format": {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": 5}}}
        },
        "structured_outputs.choice": {"structured_outputs": {"choice": []}},
        "structured_outputs.regex": {"structured_outputs": {"regex": "a"}, "guided_json": {}},
        "response_format.schemas": {"response_format": {"type": "json_object", "schemas": {}}},
    }.items():
        for stream in (False, True):
            error = await server.refusal(PATH, prompt=PROMPT, stream=stream, **asked)
            assert error["param"] == field, error
            assert error["type"] == "invalid_request_error"


async def test_tokens_and_texts_are_ruled_out(server: HttpServer, model: Path) -> None:
    compiler = GrammarCompiler((model / "tokenizer.json").read_text(), VOCAB_SIZE)
    tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))

    async def matcher(**asked: object) -> Matcher:
        await server.complete(prompt=PROMPT, **asked)
        added = server.stack.worker.grammars[-1]
        other_end = 71  # as in a model that has several end tokens
        return compiler.compile(added.kind.name.lower(), added.text, (*added.end_token_ids, other_end))

    endless = await matcher(allowed_token_ids=[70, 72, 70])
    for _ in range(300):
        assert allowed_tokens(endless, VOCAB_SIZE) == [70, 72]
        endless.consume([72])
    assert allowed_tokens(await matcher(allowed_token_ids=[0]), VOCAB_SIZE) == [0]
    ending = await matcher(allowed_token_ids=[70, 0])
    for _ in range(300):
        assert allowed_tokens(ending, VOCAB_SIZE) == [0, 70]
        ending.consume([70])
    ending.consume([70, 0])
    assert allowed_tokens(ending, VOCAB_SIZE) == [0]
    for words, output, following in (
        (["cat", 'a "b"\n'], "conca", "t"), (["cat", 'a "b"\n'], 'a "b"', "\n"), (["x ::= y"], "x ::= ", "y"),
        (["ccat"], "ccca", "t"), (["start: .*/"], "start: .*", "/"),
    ):  # fmt: skip
        free = await matcher(bad_words=words)
        free.consume(tokenizer.encode(output, add_special_tokens=False).ids)
        (last,) = tokenizer.encode(following, add_special_tokens=False).ids
        assert last not in (allowed := allowed_tokens(free, VOCAB_SIZE))
        assert {0, *tokenizer.encode("qA", add_special_tokens=False).ids} <= set(allowed)
    for field, asked in {
        "allowed_token_ids": {"allowed_token_ids": []},
        "allowed_token_ids[1]": {"allowed_token_ids": [0, VOCAB_SIZE]},
        "bad_words[1]": {"bad_words": ["a", ""]},
        "bad_words": {"bad_words": ["a"], "guided_regex": "b"},
    }.items():
        assert (await server.refusal(PATH, prompt=PROMPT, **asked))["param"] == field


async def test_fields_of_sampling(server: HttpServer) -> None:
    wanted = expected_tokens(PROMPT, 30)
    stopped = await server.complete(
        prompt=PROMPT, seed=0, max_tokens=30, stop_token_ids=[wanted[4]], return_token_ids=True
    )
    (choice,) = stopped["choices"]
    assert choice["token_ids"] == wanted[: wanted.index(wanted[4]) + 1]
    assert (choice["finish_reason"], choice["stop_reason"]) == ("stop", wanted[4])
    for accepted in (
        {"top_k": -1}, {"seed": -5}, {"logit_bias": {"5": 2.5}}, {"min_p": 0.1}, {"temperature": 0.0},
        {"presence_penalty": -2}, {"user": "me", "metadata": {"a": "b"}, "store": False}, {"bad_words": []},
        {"priority": -3}, {"cache_salt": "s"}, {"session_id": "s", "will_return": True, "retention_seconds": 5},
        {"skip_special_tokens": False}, {"add_special_tokens": False}, {"suffix": None}, {"suffix": ""},
    ):  # fmt: skip
        await server.complete(prompt=PROMPT, **accepted)
    named = await server.complete(prompt=PROMPT, request_id="mine")
    assert named["id"] == "cmpl-mine"
    await server.stack.until_idle()


async def test_prompts_are_cut_where_that_is_asked_for(server: HttpServer) -> None:
    async def kept(**asked: object) -> list[int]:
        answer = await server.complete(**{"max_tokens": 1, "return_token_ids": True} | asked)
        return answer["choices"][0]["prompt_token_ids"]

    assert await kept(prompt=PROMPT, truncate_prompt_tokens=2) == PROMPT[-2:]
    assert await kept(prompt=PROMPT, truncate_prompt_tokens=2, truncation_side="right") == PROMPT[:2]
    assert await kept(prompt=PROMPT, truncate_prompt_tokens=9) == PROMPT
    assert len(await kept(prompt="xy" * 1000, truncate_prompt_tokens=-1)) == 255
    assert (await server.refusal(PATH, prompt=PROMPT, truncate_prompt_tokens=0))["param"] == "prompt"


async def test_the_client_of_openai(server: HttpServer) -> None:
    create = server.openai.completions.create
    whole = await create(model="chatty", prompt="once", max_tokens=9, seed=0, logprobs=1)
    assert whole.usage.completion_tokens == 9
    text = ""
    async for event in await create(model="chatty", prompt="once", max_tokens=9, seed=0, stream=True):
        text += event.choices[0].text
    assert text == whole.choices[0].text


async def test_a_request_ends_with_its_time(server: HttpServer) -> None:
    """A request ends at its `timeout`, and its memory is freed, as for an RPC with a deadline."""
    server.stack.worker.step_seconds = 0.02
    late = await failure_of(server.front.generate(request("once", max_tokens=240, ignore_eos=True), timeout=0.3))
    endless = {"prompt": "once", "seed": 0, "max_tokens": 240, "ignore_eos": True, "timeout": 0.3}
    error = await server.refusal(PATH, Reason[late.code().name].http_status, **endless)
    assert (error["message"], error["type"], error["param"]) == (TIMEOUT_PASSED, "server_error", None)
    for seconds in (0.3, 1, 3):  # on a busy machine the first tokens need longer
        response = await server.post(PATH, **endless | {"stream": True, "timeout": seconds})
        if response.text.count("data: ") > 3:  # including the error and the end of the stream
            break
    *events, last = server.events_of(response)
    assert len(events) > 1
    assert last == {"error": error}
    await server.stack.until_idle()
    enough = await server.complete(**endless | {"max_tokens": 4, "timeout": 30})
    assert enough["usage"]["completion_tokens"] == 4
    assert (await server.refusal(PATH, **endless | {"timeout": 0}))["param"] == "timeout"
