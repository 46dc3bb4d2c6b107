"""States of the serving machine: its compiler, its cache, its limits and its network."""

from dataclasses import replace
from pathlib import Path

from tests.first_hour.newcomer import NO_NETWORK, Newcomer, Outcome
from tests.first_hour.state import LeftOutError, command_state, state

ANSWER = 'pagewire run storyteller "Once upon a time" --max-tokens 5 --stats'
TOLD = "time to first token"
# A PATH with the environment's programs only: no compiler.
NO_COMPILER = f"PATH=${{PATH%%:*}} {ANSWER}"


def processes_of(folder: Path) -> list[str]:
    """Return the command lines that contain the folder's path."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = path.read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue  # the process has just ended
        if str(folder) in line:
            found.append(line)
    return found


@state("compiling interrupted", "nothing runs on", code=130)
def interrupt_compiling(newcomer: Newcomer) -> Outcome:
    running = newcomer.start(f"exec {ANSWER}")
    running.wait_until(lambda: any("cc1" in line for line in processes_of(newcomer.cache)))
    running.interrupt()
    outcome = running.end(20)
    left = [line for line in processes_of(newcomer.cache) if "cc1" in line]
    building = newcomer.cache / "kernels" / "building-left"
    building.mkdir()  # as left by a machine that lost power
    newcomer.give(newcomer.cache)
    return Outcome(outcome.code, "\n".join(left or ["nothing runs on"]), outcome.seconds, outcome.silence_s)


@state(
    "CC of two words, nothing compiled",
    "compiling the CPU kernels with",
    "there is no no-ccache",
    TOLD,
    never=("is left of",),
)
def compile_first(newcomer: Newcomer) -> Outcome:
    """Compile the kernels for all following states, and check that the interrupted compilation left no files."""
    outcome = newcomer.run(ANSWER, timeout_s=240, environ={"CC": "no-ccache gcc"})
    left = [str(path) for path in (newcomer.cache / "kernels").glob("building*")]
    return replace(outcome, said=f"{outcome.said}{left} is left of the interrupt\n" if left else outcome.said)


command_state("no compiler, kernels kept", NO_COMPILER, TOLD, never=("no C compiler",))


@state("no compiler, nothing kept", "there is no C compiler that works", "install one, for example gcc", TOLD)
def compile_without_a_compiler(newcomer: Newcomer) -> Outcome:
    return newcomer.run(NO_COMPILER, environ={"PAGEWIRE_CACHE": str(newcomer.home / "cache")})


@state("disk of the cache full", "is full: make room, or set PAGEWIRE_CACHE", TOLD)
def fill_the_cache(newcomer: Newcomer) -> Outcome:
    if not newcomer.can_unshare():
        raise LeftOutError("needs root, setpriv and unshare")
    folder = newcomer.home / "cache"
    folder.mkdir()
    mounting = f'mount -t tmpfs -o size=64k,mode=777 none {folder}; exec "$@"'
    return newcomer.run(
        ANSWER, within=("unshare", "-m", "sh", "-c", mounting, "sh"), environ={"PAGEWIRE_CACHE": str(folder)}
    )


@state("no network", TOLD)
def answer_without_a_network(newcomer: Newcomer) -> Outcome:
    if not newcomer.can_unshare():
        raise LeftOutError("needs root, setpriv and unshare")
    return newcomer.run(ANSWER, within=NO_NETWORK)


command_state("bundled model by its name", ANSWER, TOLD)
command_state("full standard output, run", f"{ANSWER} >/dev/full", "No space left on device", code=1)
command_state("little address space, serve", "ulimit -v 300000; pagewire serve storyteller", "ulimit -v", code=1)
command_state("little address space, run", f"ulimit -v 300000; {ANSWER}", "ulimit -v", code=1)


@state("few processes, run", "ulimit -u", code=1)
def answer_with_few_processes(newcomer: Newcomer) -> Outcome:
    if not newcomer.has_no_rights:
        raise LeftOutError("counts all that this user runs: needs root and setpriv")
    return newcomer.run(f"bash -c 'ulimit -u 10 && exec {ANSWER}'")
