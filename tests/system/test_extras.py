"""Each extra of pyproject.toml suffices for its purpose: a service, a client, or a self-contained machine."""

import functools
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest

from testing.services import Process, System, running
from tests.environments import ROOT, VERSIONS, Environment, environ, project, requirements_of

pytestmark = pytest.mark.thorough

MODEL = ROOT / "models" / "storyteller"
INSTALLED = pytest.mark.skipif(VERSIONS == "linked", reason="`make test-lowest` installs packages")
EnvironmentOf = Callable[..., Environment]
# The extras that provide a service, with the extras that are tested together with it.
WITH = {"scheduler": ("scheduler", "tracing"), "worker": ("worker", "tracing")}
SETS = [(), *WITH.values(), ("router",), ("serve",), ("bench",), ("transformers",)]
CHAT = """
import sys
import pagewire
from pagewire import Client, SamplingParams

with Client(sys.argv[1]) as client:
    message = {"role": "user", "content": "Once there was a brave turtle"}
    print(client.chat([message], SamplingParams(temperature=0, max_tokens=3)).outputs[0].text)
try:
    pagewire.LLM(sys.argv[2])
except ImportError as error:
    print(error)
"""


@pytest.fixture(scope="module")
def environment_of() -> Iterator[EnvironmentOf]:
    """Return a function that creates the environment with some extras, once for each set."""
    with tempfile.TemporaryDirectory() as name:
        folder, wheel = Path(name), None
        if VERSIONS != "linked":
            subprocess.run([sys.executable, "-m", "pip", "wheel", "-q", "--no-deps", "-w", name, ROOT], check=True)
            (wheel,) = folder.glob("*.whl")

        @functools.cache
        def made(*extras: str) -> Environment:
            return Environment(folder / ("-".join(extras) or "base"), extras, wheel)

        yield made


@pytest.fixture(scope="module")
def system(environment_of: EnvironmentOf) -> Iterator[System]:
    """A scheduler and a worker, each in an environment of its own."""

    def start(arguments: Sequence[str]) -> Process:
        command = [environment_of(*WITH[arguments[0]]).python, "-m", "pagewire", *arguments]
        return subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environ(), cwd="/")

    with running(MODEL, start=start) as found:
        yield found


def test_the_base_is_a_client(environment_of: EnvironmentOf, system: System) -> None:
    asked = ["--url", system.url, "--temperature", 0, "--max-tokens", 3, "Once upon a time"]
    assert environment_of().run("-m", "pagewire", "complete", *asked).stdout.strip()
    assert "waiting" in environment_of().run("-m", "pagewire", "status", "--url", system.url).stdout
    story, refusal = environment_of().run("-c", CHAT, system.url, MODEL).stdout.strip().split("\n")
    assert story
    assert refusal.startswith("torch is not installed, ")
    assert "-m pip install 'pagewire[serve]'" in refusal


@pytest.mark.parametrize(
    ("arguments", "status", "extra"),
    [
        (["serve", MODEL], 78, "serve"),
        (["scheduler", MODEL], 78, "scheduler"),
        (["worker", MODEL], 78, "worker"),
        (["run", MODEL, "a"], 1, "serve"),
        (["replay", "FILE"], 1, "scheduler"),
        (["bench", "latency", "--help"], 1, "bench"),
    ],
)
def test_what_the_base_lacks_is_an_extra(
    environment_of: EnvironmentOf, arguments: list[object], status: int, extra: str
) -> None:
    printed = environment_of().run("-m", "pagewire", *arguments, status=status).stderr
    assert f"-m pip install 'pagewire[{extra}]'" in printed
    assert "Traceback" not in printed


@INSTALLED
def test_a_machine_of_ones_own_serves(environment_of: EnvironmentOf) -> None:
    asked = ["storyteller", "--max-tokens", 3, "Once upon a time"]
    assert environment_of("serve").run("-m", "pagewire", "run", *asked).stdout.strip()


@INSTALLED
def test_a_running_server_is_measured(environment_of: EnvironmentOf, system: System, tmp_path: Path) -> None:
    flags = ["--url", system.url, "--num-prompts", 2, "--input-len", 4, "--output-len", 2]
    figures = tmp_path / "figures.json"
    environment_of("bench").run("-m", "pagewire", "bench", "throughput", *flags, "--output-json", figures)
    assert figures.stat().st_size


@INSTALLED
def test_transformers_reads_the_tokenizer(environment_of: EnvironmentOf) -> None:
    program = f"from pagewire import LLM; llm = object.__new__(LLM); llm.model = {str(MODEL)!r}; llm.get_tokenizer()"
    environment_of("transformers").run("-c", program)


@pytest.mark.skipif(VERSIONS != "lowest", reason="`make test-lowest` installs them")
def test_the_lower_end_of_each_range_is_tried(environment_of: EnvironmentOf) -> None:
    tried = [environment_of(*extras).versions() for extras in SETS]
    extras = {name for extras in SETS for name in extras}
    assert set(project()["project"]["optional-dependencies"]) - extras == {"hub", "flash", "test", "dev"}
    for requirement in requirements_of(*extras):
        (least,) = (part.version for part in requirement.specifier if part.operator in (">=", "=="))
        found = {versions.get(requirement.name.lower().replace("_", "-"), "") for versions in tried}
        assert {version.partition("+")[0] for version in found} & {least}, f"{requirement} was tried at {found}"
