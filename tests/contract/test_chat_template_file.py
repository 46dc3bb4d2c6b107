"""Errors in a chat template's files are reported with the file name and, if known, the line."""

import io
import json
import logging
import zipfile
from pathlib import Path

import grpc
import pytest
from tokenizers import Tokenizer, models

from pagewire.common.chat.template_sandbox import MAX_TEMPLATE_CHARS
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from scheduler_service import server
from scheduler_service.api.vllm.tokenizer_archive import read_tokenizer_archive
from scheduler_service.config import SchedulerConfig
from scheduler_service.request_service import warn_of
from scheduler_service.serving.checkpoint.model_info import read_model, read_model_info
from testing.checkpoints.gguf_files import write_gguf
from testing.parity import STORYTELLER
from testing.scheduler_stack import make_checkpoint, request, serve
from testing.seeds import seeded
from testing.serving.failures import failure_of
from testing.serving.http_server import make_chat_checkpoint, serve_http

CONFIG = "tokenizer_config.json"
TEMPLATE = "chat_template.jinja"
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
GIVEN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        (TEMPLATE, b"{{ messages }}\n\xff\n", f"{TEMPLATE}, line 2: not UTF-8 (invalid start byte, byte 0xff)"),
        (CONFIG, b'{\n"chat_template":\n}', f"{CONFIG} is not JSON: Expecting value: line 3 column 1"),
        (CONFIG, b'{"a": "\xff"}', f"{CONFIG} is not JSON: 'utf-8' codec can't decode byte 0xff"),
        (CONFIG, b"[" * 100_000, f"{CONFIG} is not readable JSON: it is nested too deeply"),
        (CONFIG, b"[]", f"{CONFIG} holds list"),
        (CONFIG, b'{"chat_template": 5}', f"{CONFIG}: chat_template is int, but must be a text or a list"),
        (CONFIG, b'{"chat_template": ["a"]}', f"{CONFIG}: the list chat_template must contain objects"),
        (CONFIG, b'{"chat_template": [{"name": [], "template": 1}]}', f"{CONFIG}: the list chat_template must contain"),
        ("generation_config.json", b"{", "generation_config.json is not JSON: "),
        (TEMPLATE, LOOP.encode(), "does not end"),
    ],
)
async def test_a_file_that_cannot_be_read_ends_the_start_in_one_line(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, name: str, content: bytes, told: str
) -> None:
    path = make_checkpoint(tmp_path / "bad", with_tokenizer=False)
    (path / name).write_bytes(content)
    config = SchedulerConfig(model=str(path), worker="127.0.0.1:1", port=0, metrics_port=0)
    assert await server.run(config, stop=server.asyncio.Event(), ready=lambda url: None) == 78
    [line] = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert told in line
    assert str(path / name) in line
    assert "\n" not in line


@pytest.mark.parametrize("form", ["file", "text"])
@pytest.mark.parametrize("kind", ["directory", "GGUF file"])
def test_a_given_template_replaces_those_of_the_model(tmp_path: Path, kind: str, form: str) -> None:
    if kind == "GGUF file":
        path = write_gguf(tmp_path / "model.gguf", STORYTELLER, "Q8_0")
    else:
        path = make_chat_checkpoint(tmp_path / "model", rag="rag")
    given = GIVEN
    if form == "file":
        (tmp_path / "given.jinja").write_text(GIVEN)
        given = str(tmp_path / "given.jinja")
    info, _ = read_model(str(path), given)
    assert info.template_file is not None
    assert (info.chat_template, dict(info.template_file.named)) == (GIVEN, {})
    assert info.chat_refusals == ()
    assert not info.has_standard_tokenizer_files, "routers must ask for the tokenizer's files"
    with zipfile.ZipFile(io.BytesIO(read_tokenizer_archive(info))) as archive:
        assert archive.read(TEMPLATE).decode() == GIVEN
    assert info.digest == read_model_info(str(path)).digest


async def test_every_api_renders_the_given_template(tmp_path: Path) -> None:
    (tmp_path / "given.jinja").write_text(GIVEN)
    given = {"chat_template": str(tmp_path / "given.jinja")}
    model = make_chat_checkpoint(tmp_path / "model")
    async with serve_http(model, **given, front=given) as server:
        answer = await server.post("/v1/chat/completions/render", messages=[{"role": "user", "content": "hello"}])
        tokenizer = Tokenizer.from_file(str(model / "tokenizer.json"))
        assert answer.json()["token_ids"] == tokenizer.encode("[user]hello", add_special_tokens=False).ids
        for stub in (server.stack.stub, server.front.stub):
            assert (await stub.GetServerInfo(pb.GetServerInfoRequest())).chat_template == GIVEN


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ("chatml", "--chat-template is 'chatml', which is neither a file nor the text of a Jinja template; give the "),
        ("/nowhere/a.jinja", "--chat-template is '/nowhere/a.jinja', which is neither a file nor"),
        ("", "--chat-template is '', which is neither a file nor"),
        ("a" * 5000, f"--chat-template is '{'a' * 100}', which is neither a file nor"),
        ("{{ a" + "a" * MAX_TEMPLATE_CHARS, "--chat-template: the chat templates have "),
        (LOOP, "--chat-template: the chat template cannot be used: "),
    ],
    ids=str.__len__,
)
async def test_a_given_template_that_cannot_be_used_ends_the_start(
    checkpoint: Path, caplog: pytest.LogCaptureFixture, given: str, told: str
) -> None:
    config = SchedulerConfig(model=str(checkpoint), worker="127.0.0.1:1", port=0, metrics_port=0, chat_template=given)
    assert await server.run(config, stop=server.asyncio.Event(), ready=lambda url: None) == 78
    [line] = [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]
    assert line.startswith(told)
    assert "\n" not in line


def warned(path: Path, caplog: pytest.LogCaptureFixture) -> list[str]:
    caplog.clear()
    warn_of(read_model_info(str(path)))
    assert all(record.levelno == logging.WARNING for record in caplog.records)
    return [record.getMessage() for record in caplog.records]


def test_unsupported_templates_cause_a_warning_at_startup(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = make_checkpoint(tmp_path / "model")
    (path / TEMPLATE).write_text("{% for m in messages %}{{ m.content }}{% endfor %}")
    assert warned(path, caplog) == []
    (path / TEMPLATE).write_text("\n{{ messages.content.text }}")
    [line] = warned(path, caplog)
    assert line.startswith(f"{path / TEMPLATE}: the chat template cannot render any conversation: line 2: ")
    assert line.endswith("; such conversations are refused")
    (path / TEMPLATE).write_text(
        "{% if tools %}{{ raise_exception('no tools') }}{% endif %}{{ messages[0].content[0].text }}"
    )
    [line] = warned(path, caplog)
    assert "cannot render tools, the result of a tool: line 1: no tools; such" in line
    (path / TEMPLATE).unlink()
    (path / CONFIG).write_text(json.dumps({"chat_template": [{"name": "default", "template": "{% if %}"}]}))
    [line] = warned(path, caplog)
    assert line.startswith(f"{path / CONFIG}: the chat template cannot render any conversation: line 1: ")
    (path / CONFIG).unlink()
    (path / "tokenizer.json").unlink()
    [line] = warned(path, caplog)
    assert line.startswith(f"{path} has no tokenizer.json: prompts and outputs are token ids only; text prompts, ")


async def test_without_a_tokenizer_token_ids_work_and_text_is_the_clients_fault(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    async with serve(make_checkpoint(tmp_path / "model", with_tokenizer=False)) as stack:
        assert "has no tokenizer.json" in caplog.text
        assert len((await stack.generate(request([1, 2, 3], max_tokens=2))).token_ids[0]) == 2
        message = request([], max_tokens=2)
        message.text = "hello"
        await failure_of(stack.generate(message), grpc.StatusCode.INVALID_ARGUMENT, "tokenizer")


async def test_a_text_that_the_tokenizer_fails_on_is_the_clients_fault(tmp_path: Path) -> None:
    path = make_checkpoint(tmp_path / "model")
    tokenizer = Tokenizer(models.WordLevel({"hello": 0}, unk_token="<unknown>"))
    tokenizer.save(str(path / "tokenizer.json"))
    async with serve(path) as stack:
        message = request([], max_tokens=2)
        message.text = "goodbye"
        await failure_of(stack.generate(message), grpc.StatusCode.INVALID_ARGUMENT, str(path / "tokenizer.json"))
        message.text = "hello"
        assert (await stack.generate(message)).token_ids[0]


@pytest.mark.parametrize("seed", range(3))
def test_random_files_are_read_or_named_in_an_error(tmp_path: Path, seed: int) -> None:
    rng = seeded(seed)
    path = make_checkpoint(tmp_path / "model", temperature=0.5, top_k=3)
    config = {"chat_template": [{"name": "default", "template": "{{ messages }}"}], "eos_token": {"content": "<end>"}}
    sources = {
        CONFIG: json.dumps(config).encode(),
        "generation_config.json": (path / "generation_config.json").read_bytes(),
        TEMPLATE: "{% for m in messages %}{{ m.content }}é{% endfor %}".encode(),
    }
    pieces = [
        b"null",
        b"{}",
        b"[]",
        b"-1",
        b"1e999",
        b"NaN",
        b'"x"',
        b"true",
        b"\xff",
        b"{%",
        b"}}",
        b"9" * 5000,
        b"\0",
    ]
    for _ in range(300):
        name = rng.choice(list(sources))
        content = bytearray(sources[name])
        for _ in range(rng.randrange(1, 4)):
            place = rng.randrange(len(content) + 1)
            content[place : place + rng.randrange(12)] = rng.choice(pieces)
        (path / name).write_bytes(content)
        told = name
        try:
            read_model_info(str(path)).warnings()
        except ValueError as error:
            told = str(error)
        assert name in told, content
        (path / name).unlink()
