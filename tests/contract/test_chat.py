"""`pagewire chat` in a pseudo-terminal, as a separate process, with a scripted server."""

import os
import pty
import re
import signal
import stat
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import grpc
import pytest

from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2 as pb
from testing.serving import scripted_scheduler
from testing.serving.scripted_scheduler import ScriptedScheduler, delta, field_violation, serving
from testing.serving.terminal import CTRL_A, CTRL_C, STORY, UP, ChatUser
from testing.terminal import ROOT, TIMEOUT_S, Terminal

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}\n{% endfor %}<assistant>"


def chatting(url: str, state: Path, *flags: str) -> ChatUser:
    return ChatUser(state, "chat", "--url", url, *flags)


@pytest.fixture
def scheduler() -> ScriptedScheduler:
    made = ScriptedScheduler()
    made.info.chat_template = TEMPLATE
    return made


@pytest.fixture
def url(scheduler: ScriptedScheduler) -> Iterator[str]:
    with serving(scheduler) as address:
        yield address


def texts(scheduler: ScriptedScheduler) -> list[str]:
    return [request.text for request in scheduler.requests]


def asked(*messages: str, system: str | None = None) -> str:
    """Return the prompt for the last message, if all earlier messages were answered with `STORY`."""
    head = "" if system is None else f"<system>{system}\n"
    return head + f"\n<assistant>{STORY}\n".join(f"<user>{message}" for message in messages) + "\n<assistant>"


def test_lines_are_edited_and_remembered(url: str, scheduler: ScriptedScheduler, tmp_path: Path) -> None:
    for number in range(2):
        with chatting(url, tmp_path) as terminal:
            terminal.expect("/help lists commands, Ctrl-D ends.")
            if number == 0:
                terminal.say(f"world{CTRL_A}hello ")
            else:
                terminal.say(f"{UP} again")  # the last input of the previous chat
            assert terminal.end() == 0
    assert texts(scheduler) == [asked("hello world"), asked("hello world again")]
    history = tmp_path / "pagewire" / "chat_history"
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


@pytest.mark.parametrize("flags", [(), ("--no-history",)])
def test_without_a_place_for_the_history(
    url: str, scheduler: ScriptedScheduler, tmp_path: Path, flags: tuple[str, ...]
) -> None:
    state = tmp_path / "state"
    if not flags:
        state.write_text("a file, where a directory is needed")
    with chatting(url, state, *flags) as terminal:
        terminal.say("one")
        terminal.say(f"{UP} more")
        assert terminal.end() == 0
    assert texts(scheduler) == [asked("one"), asked("one", "one more")]
    assert state.is_file() or not state.exists()


def test_messages_of_several_lines(url: str, scheduler: ScriptedScheduler, tmp_path: Path) -> None:
    with chatting(url, tmp_path) as terminal:
        terminal.expect("> ")
        for line in ('"""first', "", '/second"""'):
            terminal.type(line + "\r")
        terminal.expect(STORY)
        terminal.expect("> ")
        terminal.type("third\\\r")
        terminal.expect(". ")
        terminal.type("fourth\r")
        terminal.expect(STORY)
        assert terminal.end() == 0
    assert texts(scheduler) == [asked("first\n\n/second"), asked("first\n\n/second", "third\nfourth")]


def test_commands(url: str, scheduler: ScriptedScheduler, tmp_path: Path) -> None:
    with chatting(url, tmp_path, "--system", "be kind") as terminal:
        terminal.say("one")
        terminal.expect("> ")
        for command, shown in (
            ("/help", "/clear           forget the conversation"),
            ("/hepl", "unknown command /hepl; did you mean /help?"),
            ("/clear", "forgot the conversation"),
            ("/system be brief", "set the system message"),
            ("", "> "),
        ):
            terminal.type(command + "\r")
            terminal.expect(shown)
        terminal.say("two")
        terminal.say("//etc")
        terminal.expect("> ")
        terminal.type("/system\r")
        terminal.expect("removed the system message")
        terminal.say("three")
        terminal.expect("> ")
        terminal.type("/exit\r")
        assert terminal.wait() == 0
    assert texts(scheduler) == [
        asked("one", system="be kind"),
        asked("two", system="be brief"),
        asked("two", "/etc", system="be brief"),
        asked("two", "/etc", "three"),
    ]
    # The turns before /forget belong to another conversation. The system message does not change the session id.
    first, *later = [request.session_id for request in scheduler.requests]
    assert len({first, *later}) == 2
    assert len(set(later)) == 1
    assert all(request.session_id and request.will_return for request in scheduler.requests)


def test_ctrl_c_stops_an_answer_and_not_the_chat(url: str, scheduler: ScriptedScheduler, tmp_path: Path) -> None:
    def answer(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if len(scheduler.requests) == 1:
            return scripted_scheduler.never_end(request, context)
        return scripted_scheduler.tell_story(request, context)

    scheduler.script = answer
    with chatting(url, tmp_path) as terminal:
        terminal.expect("> ")
        terminal.type("one\r")
        terminal.expect(" so so so")
        terminal.type(CTRL_C)
        terminal.expect("(stopped)")
        assert scheduler.ended.wait(TIMEOUT_S)
        terminal.expect("> ")
        terminal.type("half a line")
        terminal.expect("half a line")
        terminal.type(CTRL_C)
        terminal.expect("(Ctrl-D or /exit ends the chat)")
        terminal.say("two")
        assert terminal.end() == 0
    assert re.fullmatch(r"<user>one\n<assistant>( so){3,}\n<user>two\n<assistant>", texts(scheduler)[1])


SIGNALLED_BEFORE_ITS_WAIT = """
import ctypes, functools, readline, signal, sys
from pagewire.cli.chat_terminal import ChatTerminal
signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
terminal = ChatTerminal(None)
# In C alone: a hook in Python would run the handler.
readline.set_startup_hook(functools.partial(ctypes.CDLL(None)["raise"], signal.SIGTERM))
terminal.read_message()
"""


def test_a_signal_before_the_wait_for_a_key_is_noticed() -> None:
    leader, follower = pty.openpty()
    command = [sys.executable, "-c", SIGNALLED_BEFORE_ITS_WAIT]
    process = subprocess.Popen(command, cwd=ROOT, stdin=follower, stdout=follower, stderr=follower)
    try:
        assert process.wait(TIMEOUT_S) == 128 + signal.SIGTERM
    finally:
        process.kill()
        os.close(leader)
        os.close(follower)


READS_AMONG_SIGNALS = """
import signal
from pagewire.cli.chat_terminal import ChatTerminal
terminal = ChatTerminal(None)
signal.setitimer(signal.ITIMER_REAL, 0.0001, 0.0001)
while True:
    print("read", repr(terminal.read_message()))
"""


def test_signals_during_a_prompt_lose_no_output() -> None:
    keys = "".join(f"word{number} " for number in range(100))
    with Terminal([sys.executable, "-c", READS_AMONG_SIGNALS], columns=200) as terminal:
        for _ in range(20):
            terminal.expect("> ")
            for start in range(0, len(keys), 7):
                terminal.type(keys[start : start + 7])
            terminal.type("\r")
            assert terminal.expect("read ").count("word") == 100
            assert terminal.expect("\n").strip() == repr(keys)


def refuse_long(scheduler: ScriptedScheduler, max_chars: int) -> None:
    def answer(request: pb.GenerateRequest, context: grpc.ServicerContext) -> Iterator[pb.GenerateResponse]:
        if len(request.text) > max_chars:
            text = f"the prompt has {len(request.text)} tokens, this server allows {max_chars}"
            scripted_scheduler.abort(context, grpc.StatusCode.INVALID_ARGUMENT, text, field_violation("text", text))
        return scripted_scheduler.tell_story(request, context)

    scheduler.script = answer


def test_a_full_context_offers_to_go_on(url: str, scheduler: ScriptedScheduler, tmp_path: Path) -> None:
    refuse_long(scheduler, len(asked("1", "2", "3", "4")))
    with chatting(url, tmp_path) as terminal:
        for message in "1234":
            terminal.say(message)
        for answer in ("n", "y"):
            terminal.expect("> ")
            terminal.type("5\r")
            terminal.expect("the context is full: the prompt has")
            terminal.expect("Forget the oldest turns and go on? [Y/n] ")
            terminal.type(answer + "\r")
            if answer == "n":
                terminal.expect("the message was not sent")
        terminal.expect("forgot the 2 oldest of 4 turns")
        terminal.expect(STORY)
        terminal.expect("> ")
        terminal.type(UP)
        terminal.expect("5")  # and not the answer to the question
        terminal.type(CTRL_C)
        terminal.expect("(Ctrl-D")
        terminal.expect("> ")
        terminal.type("x" * 1000 + "\r")  # too long on its own
        terminal.expect("Forget the oldest turns and go on? [Y/n] ")
        terminal.type("\r")
        terminal.expect("error: the prompt has")
        terminal.say("6")
        assert terminal.end() == 0
    assert texts(scheduler)[-1] == asked("3", "4", "5", "6")


def test_without_a_terminal_the_oldest_turns_go(url: str, scheduler: ScriptedScheduler) -> None:
    refuse_long(scheduler, len(asked("1", "2")))
    command = [sys.executable, "-m", "pagewire", "chat", "--url", url]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    ended = subprocess.run(command, env=environ, input="1\n2\n3\n", capture_output=True, text=True, check=True)
    assert ended.stdout == f"{STORY}\n" * 3
    assert "the context is full: the prompt has" in ended.stderr
    assert "forgot the 1 oldest of 2 turns" in ended.stderr
    assert texts(scheduler)[-1] == asked("2", "3")


def test_an_answer_that_fills_the_context_says_so(url: str, scheduler: ScriptedScheduler) -> None:
    scheduler.info.max_sequence_tokens = 12  # equal to the number of tokens in the usage of the last delta
    command = [sys.executable, "-m", "pagewire", "chat", "--url", url]
    ended = subprocess.run(command, input="1\n", capture_output=True, text=True, check=True, cwd=ROOT)
    assert "(the context is full, 12 tokens: the answer was cut off)" in ended.stderr
    scheduler.script = lambda request, context: iter([delta(0, 0, [1], "short", last=True)])
    ended = subprocess.run(command, input="1\n", capture_output=True, text=True, check=True, cwd=ROOT)
    assert "context" not in ended.stderr


def test_a_terminal_that_is_closed_keeps_the_history(url: str, tmp_path: Path) -> None:
    with chatting(url, tmp_path) as terminal:
        terminal.say("remember me")
        terminal.expect("> ")
        terminal.process.send_signal(signal.SIGHUP)
        terminal.wait()
    assert "remember me" in (tmp_path / "pagewire" / "chat_history").read_text()
