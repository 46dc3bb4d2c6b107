"""Templates get the same input as from transformers, in all file layouts and for all forms of content."""

import io
import json
import random
import zipfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import transformers
from tokenizers import Tokenizer

from pagewire.common.chat.chat_template import ChatTemplateError, refusals, render
from pagewire.common.chat.template_sandbox import MAX_TEMPLATE_CHARS
from scheduler_service.api.vllm.tokenizer_archive import read_tokenizer_archive
from scheduler_service.serving.checkpoint.chat_template import _MAX_NAMED
from scheduler_service.serving.checkpoint.model_info import read_model_info
from testing.scheduler_stack import make_checkpoint
from testing.seeds import seeded

LOOK = {"type": "function", "function": {"name": "look", "description": "ü <b>", "parameters": {"type": "object"}}}
CALL = {"id": "call00000", "type": "function", "function": {"name": "look", "arguments": {"at": ["a", 1, None]}}}
DOCUMENT = {"title": "a", "text": "b"}
TOKENS = {"bos_token": "<end>", "eos_token": "<end>"}

# Templates by the form of content that they accept, as published model families write them.
_PARTS = (
    "{%- for part in m.content -%}{%- if part.type == 'text' -%}{{ part.text }}{%- elif part.type == 'thinking' -%}"
    "<think>{{ part.thinking }}</think>{%- else -%}{{ raise_exception('what?') }}{%- endif -%}{%- endfor -%}"
)
TEMPLATES = {
    "text, concatenated": (
        "text",
        "{% for m in messages %}{{ '<' + m['role'] + '>' + m['content'] + eos_token + '\n' }}{% endfor %}"
        "{% if add_generation_prompt %}{{ '<assistant>\n' }}{% endif %}",
    ),
    "text, written out": (
        "text",
        "{{ bos_token }}{% for m in messages %}\n{{ m.role }}: {{ m.content }}\n{% endfor %}",
    ),
    "text, trimmed": ("text", "{% for m in messages %}{{ m.content | trim }}|{% endfor %}"),
    "text or parts": (
        "both",
        "{% for m in messages %}<{{ m.role }}>{% if m.content is string %}{{ m.content }}{% else %}"
        f"{_PARTS}{{% endif %}}\n{{% endfor %}}",
    ),
    "text or parts, in a macro": (
        "both",
        "{% macro show(m) %}{% if m.content is string %}{{ m.content }}{% else %}"
        f"{_PARTS}{{% endif %}}{{% endmacro %}}{{% for m in messages %}}[{{{{ show(m) }}}}]{{% endfor %}}",
    ),
    "parts alone": ("parts", f"{{% for m in messages %}}<{{{{ m.role }}}}>{_PARTS}\n{{% endfor %}}"),
    "one part": ("part", "{% for m in messages %}[{{ m['content'][0]['text'] }}]{% endfor %}"),
    "parts alone of users, text of others": (
        "by role",
        f"{{% for m in messages %}}{{% if m.role == 'user' %}}<u>{_PARTS}{{% else %}}"
        "<o>{{ m.content }}{% endif %}{% endfor %}",
    ),
    "tools": (
        "text",
        "{% if tools is not none %}{{ tools | tojson }}{{ tools | tojson(indent=4) }}{% endif %}"
        "{% if tools %}{% for t in tools %}{{ t.function | tojson(false, 2) }}{{ t | tojson(true, none, (', ', ':'), "
        "true) }}{% endfor %}{% endif %}{% if documents is none %}no documents{% elif documents is defined %}"
        "{{ documents[0].title }}{% endif %}{% for m in messages %}{{ m.content }}{% if m.tool_calls is defined %}"
        "{% for c in m.tool_calls %}{{ c.function.arguments | tojson }}{% endfor %}{% endif %}{% endfor %}",
    ),
    "reasoning": (
        "text",
        "{% for m in messages %}{% if m.reasoning_content is defined %}({{ m.reasoning_content }}){% endif %}"
        "{% if m.thinking is defined %}[{{ m.thinking }}]{% endif %}{{ m.content }}{% endfor %}",
    ),
    "no system role": (
        "text",
        "{% for m in messages %}{% if m.role == 'system' %}{{ raise_exception('no system role') }}{% endif %}"
        "{{ m.content }}{% endfor %}",
    ),
}


def oracle_of(path: Path) -> Any:
    """Return transformers' tokenizer of a checkpoint."""
    return transformers.AutoTokenizer.from_pretrained(path)


def unpacked(checkpoint: Path, tmp_path: Path) -> Path:
    """Return a folder with the tokenizer files that routers get from a checkpoint."""
    with zipfile.ZipFile(io.BytesIO(read_tokenizer_archive(read_model_info(str(checkpoint))))) as archive:
        archive.extractall(tmp_path / "unpacked")
    return tmp_path / "unpacked"


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Any:
    path = make_checkpoint(tmp_path_factory.mktemp("oracle"))
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_file(str(path / "tokenizer.json")), **TOKENS
    )


def draw_conversation(rng: random.Random, takes: str) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Return a random conversation, and the same conversation in the form that the template accepts."""
    given, taken = [], []
    roles = [*(["system"] if rng.random() < 0.4 else []), "user", "assistant", "user", "assistant", "tool", "user"]
    for role in roles[: rng.randrange(2, len(roles) + 1)]:
        texts = [rng.choice(["a", " é", "b\n", "'text': 'x'", "", "{{ c }}"]) for _ in range(rng.randrange(1, 4))]
        parts: Any = [{"type": "text", "text": text} for text in texts]
        form = takes if takes != "by role" else "parts" if role == "user" else "text"
        is_thought = role == "assistant" and form in ("both", "parts") and rng.random() < 0.5
        if is_thought:
            parts = [{"type": "thinking", "thinking": "hm"}, *parts]
        is_list = is_thought or rng.random() < 0.5
        content = parts if is_list else "".join(texts)
        whole = "".join(texts)
        to_template_form = {"both": content, "parts": parts if is_list else [{"type": "text", "text": whole}]}
        to_template_form |= {"text": whole, "part": [{"type": "text", "text": whole}]}
        more: dict[str, Any] = {}
        if role == "assistant":
            more = {"tool_calls": rng.choice([None, [CALL]]), rng.choice(["reasoning", "thinking"]): "so"}
        given.append({"role": role, "content": content, **more})
        taken.append({"role": role, "content": to_template_form[form], **more})
    return given, taken


@pytest.mark.parametrize("name", TEMPLATES)
def test_every_form_of_a_conversation_is_as_transformers_renders_it(oracle: Any, name: str) -> None:
    takes, template = TEMPLATES[name]
    seed = 7
    rng = seeded(seed)
    num_rendered = 0
    for _ in range(60):
        given, taken = draw_conversation(rng, takes)
        tools, documents = rng.choice([None, [], [LOOK]]), rng.choice([None, [DOCUMENT]])
        prompts = rng.random() < 0.5
        variables = {"tools": tools, "documents": documents}
        if tools is None and documents is None and rng.random() < 0.5:
            variables = {}
        try:
            expected = oracle.apply_chat_template(
                taken, tools, documents, template, add_generation_prompt=prompts, tokenize=False
            )
        except Exception:
            with pytest.raises(ChatTemplateError, match="the model's chat template fails"):
                render(template, given, special_tokens=TOKENS, add_generation_prompt=prompts, variables=variables)
            continue
        ours = render(template, given, special_tokens=TOKENS, add_generation_prompt=prompts, variables=variables)
        assert ours == expected, given
        num_rendered += 1
    assert num_rendered > 10


def test_parts_that_a_template_cannot_take_are_named() -> None:
    template = TEMPLATES["text, trimmed"][1]
    for part, told in (
        (
            {"type": "thinking", "thinking": "hm"},
            "has the type 'thinking', but the model's chat template supports only texts",
        ),
        ({"type": "text"}, "but must have a text in its field 'text'"),
        ({"type": "text", "text": 5}, "but must have a text in its field 'text'"),
        ({"type": "image_url"}, "'image_url', but only texts"),
    ):
        with pytest.raises(ChatTemplateError, match=told):
            render(template, [{"role": "user", "content": [part]}], special_tokens={})


PLAIN = "\n{% for m in messages %}\n  {{ m.content }}\n  {% endfor %}\n\n"
FOR_TOOLS = "{%- macro f(t) -%} {{ t.function.name }} {%- endmacro -%}\n {% for t in tools %}{{ f(t) }}{% endfor %}\n"


def write(path: Path, files: Mapping[str, object]) -> Path:
    config = {"tokenizer_class": "PreTrainedTokenizerFast", **TOKENS}
    for name, content in {"tokenizer_config.json": {}, **files}.items():
        file = path / name
        file.parent.mkdir(exist_ok=True)
        if name == "tokenizer_config.json":
            assert isinstance(content, dict)
            content = config | content
        file.write_text(content if isinstance(content, str) else json.dumps(content), newline="")
    return path


def listed(**named: str) -> dict[str, object]:
    return {"chat_template": [{"name": name, "template": text} for name, text in named.items()]}


LAYOUTS: Mapping[str, Mapping[str, object]] = {
    "a text": {"tokenizer_config.json": {"chat_template": PLAIN}},
    "a file": {"chat_template.jinja": PLAIN, "tokenizer_config.json": {"chat_template": "old"}},
    "a list": {"tokenizer_config.json": listed(default=PLAIN, tool_use=FOR_TOOLS, rag="r")},
    "a list, the other way round": {
        "tokenizer_config.json": listed(rag="r", tool_use=PLAIN, default="{{ messages[0].content }}")
    },
    "a list with lines as of Windows": {
        "tokenizer_config.json": listed(default=PLAIN.replace("\n", "\r\n"), tool_use=FOR_TOOLS.replace("\n", "\r\n"))
    },
    "a list without tools": {"tokenizer_config.json": listed(default=PLAIN, rag="r")},
    "a list without a default": {"tokenizer_config.json": listed(tool_use=FOR_TOOLS, rag="r")},
    "an object": {"tokenizer_config.json": {"chat_template": {"default": PLAIN, "tool_use": FOR_TOOLS}}},
    "files": {"chat_template.jinja": PLAIN, "additional_chat_templates/tool_use.jinja": FOR_TOOLS},
    "files, of which none is the default for tools": {
        "chat_template.jinja": PLAIN,
        "additional_chat_templates/rag.jinja": "r",
    },
    "files, others too": {
        "chat_template.jinja": PLAIN,
        "additional_chat_templates/tool_use.jinja": FOR_TOOLS,
        "additional_chat_templates/rag.jinja": "r",
        "tokenizer_config.json": listed(default="old", tool_use="old"),
    },
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_templates_are_found_and_chosen_as_transformers_does(tmp_path: Path, layout: str) -> None:
    path = write(make_checkpoint(tmp_path / "model"), LAYOUTS[layout])
    info, theirs, given = read_model_info(str(path)), oracle_of(path), oracle_of(unpacked(path, tmp_path))
    template = info.chat_template
    assert template is not None
    assert isinstance(given.chat_template, str)
    named = theirs.chat_template if isinstance(theirs.chat_template, dict) else {}
    assert info.template_file is not None
    assert info.template_file.named == named
    messages = [{"role": "user", "content": "hello"}, {"role": "user", "content": " <b> "}]
    for tools in (None, [], [LOOK]):
        if tools is None and layout == "a list without a default":
            with pytest.raises(ValueError, match="no default"):
                theirs.apply_chat_template(messages, tools, tokenize=False, add_generation_prompt=True)
            with pytest.raises(ChatTemplateError, match="has no default chat template: give tools"):
                render(template, messages, special_tokens=info.special_tokens)
            continue
        expected = theirs.apply_chat_template(messages, tools, tokenize=False, add_generation_prompt=True)
        ours = render(template, messages, special_tokens=info.special_tokens, variables={"tools": tools})
        assert ours == expected
        assert given.apply_chat_template(messages, tools, tokenize=False, add_generation_prompt=True) == expected


def test_the_legacy_file_of_processors_is_read_where_it_is_alone(tmp_path: Path) -> None:
    path = write(make_checkpoint(tmp_path / "model"), {"chat_template.json": {"chat_template": PLAIN}})
    assert read_model_info(str(path)).chat_template == PLAIN
    assert oracle_of(unpacked(path, tmp_path)).chat_template == PLAIN
    write(path, {"tokenizer_config.json": {"chat_template": "newer"}})
    assert read_model_info(str(path)).chat_template == "newer"
    write(path, {"tokenizer_config.json": {}, "chat_template.json": "{"})
    with pytest.raises(ValueError, match=r"chat_template\.json is not JSON"):
        read_model_info(str(path))


@pytest.mark.parametrize(
    ("found", "told"),
    [
        (
            listed(**{f"t{i}": "" for i in range(_MAX_NAMED + 1)}),
            f"is a list of {_MAX_NAMED + 1} templates; the maximum is {_MAX_NAMED}",
        ),
        (listed(default="x" * MAX_TEMPLATE_CHARS, tool_use="y"), f"; the maximum is {MAX_TEMPLATE_CHARS}"),
        (
            {"chat_template": {"default": 5}},
            "the list chat_template must contain objects that have a name and a template",
        ),
    ],
)
def test_named_templates_of_a_list_have_bounds(tmp_path: Path, found: dict[str, object], told: str) -> None:
    path = write(make_checkpoint(tmp_path / "model"), {"tokenizer_config.json": found})
    with pytest.raises(ValueError, match=told) as refused:
        read_model_info(str(path))
    assert str(path / "tokenizer_config.json") in str(refused.value)


@pytest.mark.parametrize(
    ("num_files", "num_chars", "told"),
    [
        (_MAX_NAMED + 1, 1, f"additional_chat_templates contains more than {_MAX_NAMED} templates, the maximum"),
        (_MAX_NAMED, MAX_TEMPLATE_CHARS // _MAX_NAMED, f"together; the maximum is {MAX_TEMPLATE_CHARS}"),
        (_MAX_NAMED, MAX_TEMPLATE_CHARS // _MAX_NAMED - 9, None),
    ],
)
def test_named_templates_of_files_have_bounds(tmp_path: Path, num_files: int, num_chars: int, told: str | None) -> None:
    files = {f"additional_chat_templates/{i}.jinja": "x" * num_chars for i in range(num_files)}
    path = write(make_checkpoint(tmp_path / "model"), {"chat_template.jinja": PLAIN, **files})
    if told is None:
        info = read_model_info(str(path))
        assert info.template_file is not None
        assert len(info.template_file.named) == num_files + 1
        return
    with pytest.raises(ValueError, match=told):
        read_model_info(str(path))


# Templates that fail for some kinds of conversation, and the reported errors.
FAILING = {
    TEMPLATES["no system role"][1]: {"a system message": "line 1: no system role"},
    "{% if tools %}{{ raise_exception('no tools') }}{% endif %}{{ bos_token + messages[0].content }}": {
        "tools, the result of a tool": "line 1: no tools"
    },
    "{% for m in messages %}{% if m.role != 'user' %}{{ raise_exception('what is ' + m.role + '?') }}{% endif %}"
    "{{ m.content[0].text }}{% endfor %}": {
        "a system message": "line 1: what is system?",
        "an earlier answer, the result of a tool": "line 1: what is assistant?",
    },
    "{% for m in messages %}{{ m.content }}{% for c in m.tool_calls or [] %}{{ '`' + c.function.arguments + '`' }}"
    "{% endfor %}{% endfor %}": {},
    "{{ missing.content }}": {"any conversation": "line 1: 'missing' is undefined"},
}


@pytest.mark.parametrize("template", [*FAILING, *(text for _, text in TEMPLATES.values() if text not in FAILING)])
def test_what_a_template_cannot_serve_is_found_by_kind(template: str) -> None:
    assert refusals(template, TOKENS) == FAILING.get(template, {})
