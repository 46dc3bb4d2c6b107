"""`pagewire chat` on an emulated terminal of several widths: pastes, word wrap, commands, and typing in advance."""

import contextlib
import itertools
import json
import signal
import threading
import unicodedata
from collections.abc import Callable, Iterator
from pathlib import Path

import grpc
import pytest

from pagewire.cli.word_wrap import width_of
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from testing.serving.scripted_scheduler import ScriptedScheduler, delta, serving
from testing.serving.terminal import CTRL_C, CTRL_D, UP, ChatUser
from testing.terminal import TIMEOUT_S
from tests.thorough import thorough

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"
ROWS = 60
WIDTHS = pytest.mark.parametrize("columns", [60, *thorough(40, 80, 132, 200)])


class Model(ScriptedScheduler):
    """A scheduler that gives the next answer of a list to each request, a few characters at a time.

    An answer stops at each "|" until the test calls `go_on`. `asked` has a permit for each request.
    """

    def __init__(self, *answers: str) -> None:
        super().__init__()
        self.info.chat_template = TEMPLATE
        self.script = self._answer
        self.asked = threading.Semaphore(0)
        self._answers = list(answers)
        self._permits = threading.Semaphore(0)

    def go_on(self) -> None:
        self._permits.release()

    @property
    def prompts(self) -> list[str]:
        return [request.text for request in self.requests]

    def _answer(self, request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        self.asked.release()
        num_tokens = 0
        for number, part in enumerate(self._answers.pop(0).split("|")):
            if number:
                while not self._permits.acquire(timeout=0.1):
                    if not context.is_active():
                        return
            for start in range(0, len(part), 3):
                yield delta(0, num_tokens, [1], part[start : start + 3])
                num_tokens += 1
        yield delta(0, num_tokens, [1], last=True)


@pytest.fixture
def talk(tmp_path: Path) -> Iterator[Callable[..., ChatUser]]:
    """Return a function that starts a chat with a model."""
    with contextlib.ExitStack() as stack:

        def start(model: Model, columns: int = 80) -> ChatUser:
            url = stack.enter_context(serving(model))
            return stack.enter_context(ChatUser(tmp_path, "chat", "--url", url, columns=columns, rows=ROWS))

        yield start


def at_prompt(terminal: ChatUser, num_prompts: int) -> list[str]:
    """Wait for this number of prompts on the screen, of which the last is empty. Return the rows above it."""

    def is_there(lines: list[str]) -> bool:
        prompts = [index for index, line in enumerate(lines) if line.startswith(">")]
        return len(prompts) == num_prompts and not any(lines[prompts[-1] + 1 :]) and lines[prompts[-1]] == ">"

    lines = terminal.wait_for(is_there)
    return lines[: max(index for index, line in enumerate(lines) if line == ">")]


def paste(text: str) -> str:
    """Return the keys that a terminal sends for a paste, in bracketed paste mode."""
    return "\x1b[200~" + text.replace("\n", "\r") + "\x1b[201~"


def columns_of(text: str) -> int:
    return sum(map(width_of, text))


@WIDTHS
def test_a_paste_is_one_message(talk: Callable[..., ChatUser], columns: int) -> None:
    pasted = "def f(x):\n    return x\n\n/help " + "word " * 20 + "end"
    model = Model("first")
    terminal = talk(model, columns)
    terminal.wait_for("> ")
    terminal.type(paste(pasted))
    terminal.wait_for("end")
    terminal.type("\r")
    lines = at_prompt(terminal, 2)
    first = lines.index("> def f(x):")
    assert lines[first : first + 3] == ["> def f(x):", "    return x", ""]
    terminal.type(CTRL_D)
    assert terminal.wait() == 0
    again = Model("second", "third", "fourth")
    terminal = talk(again, columns)
    terminal.wait_for("> ")
    terminal.type(UP)
    terminal.wait_for("end")
    terminal.type("!\r")
    at_prompt(terminal, 2)
    for number, text in enumerate(('"""A docstring."""\nimport os', "// a comment\n// more\n")):
        terminal.type(paste(text) + "\r")
        at_prompt(terminal, number + 3)
    assert model.prompts == [f"<user>{pasted}\n<assistant>"]
    texts = [prompt.split("<user>")[-1] for prompt in again.prompts]
    messages = (f"{pasted}!", '"""A docstring."""\nimport os', "// a comment\n// more")
    assert texts == [f"{message}\n<assistant>" for message in messages]


def test_a_resized_terminal_wraps_at_its_new_width(talk: Callable[..., ChatUser]) -> None:
    before, after = "four " * 30, "five " * 30
    model = Model(f"{before}|{after}")
    terminal = talk(model, 80)
    terminal.wait_for("> ")
    terminal.type("go\r")
    terminal.wait_for(lambda lines: lines[-1] == "" and " ".join(lines).count("four") == 30)
    terminal.resize(51, ROWS)
    model.go_on()
    shown = at_prompt(terminal, 2)
    assert "five five five five five five five five five five" in shown[-2:][0]
    assert max(line.count("five") for line in shown) == 10


def test_typing_in_advance(talk: Callable[..., ChatUser]) -> None:
    model = Model("one |two", "three", "four", "five |six")
    terminal = talk(model)
    settings = terminal.settings
    terminal.wait_for("> ")
    terminal.type("a\r")
    terminal.wait_for("one")
    terminal.type("b\r" + paste("c\nd") + "\rhalf")
    model.go_on()
    terminal.wait_for("> half")
    terminal.type("\x7f\x7f\x7f\x7fe\r")
    terminal.wait_for("five")
    terminal.type(CTRL_D)
    model.go_on()
    assert terminal.wait() == 0
    lines = terminal.lines[1:11]
    assert lines == ["> a", "one two", "> b", "three", "> c", "d", "four", "> e", "five six", ">"]
    assert terminal.settings == settings
    assert [prompt.split("<user>")[-1] for prompt in model.prompts] == [
        f"{said}\n<assistant>" for said in ("a", "b", "c\nd", "e")
    ]


def test_ctrl_c_keeps_what_was_answered(talk: Callable[..., ChatUser]) -> None:
    model = Model("|one", "two|three", "|four", "five")
    terminal = talk(model)
    settings = terminal.settings
    terminal.wait_for("> ")
    for number, (message, shown) in enumerate((("a", "> a"), ("b", "two"), ("/regen", "> /regen"))):
        terminal.type(f"{message}\r")
        assert model.asked.acquire(timeout=TIMEOUT_S)
        terminal.wait_for(shown)
        terminal.type(CTRL_C)
        at_prompt(terminal, number + 2)
    terminal.type("c\r")
    lines = at_prompt(terminal, 5)
    assert lines[1:] == ["> a", "(stopped)", "> b", "two", "(stopped)", "> /regen", "(stopped)", "> c", "five"]
    assert model.prompts[-1] == "<user>b\n<assistant>two\n<user>c\n<assistant>"
    terminal.type(CTRL_D)
    assert terminal.wait() == 0
    assert terminal.settings == settings


@pytest.mark.parametrize(
    ("moment", "number"),
    [
        ("answering", signal.SIGTERM),
        *thorough(("asked", signal.SIGTERM), ("asked", signal.SIGHUP), ("answering", signal.SIGQUIT)),
    ],
)
def test_a_signal_restores_the_settings(talk: Callable[..., ChatUser], moment: str, number: int) -> None:
    terminal = talk(Model("one |two"))
    settings = terminal.settings
    terminal.wait_for("> ")
    if moment == "answering":
        terminal.type("a\r")
        terminal.wait_for("one")
    terminal.process.send_signal(number)
    assert terminal.wait() == 128 + number
    assert terminal.settings == settings


def test_commands(talk: Callable[..., ChatUser], tmp_path: Path) -> None:
    model = Model(*(f"answer {number}" for number in range(6)))
    model.info.max_model_len = 512
    terminal = talk(model, 100)
    file, bad = tmp_path / "chat.json", tmp_path / "bad.json"
    bad.write_text('{"system": null, "messages": [{"role": "user", "content": "a"}], "sampling": {}}')

    def command(keys: str, *shown: str) -> None:
        terminal.expect("> ")
        terminal.type(f"{keys}\r")
        for text in shown:
            terminal.expect(text)

    command("/set temperature 0.25", "set temperature to 0.25\r\n")
    command("/set top-p 0.5", "set top_p to 0.5\r\n")
    command("/set parameter temperature 300", "error: temperature is 300, but must be 0 to 100\r\n")
    command("/set top_k many", "error: top_k must be an integer or None, got 'many'\r\n")
    command("/set temprature 1", "error: there is no option 'temprature'; did you mean temperature?\r\n")
    command("/set n 2", "error: there is no option 'n'; the options are max_tokens, ")
    command("/set top_p", "reset top_p\r\n")
    command('/set stop ["\\n", "END"]', 'set stop to ["\\n", "END"]\r\n')
    command(paste("/set system be\nbrief"), "set the system message\r\n")
    command("/set", "error: /set needs an argument; see /help\r\n")
    command("/regen", "error: there is no answer to replace\r\n")
    command("one", "answer 0\r\n")
    command("/regen", "answer 1\r\n")
    command(
        "/show",
        "storyteller\r\n",
        "the model's own\r\n",
        "be\r\nbrief\r\n",
        '"temperature": 0.25, "stop"',
        " of 512 tokens\r\n",
    )
    command(f"/save {file}", f"saved the conversation in {file}\r\n")
    command("two", "answer 2\r\n")
    command(f"/save {file}", f"{file} exists. Replace it? [Y/n] ")
    terminal.type("n\r")
    command(f"/load {bad}", f"error: {bad} is no saved chat: messages must be texts of user and assistant in turn")
    command(f"/load {file}x", f"error: cannot read {file}x: No such file or directory\r\n")
    command("three", "answer 3\r\n")
    command("/clear", "forgot the conversation\r\n")
    command("/set temperature", "reset temperature\r\n")
    command("/system", "removed the system message\r\n")
    command(f"/load {file}", f"loaded the conversation from {file}\r\n")
    command("four", "answer 4\r\n")
    command("/exit")
    assert terminal.wait() == 0
    head = "<system>be\nbrief\n<user>one\n<assistant>"
    assert model.prompts == [
        head,
        head,
        f"{head}answer 1\n<user>two\n<assistant>",
        f"{head}answer 1\n<user>two\n<assistant>answer 2\n<user>three\n<assistant>",
        f"{head}answer 1\n<user>four\n<assistant>",
    ]
    for request in model.requests:
        assert (request.sampling.temperature, request.sampling.HasField("top_p"), request.sampling.stop) == (
            0.25,
            False,
            ["\n", "END"],
        )
    assert json.loads(file.read_text()) == {
        "system": "be\nbrief",
        "messages": [{"role": "user", "content": "one"}, {"role": "assistant", "content": "answer 1"}],
        "sampling": {"temperature": 0.25, "stop": ["\n", "END"]},
    }


def test_tab_completes(talk: Callable[..., ChatUser], tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    file = tmp_path / "folder" / "story.json"
    terminal = talk(Model("one"))
    terminal.wait_for("> ")
    terminal.type("/sh\t")
    terminal.wait_for("> /show")
    terminal.type("\r")
    at_prompt(terminal, 2)
    terminal.type("/set temp\t0.5\r")
    terminal.wait_for("> /set temperature 0.5")
    at_prompt(terminal, 3)
    file.write_text('{"system": null, "messages": [], "sampling": {}}')
    terminal.type(f"/load {tmp_path}/fo\t")
    terminal.type("st\t\r")
    terminal.expect(f"loaded the conversation from {file}")


PROSE = (
    "The quick brown fox jumps over the lazy dog, naive cafe\u0301s \u2014 antidisestablishmentarianism \u2014 sleep. "
)
WIDE = "\u6f22\u5b57\u304b\u306a"
CODE = "for element in range(1, 1000000): print(element, element * element, sep=', ', end='\\n', flush=True)  # squares"


@WIDTHS
def test_answers_wrap_at_words(talk: Callable[..., ChatUser], columns: int) -> None:
    prose = (PROSE * 4).strip()
    answer = f"{prose}\n\n```python\n{CODE}\n```\n{WIDE * 20} {prose}\n    {CODE}\n  - {prose}"
    terminal = talk(Model(answer), columns)
    terminal.wait_for("> ")
    terminal.type("go\r")
    lines = at_prompt(terminal, 2)
    shown = lines[lines.index("> go") + 1 :]
    blank = shown.index("")
    assert_wrapped(shown[:blank], prose, columns)
    code = [CODE[start : start + columns].rstrip() for start in range(0, len(CODE), columns)]
    assert shown[blank + 1 :][: len(code) + 2] == ["```python", *code, "```"]
    wide = shown[blank + len(code) + 3 :]
    at = columns // 2
    assert wide[0].startswith((WIDE * 20)[:at])
    indented = next(index for index, line in enumerate(wide) if line.startswith("    for"))
    listed = next(index for index, line in enumerate(wide) if line.startswith("  - The"))
    assert "".join(line.ljust(columns) for line in wide[indented:listed]).rstrip() == f"    {CODE}"
    assert_wrapped(wide[listed:], f"  - {prose}", columns)


def assert_wrapped(rows: list[str], text: str, columns: int) -> None:
    """Check that the rows are the text, and that each row has as many whole words as fit."""
    assert " ".join(rows) == unicodedata.normalize("NFC", text)
    for row, following in itertools.pairwise(rows):
        assert columns_of(row) <= columns
        word = following.split(" ")[0]
        assert columns_of(f"{row} {word}") > columns
