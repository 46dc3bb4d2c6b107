"""Tests that numbers and lists in the documents equal the values in the code."""

import asyncio.constants
import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest

from pagewire import installation, options
from pagewire.common import strict_json
from pagewire.common.chat import template_sandbox
from pagewire.common.chat.chat_output import chat_format
from pagewire.common.chat.schema_budget import MAX_CHARS, MAX_VALUES
from pagewire.common.gguf import model_file
from pagewire.common.gguf.tokenizer_files import classes
from pagewire.common.grammars import trial
from pagewire.common.process import queued_writer
from pagewire.common.process.child_process import EXIT_REFUSED
from pagewire.common.wire.messages import PROTOCOL_VERSION
from pagewire.common.wire.sampling_rules import MAX_GRAMMAR_BYTES
from pagewire.common.wire.transport import addresses, health, link_secret, listening
from pagewire.hosting import logs
from pagewire.hosting.logs import LogConfig
from pagewire.kernels.cpu import VARIANTS
from pagewire.network.families import BY_ARCHITECTURE
from pagewire.network.families.reading import MAX_EXPERTS
from pagewire.network.quantization import METHODS
from scheduler_service import metrics_server
from scheduler_service.api.grpc import shared_call
from scheduler_service.api.grpc.resolved_request import FRONT_END_PROTOCOL
from scheduler_service.api.http import body, call_admission
from scheduler_service.api.http.transport import connection
from scheduler_service.config import FrontEndConfig, SchedulerConfig
from scheduler_service.core.policy import POLICIES
from scheduler_service.links.worker import liveness
from scheduler_service.server import EXIT_FENCED
from scheduler_service.serving import grammar_checks, intake, parsed_request, recording, turns
from scheduler_service.serving.checkpoint import chat_template
from tests.environments import constraints
from tests.project.documents import DOCUMENTS, ROOT, read
from worker_service.config import ATTENTION_BACKENDS, WorkerConfig

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINS = constraints()
LEAST = {package.name: package.least for package in installation.NEEDED["gpu"]}
MIB = 1 << 20
# Of the HTTP server.
HEAD_S, BODY_S = f"{connection.HEAD_TIMEOUT_S:g} s", f"{body.BODY_TIMEOUT_S:g} s"
HEADERS, HEAD_KIB = connection.MAX_HEADERS, connection.MAX_HEAD_BYTES >> 10
BODY_MIB, BODIES_MIB, SMALL_KIB = (
    body.MAX_BODY_BYTES // MIB,
    call_admission.MAX_BODIES_BYTES // MIB,
    turns.PIECE_SIZE >> 10,
)
UNREAD_MIB, UNREAD_PIECE_KIB = connection.MAX_UNREAD_BYTES // MIB, connection._PIECE_BYTES >> 10
KEEP_ALIVE_S, UNREAD_S = f"{connection.KEEP_ALIVE_S:g} s", f"{connection.UNREAD_TIMEOUT_S:g} s"
MAX_NAMES = parsed_request._MAX_NAME_CHARS
# Sentences of pages, with the code's values.
FACTS = [
    ("docs/upgrading.md", f"the same protocol version (now {PROTOCOL_VERSION})"),
    ("docs/upgrading.md", f"this worker speaks protocol version {PROTOCOL_VERSION - 1}, not {PROTOCOL_VERSION}"),
    ("docs/upgrading.md", f"the front-end protocol version (now {FRONT_END_PROTOCOL})"),
    ("docs/upgrading.md", f"smg {PINS['smg'].rpartition('.')[0]}, the tested version"),
    ("docs/openai.md", f"smg {PINS['smg']} (PyPI"),
    ("docs/gpu.md", f"torch {LEAST['torch']}\nor later"),
    ("docs/gpu.md", f"Triton {LEAST['triton']} or later"),
    ("docs/models.md", f"At most {MAX_EXPERTS:,} experts are supported"),
    ("docs/models.md", f"settings files {model_file.MAX_SETTINGS_BYTES // MIB} MiB,"),
    ("docs/models.md", f"the index of weights {model_file.MAX_LISTING_BYTES // MIB} MiB,"),
    ("docs/models.md", f"{chat_template._MAX_NAMED} named chat templates,"),
    ("docs/models.md", f"and {template_sandbox.MAX_TEMPLATE_CHARS:,} characters of all templates together"),
    ("docs/models.md", f": {', '.join(f'`{name}`' for name in classes._BY_NAME)}; other"),
    ("docs/reliability.md", f"Given up after {liveness.MAX_SILENCE} s without a heartbeat"),
    ("docs/reliability.md", f"and exit code {EXIT_REFUSED}; a fenced scheduler exits with {EXIT_FENCED}"),
    ("docs/reliability.md", f"the older one exits with code {EXIT_FENCED}."),
    ("docs/troubleshooting.md", f"`RestartPreventExitStatus=2 {EXIT_FENCED} {EXIT_REFUSED}`"),
    ("docs/troubleshooting.md", f"\n| {EXIT_REFUSED} | cannot start with this setup"),
    ("docs/troubleshooting.md", f"it needs {link_secret._MIN_BYTES} to {link_secret._MAX_BYTES} bytes"),
    ("docs/troubleshooting.md", f"must be one of {', '.join(METHODS)}`"),
    ("docs/serving.md", f"the same {link_secret._MIN_BYTES} to {link_secret._MAX_BYTES} bytes"),
    ("docs/serving.md", f"A path has at most {addresses.MAX_SOCKET_PATH_BYTES}\n"),
    ("docs/serving.md", f"within its tenant, at most {MAX_NAMES['session_id']} characters"),
    ("docs/serving.md", f"When {recording.MAX_WAITING_BYTES // MIB} MiB are unwritten"),
    ("docs/tracing.md", f"in a queue of at most {queued_writer.MAX_WAITING_BYTES // MIB} MiB"),
    ("docs/tracing.md", f"waits at most {logs.FLUSH_TIMEOUT:g} seconds"),
    ("docs/structured_output.md", f"trial output: {1000 * trial.MAX_MASK_SECONDS:g} ms each on average"),
    ("docs/structured_output.md", f"more than {MAX_GRAMMAR_BYTES >> 10} KiB"),
    ("docs/structured_output.md", f"its target): {MAX_VALUES} values and {MAX_CHARS >> 10} Ki characters"),
    ("docs/structured_output.md", f"at most {round(1000 * trial.MAX_CPU_SECONDS)} ms of CPU time"),
    ("docs/structured_output.md", f"of CPU time and {trial.MAX_BYTES // MIB} MiB of memory"),
    ("docs/structured_output.md", f"new grammars: {grammar_checks.MAX_TENANT_WAITING} different ones of one tenant"),
    ("docs/structured_output.md", f"{grammar_checks.MAX_WAITING_BYTES // MIB} MiB of all"),
    ("docs/metrics.md", f"`pagewire:waiting_grammar_bytes` | {grammar_checks.MAX_WAITING_BYTES // MIB} MiB |"),
    ("docs/metrics.md", f"`pagewire:unread_failures` | {shared_call._MAX_UNREAD_FAILURES:,} per"),
    ("docs/performance.md", f"limit of open files, up to {listening._MAX_CONNECTIONS:,};"),
    ("docs/performance.md", f"one gRPC connection: {listening._MAX_CALLS_OF_CONNECTION:,} calls in progress"),
    ("docs/performance.md", f"all gRPC connections: {listening._MAX_PENDING_CALLS:,} calls that wait"),
    ("docs/performance.md", f"`--health-port`: {metrics_server.MAX_CONNECTIONS} connections each"),
    ("docs/performance.md", f"values of an HTTP body: {strict_json.MAX_VALUES:,} |"),
    ("docs/performance.md", f"in answers: {parsed_request.MAX_ANSWER_BYTES // MIB} MiB of one request,"),
    ("docs/performance.md", f"{intake.MAX_TENANT_ANSWER_BYTES // MIB} MiB of a tenant,"),
    ("docs/performance.md", f"of a tenant, {intake.MAX_ANSWERS_BYTES // MIB} MiB together"),
    ("SECURITY.md", f"| {HEADERS} headers, {HEAD_KIB} KiB, received within {HEAD_S}"),
    ("SECURITY.md", f"(TLS handshake: {asyncio.constants.SSL_HANDSHAKE_TIMEOUT:g} s)"),
    ("SECURITY.md", f"| body | {BODY_MIB} MiB, received within {BODY_S} |"),
    ("SECURITY.md", f"| all bodies in transit | {BODIES_MIB} MiB beyond the first {SMALL_KIB} KiB of each"),
    ("SECURITY.md", f"| unread answers | {UNREAD_MIB} MiB beyond the first {UNREAD_PIECE_KIB} KiB of each"),
    ("SECURITY.md", f"| {KEEP_ALIVE_S} between requests; {UNREAD_S} without reading"),
    ("SECURITY.md", f"| {connection.MAX_AHEAD_BYTES >> 10} KiB are read ahead"),
    ("SECURITY.md", f"accepted {connection._ACCEPTED_IN_A_ROW} at a time"),
    ("SECURITY.md", f"may have {listening._MAX_CALLS_OF_CONNECTION:,} calls in progress"),
    ("SECURITY.md", f"and {listening._MAX_PENDING_CALLS:,} calls of all"),
    ("ARCHITECTURE.md", f"heartbeats ({liveness.MAX_SILENCE} s)"),
    ("ARCHITECTURE.md", f"exit code {EXIT_REFUSED} and one line"),
    ("ARCHITECTURE.md", f"`{'|'.join(name for name in VARIANTS if name != 'dotprod')}`"),
]  # fmt: skip


@pytest.mark.parametrize(("page", "text"), FACTS)
def test_a_page_says_what_the_code_says(page: str, text: str) -> None:
    assert " ".join(text.split()) in " ".join(read(Path(page)).split())


def test_two_ports_take_as_many_connections() -> None:
    assert metrics_server.MAX_CONNECTIONS == health.MAX_PROBES, "docs/performance.md has one number for both"


def test_no_page_counts_architectures_otherwise() -> None:
    pages = [path for path in DOCUMENTS if path.name != "CHANGELOG.md"]
    told = {(path, number) for path in pages for number in re.findall(r"(\d+)(?: \w+)? architectures", read(path))}
    assert told
    assert {number for _, number in told} == {str(len(BY_ARCHITECTURE))}


def test_python_is_of_the_versions_that_are_told() -> None:
    tried = re.findall(r"Python :: (3\.\d+)", " ".join(PROJECT["classifiers"]))
    assert PROJECT["requires-python"] == f">={tried[0]}"
    told = re.compile(r"Python (3\.\d+) (?:or newer|to)")
    assert {found for path in DOCUMENTS for found in told.findall(read(path))} == {tried[0]}
    assert f"Python {tried[0]} or newer (tested up to {tried[-1]})" in read(Path("docs/quickstart.md"))


def row(page: str, name: str) -> str:
    """Return the cells after a name in its table row."""
    [found] = re.findall(rf"^\| {re.escape(name)} \| (.*)\|$", read(Path(page)), re.MULTILINE)
    return str(found)


def test_all_quantisation_methods_are_described() -> None:
    page = read(Path("docs/models.md"))
    methods = page[page.index("| `quant_method` |") : page.index("For every architecture above")]
    assert set(re.findall(r"^\| `([\w-]+)` \|", methods, re.MULTILINE)) - {"quant_method"} == set(METHODS)


def test_the_families_of_tool_calls_are_all_named() -> None:
    [named] = re.findall(r"selects the parsers \((.*?)\)", read(Path("docs/openai.md")), re.DOTALL)
    for parsers, *_ in chat_format._CALLS:
        families = ["gpt" if name == "openai" else re.split(r"\d|_", name)[0] for name in parsers]
        assert any(family in named.lower() for family in families), parsers


def first_column(page: str, title: str) -> list[str]:
    """Return the code spans in the first column of the table with this title."""
    text = read(Path(page))
    table = text[text.index(f"| {title} |") :].partition("\n\n")[0]
    return [name for line in table.splitlines()[2:] for name in re.findall(r"`([^`]+)`", line.split("|")[1])]


def test_tables_have_all_rows() -> None:
    assert first_column("docs/performance.md", "`--policy`") == list(POLICIES)
    overlays = [path.name for path in (ROOT / "deploy" / "overlays").iterdir()]
    assert sorted(first_column("deploy/README.md", "overlay")) == sorted(overlays)


def test_the_index_names_every_page() -> None:
    pages = {path.name for path in (ROOT / "docs").glob("*.md")} - {"README.md"}
    assert set(re.findall(r"\]\((\w+\.md)\)", read(Path("docs/README.md")))) == pages


def test_values_of_flags_are_all_named() -> None:
    backends = re.findall(r"`(\w+)`", row("docs/gpu.md", "`--attention-backend`"))
    assert set(backends) == {*ATTENTION_BACKENDS} - {"cpu"}
    assert {*VARIANTS, "native"} <= set(re.findall(r"`(\w+)`", row("docs/quickstart.md", "`PAGEWIRE_CPU_VARIANT`")))


@pytest.mark.parametrize("page", ["README.md", "docs/choosing.md"])
def test_formats_are_all_named(page: str) -> None:
    text = read(Path(page)).lower()
    assert [method for method in METHODS if method not in text] == []


# Defaults of flags


DEFAULT = re.compile(r"`--([a-z-]+)`([^`()|\n]{0,30})\(([^()`]*?)([\d][\d,.]*)( MiB| s| seconds)?\)")
# A number after one of these words is no default.
VALUES = re.compile(r" (down|up|lowered|raised) ")


def told_defaults() -> Iterator[tuple[str, str, float]]:
    for path in DOCUMENTS:
        for flag, between, _, number, unit in DEFAULT.findall(read(path)):
            if not VALUES.search(between) and path.name != "CHANGELOG.md":
                value = float(number.rstrip(".,").replace(",", ""))
                yield str(path), flag, value * MIB if unit == " MiB" else value


@pytest.mark.parametrize(("page", "flag", "value"), sorted(set(told_defaults())))
def test_a_default_that_is_told_is_the_codes(page: str, flag: str, value: float) -> None:
    known = options.options_of(SchedulerConfig, WorkerConfig, FrontEndConfig, LogConfig)
    option = known[flag.replace("-", "_")]
    # If a worker computes the default, the help text states it.
    assert value == option.default or (option.default is None and f"default: {value:g}" in option.help)


def test_defaults_are_found() -> None:
    assert len(set(told_defaults())) >= 12
