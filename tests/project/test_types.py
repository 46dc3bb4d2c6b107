"""Tests of the types as users see them, with mypy and an installed pagewire.

Examples in the documents pass `mypy --strict`, and mistakes do not.
"""

import ast
import re
import subprocess
import sys
import textwrap
import venv
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
DOCUMENTS = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
# Packages that examples use and that need not be installed here.
FOREIGN_PACKAGES = ("langchain_ollama", "litellm", "ollama", "openai")
# A user's line of code, and mypy's message about it.
USES = {
    "client.complete('a').outputs[0].text": "str",
    "client.complete(prompt_token_ids=[1, 2], max_tokens=4).usage.prompt_tokens": "int",
    "client.complete(['a', [1, 2]], [params, None])[0].outputs": (
        "tuple[pagewire.client.completion.CompletionOutput, ...]"
    ),
    "client.chat([{'role': 'user', 'content': 'a'}], temperature=0).outputs[0].text": "str",
    "client.chat([[{'role': 'user', 'content': 'a'}]])[0].outputs[0].text": "str",
    "client.tokenize('a')": "list[int]",
    "client.tokenize(['a'])": "list[list[int]]",
    "client.detokenize([1])": "str",
    "client.detokenize([[1]])": "list[str]",
    "client.complete(['a'], timeout=4, tenant='a', temperature=0)[0].usage.prompt_tokens": "int",
    "client.embed('a').values": "tuple[float, ...]",
    "client.submit('a', timeout=4)": "str",
    "client.info(timeout=4).max_model_len": "int",
    "[out.text for out in client.stream('a', params)]": "list[str]",
    "[out.text for out in client.attach('a', from_token=4)]": "list[str]",
    "run(asynchronous.complete('a')).outputs[0].text": "str",
    "run(asynchronous.complete(['a'], max_tokens=4))[0].outputs[0].text": "str",
    "run(asynchronous.embed([[1]]))[0].values": "tuple[float, ...]",
    "run(asynchronous.tokenize('a'))": "list[int]",
    "run(anext(asynchronous.stream('a', params))).text": "str",
    "params.clone().max_tokens": "int | None",
    "llm.generate('a')[0].metrics.first_token_latency": "float | None",
    "llm.generate(['a', 'b'], params)[0].outputs[0].text": "str",
    "llm.generate([[1], [2]], [params, params])[0].prompt": "str | None",
    "llm.generate([{'prompt_token_ids': [1]}])[0]['text']": "str | list[int]",
    "llm.generate(pagewire.TokensPrompt(prompt_token_ids=[1]))[0].num_cached_tokens": "int",
    "llm.generate('a')[0].outputs[0].token_ids": "list[int]",
    "pagewire.__version__": "str",
}
MISTAKES = {
    "client.stream('a', max_token=4)": "max_token",
    "client.complete('a', max_tokens='4')": "No overload variant",
    "client.complete(['a']).outputs": "outputs",
    "client.stream(['a'])": "str | None",
    "client.generate('a')": "generate",
    "client.aclose()": "aclose",
    "asynchronous.acomplete('a')": "acomplete",
    "asynchronous.stream('a', max_token=4)": "max_token",
    "client.embed('a', temperature=0)": "temperature",
    "client.info(timeout='4')": "timeout",
    "SamplingParams(max_token=4)": "max_token",
    "pagewire.Cleint": "Cleint",
}
BEGIN = """
from asyncio import run

import pagewire
from pagewire import LLM, AsyncClient, Client, SamplingParams

asynchronous = AsyncClient("127.0.0.1:50051")
client = Client("127.0.0.1:50051")
llm = LLM("models/storyteller")
params = SamplingParams(max_tokens=4)
"""


@pytest.fixture(scope="module")
def user(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with an environment in which only pagewire is installed."""
    folder = tmp_path_factory.mktemp("user")
    venv.create(folder / "venv", with_pip=False, symlinks=True)
    (site_packages,) = (folder / "venv").glob("lib/python*/site-packages")
    (site_packages / "pagewire").symlink_to(ROOT / "pagewire")
    foreign = "".join(f"[mypy-{name}.*]\nignore_missing_imports = True\n" for name in FOREIGN_PACKAGES)
    (folder / "mypy.ini").write_text(f"[mypy]\n{foreign}")
    return folder


def check(user: Path, programs: dict[str, str]) -> str:
    """Return mypy's lines about the given programs, a mapping from file name to source."""
    for name, program in programs.items():
        (user / f"{name}.py").write_text(program)
    command = [sys.executable, "-m", "mypy", "--strict", "--no-error-summary", "--cache-dir", str(user / "cache")]
    command += ["--python-executable", str(user / "venv" / "bin" / "python"), *(f"{name}.py" for name in programs)]
    return subprocess.run(command, cwd=user, capture_output=True, text=True, check=False).stdout


def examples() -> dict[str, str]:
    """Return the Python examples of all documents. An example with a top-level `await` is wrapped in an async
    function."""
    found = {}
    for document in DOCUMENTS:
        for number, block in enumerate(
            re.findall(r"^```python\n(.*?)^```", document.read_text(), re.DOTALL | re.MULTILINE)
        ):
            name = f"{document.stem.replace('-', '_').lower()}_{number}"
            compile(block, name, "exec", ast.PyCF_ALLOW_TOP_LEVEL_AWAIT)
            try:
                compile(block, name, "exec")
            except SyntaxError:
                block = f"async def example() -> None:\n{textwrap.indent(block, '    ')}"
                # Names that the examples assume to be defined.
                if "import" not in block:
                    block = f"from pagewire import AsyncClient, Client, SamplingParams\n\n{block}"
            found[name] = block
    return found


def test_examples_of_the_documents_are_typed(user: Path) -> None:
    programs = examples()
    assert programs
    assert check(user, programs) == ""


def test_example_programs_are_typed(user: Path) -> None:
    programs = {path.stem: path.read_text() for path in sorted((ROOT / "examples").glob("*.py"))}
    assert programs
    assert check(user, programs) == ""


def test_types_are_those_that_the_calls_return(user: Path) -> None:
    lines = check(user, {"uses": BEGIN + "".join(f"reveal_type({use})\n" for use in USES)}).splitlines()
    revealed = [re.sub(r".*Revealed type is \"(.*)\"", r"\1", line).replace("builtins.", "") for line in lines]
    assert revealed == list(USES.values())


def test_mistakes_are_noticed(user: Path) -> None:
    lines = check(user, {"mistakes": BEGIN + "".join(f"{mistake}\n" for mistake in MISTAKES)}).splitlines()
    first = BEGIN.count("\n") + 1
    for number, (mistake, word) in enumerate(MISTAKES.items(), start=first):
        said = [line for line in lines if line.startswith(f"mistakes.py:{number}: error: ")]
        assert word in " ".join(said), mistake
