"""Tests that the documents are true: links resolve, commands parse, and everything that they name exists."""

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache
from importlib import import_module, metadata
from pathlib import Path
from typing import Any

import pytest

from docs.captures import CAPTURES, part_of, wording
from docs.reference import FOLDER, PAGES, by_hand
from pagewire import options
from pagewire.cli.command import BENCHES, VERBS
from pagewire.options import options_of
from tests.project.documents import DOCUMENTS, ROOT, TRACKED, read
from tests.project.exported_metrics import NAME as METRIC
from tests.project.exported_metrics import exported

SERVICES = ("serve", "scheduler", "worker", "frontend")
MAX_README_LINES = 120
# Limits for text written by hand. Generated parts do not count. A page that grows must shorten another page.
MAX_WORDS = 26_340  # in all pages
MAX_WORDS_FOR_USERS = 15_840  # in docs/ without its decisions
MAX_WORDS_OF_A_VERSION = 600  # in CHANGELOG.md

FENCE = re.compile(r"^( *)```(\w*)\n(.*?)^\1```$", re.MULTILINE | re.DOTALL)
CODE_SPAN = re.compile(r"`([^`\n]+)`")
LINK = re.compile(r"\]\(([^)\s]+)\)")
COMMAND = re.compile(r"(?:^|\s|\$\()pagewire (?=[a-z-])([^|)#&;>\n]*)")
FLAG = re.compile(r"(?<![\w-])--[a-z][a-z0-9-]+")
VARIABLE = re.compile(r"\bPAGEWIRE_[A-Z_]+\b")
MAKE_TARGET = re.compile(r"\bmake ([a-z][a-z0-9-]+)\b")
SOURCE_PATH = re.compile(r"^(?:[\w.-]+/)+[\w.-]+\.(?:py|md|h|c|js|sh|json|proto|yaml|toml|binpb)$|^(?:[\w.-]+/)+$")
MADE_PATHS = re.compile(r"^bench/results/gpu_")  # written by commands that need a GPU
MODULE_NAME = re.compile(r"^[\w/]+\.py$")


def offenders(rule: Callable[[Path], Iterable[str]]) -> list[str]:
    """Return a line for each breach of a rule in the documents."""
    return [f"{path}: {breach}" for path in DOCUMENTS for breach in rule(path)]


def fences(path: Path, *languages: str) -> list[str]:
    """Return the code blocks in these languages. The language of a block without a language is ""."""
    return [text for _, language, text in FENCE.findall(read(path)) if language in languages]


def spans(path: Path) -> list[str]:
    """Return the inline code spans of a document."""
    return CODE_SPAN.findall(FENCE.sub("", read(path)))


# Generated pages


@pytest.mark.parametrize("name", PAGES)
def test_made_page_is_up_to_date(name: str) -> None:
    assert (FOLDER / name).read_text(encoding="utf-8") == PAGES[name](), "run `make docs`"


@pytest.mark.parametrize(("page", "name"), [capture[:2] for capture in CAPTURES])
def test_a_capture_is_on_its_page(page: str, name: str) -> None:
    text = read(Path(page))
    assert len(wording(part_of(text, name))) > 20
    assert max(map(len, part_of(text, name).splitlines())) <= 120
    assert part_of(text, name) not in by_hand(text)


def test_a_capture_with_other_figures_has_the_same_wording() -> None:
    first = "running  4, 0 more\n+++aab...\na story-1 28  b story-5 7\nan af391e5c"
    assert wording(first) == wording("running  3, 12 more\n+b+.....\na story-2 9  c story-3 71\nan 03bcbc96")
    assert wording(first) != wording(first.replace("running", "waiting"))


# Links


def anchors(text: str) -> set[str]:
    """Return the anchors that GitHub generates for a text's headings."""
    titles = re.findall(r"^#+ (.*)$", FENCE.sub("", text), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in titles}


def leads_somewhere(path: Path, link: str) -> bool:
    """Return whether a link in a document leads to an existing file here and, if the link has an anchor, to a
    heading."""
    name, _, anchor = link.partition("#")
    target = (ROOT / path.parent / name).resolve() if name else ROOT / path
    if not target.exists() or not target.is_relative_to(ROOT):
        return False
    return not anchor or anchor in anchors(target.read_text(encoding="utf-8"))


def test_relative_links_resolve() -> None:
    def broken(path: Path) -> list[str]:
        links = [link for link in LINK.findall(FENCE.sub("", read(path))) if not re.match(r"[a-z]+:", link)]
        return [link for link in links if not leads_somewhere(path, link)]

    assert offenders(broken) == []


def test_pages_that_the_code_names_exist() -> None:
    named = set(re.findall(r"(?<![\w/])docs/[\w/]+\.md\b", sources()))
    assert named
    assert [name for name in named if not (ROOT / name).exists()] == []


def test_every_page_is_reached_from_the_readme() -> None:
    seen: set[Path] = set()
    unread = [Path("README.md")]
    while unread:
        path = unread.pop()
        seen.add(path)
        links = {link.partition("#")[0] for link in LINK.findall(read(path)) if not re.match(r"[a-z]+:", link)}
        targets = {Path(os.path.normpath(path.parent / link)) for link in links if link.endswith(".md")}
        unread += targets - seen - set(unread)
    assert set(DOCUMENTS) - seen == set()


def test_the_readme_is_short() -> None:
    assert len(read(Path("README.md")).splitlines()) <= MAX_README_LINES


def num_words(pages: Iterable[Path]) -> int:
    return sum(len(by_hand(page.read_text(encoding="utf-8")).split()) for page in pages)


def test_pages_are_short() -> None:
    others = [ROOT / name for name in ("README.md", "ARCHITECTURE.md", "CONTRIBUTING.md", "SECURITY.md")]
    others += [ROOT / name / "README.md" for name in ("deploy", "examples")]
    assert num_words(FOLDER.glob("*.md")) <= MAX_WORDS_FOR_USERS
    assert num_words([*FOLDER.rglob("*.md"), *others]) <= MAX_WORDS


def test_versions_are_told_briefly() -> None:
    _, *versions = re.split(r"^## ", read(Path("CHANGELOG.md")), flags=re.MULTILINE)
    assert len(versions) > 1
    assert [text[:30] for text in versions if len(text.split()) > MAX_WORDS_OF_A_VERSION] == []


def test_what_is_made_is_not_counted_as_written_by_hand() -> None:
    assert by_hand("a b\n<!-- weights -->\nc d\n<!-- end of weights -->\ne").split() == ["a", "b", "e"]
    assert not any(by_hand(PAGES[name]()) for name in ("api.md", "metrics.md", "worker_protocol.md"))


def test_code_stands_in_one_line() -> None:
    """A code span on one line can be found by search, and is checked below. CHANGELOG.md is merged line by line."""

    def broken(path: Path) -> list[str]:
        paragraphs = re.split(r"\n\s*\n", FENCE.sub("", read(path)))
        found = [span for paragraph in paragraphs for span in paragraph.split("`")[1::2] if "\n" in span]
        return [] if path.name == "CHANGELOG.md" else found

    assert offenders(broken) == []


# Commands


class ParsedError(Exception):
    """Raised in place of running a command that was parsed successfully."""

    def __init__(self, parser: options.Parser | None = None) -> None:
        super().__init__()
        self.parser = parser


def command_lines(path: Path) -> Iterator[list[str]]:
    """Yield the arguments of each `pagewire` command in the shell blocks of a document."""
    for block in fences(path, "", "sh", "bash", "console"):
        for line in block.replace("\\\n", " ").splitlines():
            for command in COMMAND.findall(line.partition(" # ")[0]):
                yield shlex.split(command)


def understand(arguments: Sequence[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Parse a command as the program does. Raises LookupError for an unknown verb, and SystemExit if parsing fails."""
    parse, resolve = options.Parser.parse_args, options.resolve

    def parse_only(self: options.Parser, args: Any = None, namespace: Any = None) -> Any:
        parsed = parse(self, args, namespace)
        if arguments[0] not in SERVICES:
            raise ParsedError(self)
        return parsed

    def resolve_only(*positional: Any, **named: Any) -> Any:
        resolve(*positional, **named)
        raise ParsedError

    verb = VERBS[arguments[0]]
    with monkeypatch.context() as patch:
        patch.setattr(options.Parser, "parse_args", parse_only)
        patch.setattr(options, "resolve", resolve_only)
        with pytest.raises(ParsedError):
            getattr(import_module(verb.module), verb.function)(list(arguments[1:]))


def test_commands_parse(monkeypatch: pytest.MonkeyPatch) -> None:
    def refused(path: Path) -> Iterator[str]:
        for arguments in command_lines(path):
            try:
                understand(arguments, monkeypatch)
            except (LookupError, SystemExit):
                yield f"pagewire {shlex.join(arguments)}"

    assert offenders(refused) == []


@pytest.mark.parametrize("command", ["serve models/storyteller --max-seqs 3", "complete --temprature 0 x"])
def test_an_unknown_flag_would_be_noticed(command: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(SystemExit):
        understand(shlex.split(command), monkeypatch)


def test_verbs_in_the_text_exist() -> None:
    def unknown(path: Path) -> Iterator[str]:
        for span in spans(path):
            if match := re.match(r"pagewire ([a-z]+)(?: ([a-z]+))?", span):
                is_of_bench = match[1] == "bench" and match[2]
                if match[1] not in VERBS or (is_of_bench and match[2] not in BENCHES):
                    yield span

    assert offenders(unknown) == []


# Existence of the names in documents


@cache
def our_flags() -> set[str]:
    verbs = [[verb] for verb in VERBS if verb != "bench"] + [["bench", verb] for verb in BENCHES]
    found = {"--version"}
    for verb in verbs:
        command = [sys.executable, "-m", "pagewire", *verb, "--help"]
        text = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
        found |= set(FLAG.findall(re.sub(r"-\n\s+", "-", text)))
    return found


# Flags of other programs in the documents: pip, docker, kubectl, smg, curl, git, npm, the programs of bench/, and other
# engines.
FOREIGN_FLAGS = {
    *("--build-arg", "--sbom", "--extra-index-url", "--index-url", "--branch", "--no-deps"),
    *("--policy", "--worker-urls", "--control-plane-api-keys", "--parts", "--output", "--device", "--chat-template"),
    *("--models", "--formats", "--peers", "--rounds", "--isa", "--traces"),
}


# These documents name flags of other programs or removed flags.
WITH_OTHER_FLAGS = ("CHANGELOG.md", "migrating.md", "upgrading.md")


def test_flags_exist() -> None:
    def unknown(path: Path) -> set[str]:
        named = {flag for span in spans(path) for flag in FLAG.findall(span)}
        return set() if path.name in WITH_OTHER_FLAGS else named - our_flags() - FOREIGN_FLAGS

    assert offenders(unknown) == []


def test_metrics_exist() -> None:
    histograms = {name.removesuffix("_bucket") for name in exported() if name.endswith("_bucket")}

    def unknown(path: Path) -> set[str]:
        return {name.rstrip(":") for name in METRIC.findall(read(path))} - {
            "vllm",
            "pagewire",
            *exported(),
            *histograms,
        }

    assert offenders(unknown) == []


@cache
def sources() -> str:
    names = [name for name in TRACKED if name.endswith((".py", ".yaml", "Makefile")) or "Dockerfile" in name]
    return "\n".join(read(Path(name)) for name in names if (ROOT / name).is_file())


@cache
def our_variables() -> set[str]:

    from pagewire.hosting.logs import LogConfig
    from scheduler_service.config import FrontEndConfig, SchedulerConfig
    from worker_service.config import WorkerConfig

    configs = (SchedulerConfig, WorkerConfig, FrontEndConfig, LogConfig)
    return {option.variable for option in options_of(*configs).values()}


def test_variables_exist() -> None:
    def unknown(path: Path) -> list[str]:
        named = set(VARIABLE.findall(read(path))) - our_variables()
        return [name for name in named if not any(use in sources() for use in (f'"{name}"', f"${name}", f"{name}="))]

    assert offenders(unknown) == []


def test_make_targets_exist() -> None:
    targets = set(re.findall(r"^([a-z][a-z0-9-]*):", read(Path("Makefile")), re.MULTILINE))

    def unknown(path: Path) -> set[str]:
        code = [*spans(path), *fences(path, "", "sh", "bash", "console")]
        return {name for text in code for name in MAKE_TARGET.findall(text)} - targets

    assert offenders(unknown) == []


def is_there(path: Path, name: str) -> bool:
    """Return whether a path that a document names exists, relative to the root or its folder, or as the end of a
    path."""
    if (ROOT / name).exists() or (ROOT / path.parent / name).exists():
        return True
    return any(f"/{other}".endswith(f"/{name}") or f"/{name}" in f"/{other}" for other in TRACKED if other)


def test_paths_in_the_text_exist() -> None:
    def missing(path: Path) -> list[str]:
        named = [span for span in spans(path) if SOURCE_PATH.match(span) or MODULE_NAME.match(span)]
        return [name for name in named if not MADE_PATHS.match(name) and not is_there(path, name)]

    assert offenders(missing) == []


# Python. tests/project/test_types.py checks the examples in the documents.


def test_examples_have_types() -> None:
    """The examples pass the type checker, except examples that import packages that are not installed."""
    paths = [ROOT / "examples" / f"{name}.py" for name in ("async_client", "batch", "detached")]
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "--scripts-are-modules"]
    result = subprocess.run([*command, *map(str, paths)], cwd=ROOT, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout + result.stderr


def test_the_wheel_has_its_name() -> None:
    assert set(re.findall(r"pagewire-([\d.]+)-py3", read(Path("docs/quickstart.md")))) == {metadata.version("pagewire")}
