"""States of the commands: texts, standard streams and words. `server` is a running server for states that need one."""

from collections.abc import Iterator
from contextlib import contextmanager

from pagewire.common.process.limits import LEAST_ADDRESS_SPACE
from testing.services import Service
from tests.first_hour.newcomer import Newcomer, Outcome
from tests.first_hour.state import command_state, state

MODEL = "storyteller"
NO_SERVER = "PAGEWIRE_URL=127.0.0.1:9"
NOT_UTF8 = "of a text that is not UTF-8"
NO_INPUT = "cannot read standard input: Bad file descriptor"
FULL = "cannot write the output: No space left on device"
CLOSED = "cannot write the output: Bad file descriptor"
_url = ""


@contextmanager
def serving() -> Iterator[None]:
    """Run a server with this process's user for the states added by `answered`."""
    global _url
    server = Service("serve", [MODEL, "--port", 0, "--http-port", 0, "--metrics-port", 0, "--log-level", "error"])
    try:
        _url = server.wait_until_ready()
        yield
        server.stop()
    finally:
        server.kill()


def answered(name: str, command: str, *words: str, code: int = 0) -> None:
    """Add a state of a command that needs a running server."""

    @state(name, *words, code=code)
    def enter(newcomer: Newcomer) -> Outcome:
        return newcomer.run(command, {"PAGEWIRE_URL": _url})


answered("prompt not UTF-8, standard input", r"printf 'a\377' | pagewire complete -", NOT_UTF8, code=1)
answered("prompt not UTF-8, argument", r"""pagewire complete "$(printf 'a\377')" """, NOT_UTF8, code=1)
answered("question not UTF-8", r"""pagewire chat -q "$(printf 'a\377')" """, NOT_UTF8, code=1)
answered("chat not UTF-8, standard input", r"printf 'a\377' | pagewire chat", NOT_UTF8)
answered(
    "prompt not UTF-8, library",
    r"""python -c "
from pagewire import Client
try:
    Client('$PAGEWIRE_URL').complete('a' + chr(0xdcff))
except Exception as error:
    print('pagewire says:', error)
" """,
    "pagewire says: text",
    NOT_UTF8,
)
answered("no standard input, complete", "pagewire complete - <&-", NO_INPUT, code=1)
answered("no standard input, chat", "pagewire chat <&-", NO_INPUT, code=1)
answered("no standard output", "pagewire complete Once --max-tokens 3 >&-", CLOSED, code=1)
answered("full standard output", "pagewire complete Once --max-tokens 3 >/dev/full", FULL, code=1)
answered(
    "threads of a client",
    r"""python -c "
import os
from pagewire import Client
client = Client('$PAGEWIRE_URL')
client.complete('Once', max_tokens=3)
print(len(os.listdir('/proc/self/task')), 'threads')
" """,
    "threads",
)
answered(
    "least address space, client",
    f"ulimit -v {LEAST_ADDRESS_SPACE >> 10}; pagewire complete Once --max-tokens 3",
    "time to first token",
)
answered(
    "half the address space, client",
    f"ulimit -v {LEAST_ADDRESS_SPACE >> 11}; pagewire complete Once --max-tokens 3",
    "ulimit -v",
    code=1,
)
answered("no standard error", "pagewire complete Once --max-tokens 3 2>&-", "")
answered("full standard error", "pagewire complete Once --max-tokens 3 2>/dev/full", "")
answered("full standard output, status", "pagewire status >/dev/full", FULL, code=1)
command_state("full standard output, help", "pagewire serve --help >/dev/full", FULL, code=1)
command_state("no standard output, version", "pagewire --version >&-", CLOSED, code=1)

command_state("no server", f"{NO_SERVER} pagewire complete Once", "no server answers", "pagewire serve", code=1)
command_state("mistyped verb", "pagewire complet", "error: unknown verb 'complet'; did you mean complete?", code=2)
command_state("version by a letter", "pagewire -V", "pagewire 0.")
command_state("help by a word", "pagewire help complete", "pagewire complete TEXT")
command_state("prompt without quotes", f"{NO_SERVER} pagewire complete two words", "quote", code=2)
command_state(
    "completion of bash",
    """bash -c 'eval "$(pagewire completion bash)"; COMP_WORDS=(pagewire com); COMP_CWORD=1; _pagewire
echo "${COMPREPLY[@]}"'""",
    "complete completion",
)
command_state(
    "tenants without a file",
    f"pagewire scheduler --worker 127.0.0.1:9 --model {MODEL} --tenants nope",
    "--tenants",
    "nope",
    code=1,
)
command_state(
    "model of another folder",
    "pagewire serve models/storyteller",
    "there is no directory models/storyteller",
    code=78,
)
command_state(
    "address of the hub",
    "pagewire serve https://huggingface.co/Qwen/Qwen3-0.6B",
    "give the id of the model, Qwen/Qwen3-0.6B",
    code=78,
)
command_state(
    "device of another name", f"pagewire serve {MODEL} --device gpu", "--device is cuda", "use --device cpu", code=78
)
