"""Requests as clients of other servers send them, each taken from a public report of a refused request.

Values that request no effect are accepted. Values that request an unsupported effect are refused by field name.
"""

import json
from collections.abc import AsyncIterator
from functools import partial
from typing import Any

import anthropic
import pytest
import pytest_asyncio

from scheduler_service.api.http.body import decode_body
from scheduler_service.api.http.messages.requests import MessagesRequest
from scheduler_service.api.http.requests import ChatCompletionRequest, JsonSchemaFormat
from testing.serving.http_server import HttpServer, serve_http
from tests.contract.http.scripted import WEATHER, make_tool_checkpoint
from tests.growth import check_growth

pytestmark = pytest.mark.asyncio(loop_scope="module")

COMPLETIONS, CHAT, EMBEDDINGS = "/v1/completions", "/v1/chat/completions", "/v1/embeddings"
MESSAGES, RESPONSES = "/v1/messages", "/v1/responses"
QUESTION = {"role": "user", "content": "hi"}
TOOL = {"type": "function", "function": {"name": "weather", "parameters": WEATHER}}
PLAIN: dict[str, dict[str, Any]] = {
    COMPLETIONS: {"prompt": "hi", "max_tokens": 2},
    CHAT: {"messages": [QUESTION], "max_tokens": 2, "seed": 0},
    EMBEDDINGS: {"input": "hi"},
    MESSAGES: {"messages": [QUESTION], "max_tokens": 2},
    RESPONSES: {"input": "hi", "max_output_tokens": 2, "store": False},
}


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[HttpServer]:
    async with serve_http(make_tool_checkpoint(tmp_path_factory.mktemp("models") / "chatty")) as server:
        yield server


async def accepted(server: HttpServer, path: str, **body: Any) -> Any:
    response = await server.post(path, **PLAIN[path] | body)
    assert response.status_code == 200, (body, response.text)
    return response.json()


async def refused_field(server: HttpServer, path: str, **body: Any) -> str:
    error = await server.refusal(path, **PLAIN[path] | body)
    assert error["param"] in error["message"]
    return str(error["param"])


async def test_null_of_an_unknown_field_counts_as_unset(server: HttpServer) -> None:
    """Spring AI, langchain4j, Semantic Kernel and Anthropic's C# client send all of their own fields,
    even unset ones.
    """
    for path in PLAIN:
        await accepted(server, path, moderation=None, lora_path=None, keep_alive=None)
        assert await refused_field(server, path, moderation=None, keep_alive="5m") == "keep_alive"
    function = {**TOOL["function"], "returns": None}  # type: ignore[dict-item]
    await accepted(server, CHAT, tools=[{**TOOL, "function": function, "cache": None}])
    await accepted(server, CHAT, response_format={"type": "text", "json_schema": None})
    await accepted(server, CHAT, response_format={"type": "json_object", "json_schema": None})


async def test_null_within_schemas_and_messages_stays() -> None:
    schema = {"type": "object", "properties": {"a": {"enum": [None, 1.0, False]}}, "default": None}
    body = {
        "messages": [{"role": "user", "content": "hi", "more": None, "of": [{"a": None, "b": 2.0}]}],
        "tools": [{"type": "function", "function": {"name": "w", "parameters": schema}}],
        "response_format": {"type": "json_schema", "json_schema": {"schema": schema}},
        "chat_template_kwargs": {"a": None, "b": 2.0},
        "unknown": None,
        "max_tokens": 2.0,
    }
    read = decode_body(json.dumps(body).encode(), ChatCompletionRequest)
    assert json.dumps(read.messages) == json.dumps(body["messages"])
    assert read.tools is not None
    assert json.dumps(read.tools[0].function.parameters) == json.dumps(schema)
    assert json.dumps(read.chat_template_kwargs) == json.dumps(body["chat_template_kwargs"])
    assert isinstance(read.response_format, JsonSchemaFormat)
    assert json.dumps(json.loads(bytes(read.response_format.json_schema.schema))) == json.dumps(schema)


async def test_whole_floats_are_integers(server: HttpServer) -> None:
    """Lua, JavaScript and Go's maps have no integers: LiteLLM sent `max_tokens` as 100.0."""
    answer = await accepted(server, CHAT, max_tokens=3.0, n=1.0, top_k=40.0, seed=1.0, ignore_eos=True)
    assert answer["usage"]["completion_tokens"] == 3
    assert (await accepted(server, COMPLETIONS, prompt=[5.0, 6.0]))["usage"]["prompt_tokens"] == 2
    await accepted(server, MESSAGES, max_tokens=2.0, top_k=1.0)
    await accepted(server, RESPONSES, max_output_tokens=2.0)
    for value in (2.5, 1e300, "2", True):
        assert await refused_field(server, CHAT, max_tokens=value) == "max_tokens"


async def test_empty_values_of_what_is_not_served_ask_for_nothing(server: HttpServer) -> None:
    nothing = {"logits_processors": [], "vllm_xargs": {}, "kv_transfer_params": {}, "watermarking": False}
    await accepted(server, CHAT, **nothing, mm_processor_kwargs={}, audio={}, prediction={})
    await accepted(server, COMPLETIONS, **nothing, prompt_embeds=[])
    await accepted(server, RESPONSES, conversation="", prompt={})
    assert await refused_field(server, CHAT, vllm_xargs={"a": 1}) == "vllm_xargs"


async def test_false_where_no_boolean_is_expected_asks_for_nothing(server: HttpServer) -> None:
    """`logprobs` is a boolean in chats, and some proxies pass it on to completions."""
    assert (await accepted(server, COMPLETIONS, logprobs=False))["choices"][0]["logprobs"] is None
    assert await refused_field(server, COMPLETIONS, logprobs=True) == "logprobs"


async def test_a_body_is_read_as_meant_in_linear_time() -> None:
    def read(number: int) -> None:
        turn = {"role": "assistant", "id": None, "content": [{"type": "text", "text": "a", "index": None}]}
        body = json.dumps({"max_tokens": 4.0, "messages": [turn] * number}).encode()
        assert len(decode_body(body, MessagesRequest).messages) == number

    check_growth("a body", lambda number: partial(read, number), 250)


async def test_top_logprobs_of_zero_asks_for_nothing(server: HttpServer) -> None:
    answer = await accepted(server, CHAT, logprobs=False, top_logprobs=0)
    assert answer["choices"][0]["logprobs"] is None
    await accepted(server, CHAT, top_logprobs=0)
    assert await refused_field(server, CHAT, top_logprobs=1) == "top_logprobs"


async def test_choices_of_a_tool_that_other_apis_write(server: HttpServer) -> None:
    """Cursor sends the modes of `tool_choice` as objects, and Zed sends `disable_parallel_tool_use` without tools."""
    for mode in ("auto", "none", "required"):
        as_text, as_object = [
            await prompt_and_calls(server, tools=[TOOL], tool_choice=choice) for choice in (mode, {"type": mode})
        ]
        assert as_text == as_object
    await accepted(server, CHAT, tools=[], tool_choice={"type": "auto"})
    assert await refused_field(server, CHAT, tool_choice={"type": "required"}) == "tool_choice"
    await accepted(server, MESSAGES, tool_choice={"type": "none", "disable_parallel_tool_use": True})


async def prompt_and_calls(server: HttpServer, **body: Any) -> tuple[str, bool]:
    """Return the prompt of a chat, and whether its output contained tool calls."""
    answer = await accepted(server, CHAT, **body, return_token_ids=True)
    prompt = await server.post("/detokenize", tokens=answer["prompt_token_ids"])
    return prompt.json()["prompt"], "tool_calls" in answer["choices"][0]["message"]


async def test_texts_of_responses_are_texts_of_chats(server: HttpServer) -> None:
    """LangChain's agents sent `output_text` parts to the chats of vLLM."""
    for kind in ("text", "input_text", "output_text"):
        told = [{"role": role, "content": [{"type": kind, "text": "sun"}]} for role in ("user", "assistant", "user")]
        prompt, _ = await prompt_and_calls(server, messages=told)
        assert prompt.startswith("<user>sun<assistant>sun<user>sun")


async def test_images_in_results_of_tools_are_left_out_with_a_warning(server: HttpServer) -> None:
    """Images in tool results are replaced by a note, with a warning.

    Qwen Code, Strands and other agents put screenshots into tool messages.
    """
    call = {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}}
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,aGk="}}
    asked = [QUESTION, {"role": "assistant", "content": None, "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "1", "content": [{"type": "text", "text": "rain"}, image]}
    response = await server.post(CHAT, **PLAIN[CHAT] | {"messages": [*asked, result], "return_token_ids": True})
    assert "images in the results of tools are left out" in response.headers["warning"]
    prompt = await server.post("/detokenize", tokens=response.json()["prompt_token_ids"])
    assert "rain" in prompt.json()["prompt"]
    assert "[An image was left out here: the model reads text only.]" in prompt.json()["prompt"]
    refusal = await server.refusal(CHAT, messages=[{"role": "user", "content": [image]}])
    assert "'image_url', but only texts are supported" in refusal["message"]
    response = await server.post(CHAT, **PLAIN[CHAT] | {"messages": [*asked, result | {"content": "rain"}]})
    assert "warning" not in response.headers


async def test_calls_of_messages_without_arguments_or_cut_off(server: HttpServer) -> None:
    def history(**given: Any) -> list[dict[str, Any]]:
        use = {"type": "tool_use", "id": "1", "name": "weather", **given}
        result = {"type": "tool_result", "tool_use_id": "1", "content": "rain"}
        return [QUESTION, {"role": "assistant", "content": [use]}, {"role": "user", "content": [result]}]

    counts = [
        (await server.post(f"{MESSAGES}/count_tokens", messages=history(**given))).json()["input_tokens"]
        for given in ({"input": {}}, {}, {"input": None}, {"input": ""}, {"input": " "}, {"input": '{"city": "Os'})
    ]
    assert len({*counts[:5]}) == 1
    assert counts[5] > counts[0]
    await accepted(server, MESSAGES, messages=history(input=None))


async def test_results_of_nothing_in_responses(server: HttpServer) -> None:
    call = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"}
    result = {"type": "function_call_output", "call_id": "1", "output": None}
    await accepted(server, RESPONSES, input=[QUESTION, call, result])


async def test_top_k_of_messages_may_be_off(server: HttpServer) -> None:
    await accepted(server, MESSAGES, top_k=-1)
    assert await refused_field(server, MESSAGES, top_k=-2) == "top_k"


async def test_fields_without_an_effect_may_be_anything(server: HttpServer) -> None:
    for user in ({"id": "x"}, 1, ["x"]):
        await accepted(server, CHAT, user=user)
    await accepted(server, CHAT, tools=[{**TOOL, "cache_control": {"type": "ephemeral"}}])


async def test_paths_with_slashes_too_many(server: HttpServer) -> None:
    """LiteLLM, Open WebUI, aichat and others join a base URL that ends in a slash with a path that
    begins with a slash.
    """
    for path in ("/v1/chat/completions/", "/v1//chat/completions", "//v1/chat/completions", "/v1/chat//completions//"):
        url = server.client.base_url.copy_with(raw_path=path.encode())
        response = await server.client.post(url, json=PLAIN[CHAT])
        assert response.status_code == 200, path
    assert (await server.client.get("/v1/models/")).json()["object"] == "list"
    assert (await server.client.get("/v1/models//chatty")).status_code == 404


async def test_an_empty_content_encoding_is_none(server: HttpServer) -> None:
    response = await server.post(CHAT, {"content-encoding": ""}, **PLAIN[CHAT])
    assert response.status_code == 200


async def test_media_are_refused_in_the_same_words(server: HttpServer) -> None:
    """Images, audio, videos and files are refused with the same error text in all APIs. The model reads text only."""
    image, audio = {"url": "data:image/png;base64,aGk="}, {"data": "aGk=", "format": "wav"}
    source = {"type": "base64", "media_type": "image/png", "data": "aGk="}
    parts: list[tuple[str, str, dict[str, Any]]] = [
        (CHAT, "see images", {"type": "image_url", "image_url": image}),
        (CHAT, "see images", {"type": "input_image", "image_url": "https://example.com/a.png"}),
        (CHAT, "hear audio", {"type": "input_audio", "input_audio": audio}),
        (CHAT, "hear audio", {"type": "audio_url", "audio_url": image}),
        (CHAT, "see videos", {"type": "video_url", "video_url": image}),
        (CHAT, "read files", {"type": "file", "file": {"file_id": "file-1"}}),
        (RESPONSES, "see images", {"type": "input_image", "image_url": "data:image/png;base64,aGk=", "detail": "auto"}),
        (RESPONSES, "hear audio", {"type": "input_audio", "input_audio": audio}),
        (RESPONSES, "read files", {"type": "input_file", "file_id": "file-1"}),
        (MESSAGES, "see images", {"type": "image", "source": source}),
    ]
    for path, verb, part in parts:
        field = "input" if path == RESPONSES else "messages"
        text = {"type": "input_text" if path == RESPONSES else "text", "text": "look: "}
        asked = {field: [QUESTION, {"role": "user", "content": [text, part]}]}
        for more in ({}, {"stream": True}):
            error = await server.refusal(path, **PLAIN[path] | asked | more)
            place = f"{field}[1].content[1].type"
            assert error["param"] == place
            assert error["message"] == (
                f"{place} is {part['type']!r}, but only texts are supported: this model does not {verb}; leave the "
                "part out, or send its content as text"
            )
    for kind in ("base64", "url", "file"):
        block = {"type": "document", "source": {"type": kind, "file_id": "x"}}
        error = await server.refusal(MESSAGES, **PLAIN[MESSAGES] | {"messages": [{"role": "user", "content": [block]}]})
        assert "this model does not read files" in error["message"]
    assert "is not a field" in (await server.refusal(RESPONSES, input="hi", image_url="x"))["message"]


FLAT = {"type": "function", **TOOL["function"]}  # type: ignore[dict-item]


async def test_tools_and_choices_in_the_form_of_the_other_api(server: HttpServer) -> None:
    """Agents that speak both APIs keep tools in one form: tools of LibreChat and Cursor were refused."""
    chosen, flat = {"type": "function", "function": {"name": "weather"}}, {"type": "function", "name": "weather"}
    named, allowed = {"mode": "required", "tools": [chosen]}, {"mode": "required", "tools": [flat]}
    choices: list[tuple[Any, Any]] = [
        (chosen, flat),
        ({"type": "allowed_tools", "allowed_tools": named}, {"type": "allowed_tools", **allowed}),
    ]
    for choice, other in choices:
        prompts = [
            await prompt_and_calls(server, tools=[tool], tool_choice=each, max_tokens=40)
            for tool, each in ((TOOL, choice), (FLAT, other))
        ]
        assert prompts[0] == prompts[1]
        own = await accepted(server, RESPONSES, tools=[FLAT], tool_choice=other, seed=0)
        foreign = await accepted(server, RESPONSES, tools=[TOOL], tool_choice=choice, seed=0)
        assert [own[name] for name in ("tools", "tool_choice")] == [foreign[name] for name in ("tools", "tool_choice")]
        assert own["usage"] == foreign["usage"]
    await accepted(server, CHAT, tools=[{**FLAT, "strict": None, "cache_control": {"type": "ephemeral"}}])
    assert await refused_field(server, CHAT, tools=[{**FLAT, "returns": "x"}]) == "tools[0].returns"
    assert await refused_field(server, RESPONSES, tools=[{**TOOL, "returns": "x"}]) == "tools[0].returns"
    assert (
        await refused_field(server, RESPONSES, tools=[FLAT], tool_choice={**chosen, "name": 5})
        == "tool_choice.function"
    )
    error = await server.refusal(CHAT, messages=[QUESTION], tools=[{"type": "function"}])
    assert error["param"] == "tools[0].function"


FILE = "[A file was left out here: the model reads text only.]"


async def test_files_in_results_of_tools_are_left_out_with_a_warning(server: HttpServer) -> None:
    """Claude Code's Read returns a PDF this way. Every later request of the conversation was refused."""
    source = {"type": "base64", "media_type": "application/pdf", "data": "JVBERi0="}
    file = {"type": "file", "file": {"filename": "a.pdf", "file_data": "data:application/pdf;base64,JVBERi0="}}
    uses: list[Any] = [{"type": "tool_use", "id": "1", "name": "weather", "input": {}}]
    results: dict[str, list[Any]] = {
        MESSAGES: [
            {"role": "assistant", "content": uses},
            {
                "role": "user",
                "content": [
                    {"type": "tool_result", "tool_use_id": "1"} | {"content": [{"type": "document", "source": source}]}
                ],
            },
        ],
        RESPONSES: [
            {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "1"}
            | {"output": [{"type": "input_file", "filename": "a.pdf", "file_data": "data:,"}]},
        ],
        CHAT: [
            {
                "role": "assistant",
                "content": None,
                "tool_calls": [
                    {"id": "1", "type": "function", "function": {"name": "weather", "arguments": "{}"}},
                ],
            },
            {"role": "tool", "tool_call_id": "1", "content": [file]},
        ],
    }
    warning = "files in the results of tools are left out: the model reads text only"
    for path, turns in results.items():
        asked = {"input" if path == RESPONSES else "messages": [QUESTION, *turns, QUESTION]}
        response = await server.post(path, **PLAIN[path] | asked)
        assert response.status_code == 200, response.text
        assert response.headers["warning"] == f'299 - "{warning}"'
    prompt, _ = await prompt_and_calls(server, messages=[QUESTION, *results[CHAT]])
    assert FILE in prompt


async def test_texts_of_chats_are_texts_of_responses(server: HttpServer) -> None:
    """Agents that keep the history of a chat send it to the Responses API."""
    call = {"type": "function_call", "call_id": "1", "name": "weather", "arguments": "{}"}
    usages = []
    for asked, said, told in (
        ("input_text", "output_text", "input_text"),
        ("text", "text", "text"),
        ("text", "output_text", "output_text"),
    ):
        items = [
            {"role": "user", "content": [{"type": asked, "text": "sun?"}]},
            {"role": "assistant", "content": [{"type": said, "text": "rain"}], "end_turn": True},
            call,
            {"type": "function_call_output", "call_id": "1"}
            | {
                "output": [
                    {"type": told, "text": "snow"} | ({"annotations": [], "logprobs": []} if "output" in told else {})
                ]
            },
        ]
        usages.append((await accepted(server, RESPONSES, input=items))["usage"]["input_tokens"])
    assert len({*usages}) == 1


async def test_forms_of_answers_in_the_form_of_the_other_api(server: HttpServer) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
    nested: dict[str, Any] = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    flat: dict[str, Any] = {"type": "json_schema", "name": "a", "schema": schema, "strict": True}
    for given in (nested, flat, {"type": "json_schema", "schema": schema}):
        await accepted(server, CHAT, response_format=given)
        assert json.loads(server.stack.worker.grammars[-1].text) == schema
    for given in (nested, flat):
        answer = await accepted(server, RESPONSES, text={"format": given})
        assert answer["text"]["format"]["schema"] == schema
    assert await refused_field(server, CHAT, response_format=flat | {"more": "x"}) == "response_format.more"


async def test_choices_and_reasoning_as_other_vendors_write_them(server: HttpServer) -> None:
    """Mistral and Anthropic have other values for `tool_choice`, and OpenRouter has a `reasoning` object."""
    chosen = await prompt_and_calls(server, tools=[TOOL], tool_choice="required", max_tokens=40)
    for choice in ("any", {"type": "any"}, {"type": "tool", "name": "weather"}):
        assert await prompt_and_calls(server, tools=[TOOL], tool_choice=choice, max_tokens=40) == chosen
    for reasoning in ({"effort": "low"}, {"enabled": True}, {"enabled": False}):
        await accepted(server, CHAT, reasoning=reasoning)
    read = decode_body(json.dumps(PLAIN[CHAT] | {"reasoning": {"effort": "low"}}).encode(), ChatCompletionRequest)
    assert read.reasoning_effort == "low"
    read = decode_body(json.dumps(PLAIN[CHAT] | {"reasoning": {"enabled": False}}).encode(), ChatCompletionRequest)
    assert read.enable_thinking is False
    for reasoning in ({"effort": "low", "max_tokens": 5}, {"max_tokens": 5}):
        assert await refused_field(server, CHAT, reasoning=reasoning) == "reasoning"
    assert await refused_field(server, CHAT, reasoning={"effort": "low"}, reasoning_effort="high") == "reasoning"


async def test_options_of_other_servers_at_values_that_ask_for_nothing(server: HttpServer) -> None:
    """Neutral values of options of llama.cpp, GLM, Qwen, Mistral and OpenRouter are accepted.

    Fields that LiteLLM and Bedrock add for themselves are accepted with any value.
    """
    neutral: dict[str, tuple[Any, Any]] = {
        **dict.fromkeys(("repeat_penalty", "typical_p", "tfs_z", "best_of"), (1.0, 2)),
        **dict.fromkeys(("mirostat", "dry_multiplier", "dynatemp_range", "xtc_probability", "n_keep"), (0, 1)),
        **dict.fromkeys(("do_sample", "incremental_output", "parse_tool_calls"), (True, False)),
        **dict.fromkeys(("enable_search", "safe_prompt", "timings_per_token", "return_progress"), (False, True)),
        "result_format": ("message", "text"),
        **dict.fromkeys(("plugins", "transforms"), ([], ["x"])),
        **dict.fromkeys(("extra_body", "options"), ({}, {"a": 1})),
    }
    for field, (nothing, something) in neutral.items():
        await accepted(server, CHAT, **{field: nothing})
        assert await refused_field(server, CHAT, **{field: something}) == field
    for field in ("anthropic_version", "api_key", "drop_params", "num_retries", "cache_prompt", "id_slot", "snippy"):
        for value in ("x", 3, True, {"enabled": True}):
            await accepted(server, CHAT, **{field: value})
    await accepted(server, MESSAGES, anthropic_version="bedrock-2023-05-31", anthropic_beta=["x"], betas=["x"])
    await accepted(server, RESPONSES, n=1, logprobs=False)
    assert await refused_field(server, RESPONSES, n=2) == "n"


async def test_an_answer_may_be_a_message_with_all_its_fields(server: HttpServer) -> None:
    """A message is accepted as `model_dump()` of Anthropic's client writes it, with all fields."""
    answer = await accepted(server, MESSAGES)
    dumped = anthropic.types.Message.model_validate(answer).model_dump()
    await accepted(server, MESSAGES, messages=[QUESTION, dumped, QUESTION])
    message = {"role": "user", "content": "hi", "id": "x"}
    assert await refused_field(server, MESSAGES, messages=[message]) == "messages[0].id"
