"""Chats and tokenization through the client, and the limits of a model's chat template."""

import asyncio
import dataclasses
import json
import shutil
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer

import pagewire
from pagewire import AsyncClient, Client, SamplingParams
from pagewire.cli.status import ServerState, View
from pagewire.common.chat.chat_template import ChatTemplateError, render
from pagewire.common.chat.template_sandbox import MAX_STEPS
from testing.scheduler_stack import VOCAB_SIZE, make_checkpoint, serve

HELLO = {"role": "user", "content": "hello"}
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}[{{ m.role }}]{{ m.content }}{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}[assistant]{% endif %}{{ mood }}"
)
TEXT = "<end>[user]hello<end>[assistant]"


@pytest.fixture(scope="module")
def chatty(special_checkpoint: Path) -> Path:
    """A checkpoint whose tokenizer and whose chat template both put a special token in front of a prompt."""
    config = json.loads((special_checkpoint / "tokenizer_config.json").read_text())
    (special_checkpoint / "tokenizer_config.json").write_text(json.dumps(config | {"chat_template": TEMPLATE}))
    return special_checkpoint


def answer_of(completion: pagewire.Completion) -> tuple[object, ...]:
    return completion.usage.prompt_tokens, completion.outputs[0].token_ids, completion.outputs[0].text


async def test_a_chat_is_its_rendered_prompt_with_special_tokens_once(chatty: Path) -> None:
    tokenizer = Tokenizer.from_file(str(chatty / "tokenizer.json"))
    sampling = SamplingParams(seed=0, max_tokens=9, ignore_eos=True)
    async with serve(chatty) as stack, AsyncClient(stack.url) as client:
        token_ids = tokenizer.encode(TEXT, add_special_tokens=False).ids
        expected = answer_of(await client.complete(None, sampling, prompt_token_ids=token_ids))
        assert answer_of(await client.chat([HELLO], sampling)) == expected
        assert answer_of(await asyncio.to_thread(Client(stack.url).chat, [HELLO], sampling)) == expected
        parts = [{"role": "user", "content": [{"type": "text", "text": "hello"}]}]
        both = await asyncio.to_thread(
            Client(stack.url).chat, [[HELLO], parts], [sampling, sampling], cache_salt="other"
        )
        assert [answer_of(each) for each in both] == [expected, expected]
        bare = await client.chat([HELLO], sampling, add_generation_prompt=False, template_variables={"mood": "!"})
        token_ids = tokenizer.encode("<end>[user]hello<end>!", add_special_tokens=False).ids
        assert bare.usage.prompt_tokens == len(token_ids)
        named = await client.chat([HELLO], sampling, request_id="mine", timeout=60)
        assert (named.request_id, answer_of(named)) == ("mine", expected)
        named = await asyncio.to_thread(Client(stack.url).chat, [HELLO], sampling, request_id="mine", max_tokens=3)
        assert (named.request_id, len(named.outputs[0].token_ids)) == ("mine", 3)
        with pytest.raises(TypeError, match="are for one prompt"):
            await client.chat([[HELLO]], sampling, request_id="mine")
        own = await client.chat([HELLO], sampling, chat_template="{{ messages[0].content }}")
        assert own.usage.prompt_tokens == len(tokenizer.encode("hello", add_special_tokens=False).ids)


async def test_tokens_of_texts_and_texts_of_tokens(chatty: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pagewire.client.client.MAX_TOKENIZED_CHARS", 30)
    monkeypatch.setattr("pagewire.client.client.MAX_DETOKENIZED_TOKENS", 30)
    tokenizer = Tokenizer.from_file(str(chatty / "tokenizer.json"))
    texts = [f"hello {'world ' * (i % 7)}é" for i in range(20)]
    async with serve(chatty) as stack, AsyncClient(stack.url) as client:
        for adds in (True, False):
            expected = [tokenizer.encode(text, add_special_tokens=adds).ids for text in texts]
            assert await client.tokenize(texts, add_special_tokens=adds) == expected
            assert await asyncio.to_thread(Client(stack.url).tokenize, texts, add_special_tokens=adds) == expected
            assert await client.tokenize(texts[3], add_special_tokens=adds) == expected[3]
            assert await asyncio.to_thread(Client(stack.url).tokenize, texts[3], add_special_tokens=adds) == expected[3]
        with_special = await client.tokenize(texts)
        assert await client.detokenize(with_special) == texts
        assert await asyncio.to_thread(Client(stack.url).detokenize, with_special[3]) == texts[3]
        assert await client.detokenize(with_special[3], skip_special_tokens=False) == "<end>" + texts[3]
        assert await client.tokenize([]) == []
        assert await client.detokenize([]) == ""
        for wrong in (["hello"], [[1], 2], [[1], None]):
            with pytest.raises(TypeError, match="a list of integers"):
                await client.detokenize(wrong)
        for outside in (VOCAB_SIZE, 2**32):
            with pytest.raises(pagewire.InvalidRequest, match=str(outside)):
                await client.detokenize([outside])


async def test_a_model_without_a_template_says_what_to_do(tmp_path: Path) -> None:
    async with serve(make_checkpoint(tmp_path / "plain")) as stack, AsyncClient(stack.url) as client:
        with pytest.raises(
            pagewire.InvalidRequest, match="plain has no chat template: give chat_template, or a prompt"
        ):
            await client.chat([HELLO])
        for wrong, text in (
            ([], "has no messages"),
            ([{"content": "hello"}], "but must be an object such as"),
            ([{"role": "user", "content": [{"type": "image_url"}]}], "'image_url', but only texts"),
            ([{"role": "user", "content": 5}], "has the type 5, but must be a text"),
            (
                [{"role": None, "content": "hello"}],
                r"messages\[0\]\.role is not set, but must be a text such as 'user'",
            ),
            ([HELLO, {"role": 5}], r"messages\[1\]\.role is 5, but must be a text"),
            ([{"role": "user"}], r"messages\[0\]\.content is not set, but must be a text or a list of parts"),
        ):
            with pytest.raises(pagewire.InvalidRequest, match=text):
                await client.chat(wrong, chat_template=TEMPLATE)


async def test_templates_are_asked_for_by_name_and_refuse_in_their_own_words(
    special_checkpoint: Path, tmp_path: Path
) -> None:
    path = shutil.copytree(special_checkpoint, tmp_path / "named")
    refusing = "{% if tools %}{{ raise_exception('no tools here') }}{% endif %}{{ messages[0].content }}"
    (path / "chat_template.jinja").write_text(refusing)
    (path / "additional_chat_templates").mkdir()
    (path / "additional_chat_templates" / "rag.jinja").write_text("{{ documents[0] }}{{ messages[0].content }}")
    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    async with serve(path) as stack, AsyncClient(stack.url) as client:
        info = await client.info()
        assert sorted(info.named_chat_templates) == ["default", "rag"]
        assert info.chat_refusals == ("tools, the result of a tool: line 1: no tools here",)
        state = ServerState(dataclasses.replace(info, structured_output_refusal="x"), None, None)
        line = "chat               refused: tools, the result of a tool: line 1: no tools here"
        assert line in View(colour=False).text(state)
        for name, text in (("rag", "worldhello"), ("default", "hello"), (None, "hello")):
            variables = {"documents": ["world"]}
            answer = await client.chat([HELLO], max_tokens=1, chat_template=name, template_variables=variables)
            assert answer.usage.prompt_tokens == len(tokenizer.encode(text, add_special_tokens=False).ids)
        for given, told in (
            ({"chat_template": "ragg"}, r"'ragg', which is neither Jinja2 nor the name of a .* \(default, rag\)"),
            ({"template_variables": {"tools": [{"a": 1}]}}, "the model's chat template fails: line 1: no tools here"),
        ):
            with pytest.raises(pagewire.InvalidRequest, match=told) as refused:
                await client.chat([HELLO], **given)
            assert refused.value.code is grpc.StatusCode.INVALID_ARGUMENT


@pytest.mark.parametrize(
    ("template", "reason"),
    [
        (
            "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}",
            f"it does not end within {MAX_STEPS} steps",
        ),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "nested too deeply"),
        ("{{ 'a' * 10**15 }}", "does not end"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages[9].content }}", "no element 9"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{% if %}", "Expected an expression"),
    ],
)
def test_a_template_that_fails_or_does_not_end_is_a_clear_error(template: str, reason: str) -> None:
    with pytest.raises(ChatTemplateError, match=f"the model's chat template fails: .*{reason}"):
        render(template, [HELLO], special_tokens={})


def test_counted_loops_are_still_loops() -> None:
    template = (
        "{% for m in messages %}{{ loop.index }}/{{ loop.length }}{{ loop.last }} {% else %}none{% endfor %}"
        "{% for m in messages[::-1] if m.role == 'user' %}{{ m.content }}{% if loop.first %}{% break %}{% endif %}"
        "{% endfor %}{% for x in missing %}x{% else %} empty{% endfor %}"
    )
    assert render(template, [HELLO, HELLO], special_tokens={}) == "1/2False 2/2True hello empty"
