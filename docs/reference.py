"""Writes the generated pages and parts of pages: metrics, APIs, models, weight formats, cache sizes, other
engines' options.

It also writes code that repeats other code for type checkers. Run `make docs` or `python -m docs.reference`. A test
checks that the pages are up to date.
"""

import ast
import math
import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import MISSING, fields
from functools import partial
from itertools import groupby
from pathlib import Path

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
    FileDescriptorSet,
    ServiceDescriptorProto,
)
from msgspec import Struct
from prometheus_client.metrics_core import Metric

from bench.gpu.results_page import tables
from docs.cache_sizes import sizes_table
from docs.kinds import architectures_table, ranking_table
from pagewire.common.gguf import ARCHITECTURES, SUPPORTED_TYPES
from pagewire.common.wire.messages import WorkerCapacity
from pagewire.common.wire.transport.tls import Life
from pagewire.compatibility import FOREIGN, MAPPED, SAMPLING_FIELDS, STRUCTURED_OUTPUTS_FIELDS, SYNONYMS, Foreign
from pagewire.kernels.quantized import BITS
from pagewire.network.checkpoint_files import ELEMENT_BYTES
from pagewire.network.families import BY_ARCHITECTURE
from pagewire.network.families.reading import DTYPES
from pagewire.network.quantization import METHODS
from pagewire.network.weight_formats import WeightFormat
from scheduler_service.api.http.openapi import field_rows
from scheduler_service.api.http.requests import (
    INERT,
    JsonObjectFormat,
    JsonSchemaFormat,
    NamedSchema,
    StreamOptions,
    StructuralTagFormat,
    StructuredOutputsField,
    TextFormat,
    ThinkingField,
    ValueFormat,
)
from scheduler_service.api.http.routes import NAMED, POSTED
from scheduler_service.core.request import SchedulerStats
from scheduler_service.core.sequence import TRANSITIONS, GroupState
from scheduler_service.metrics import FrontEndCollector, FrontEndStats, Metrics, MetricsCollector, ServiceStats
from worker_service.device.triton_operations import TritonOperations
from worker_service.host.cpu_operations import CpuProducts
from worker_service.models.layouts import BY_NAME
from worker_service.models.layouts.gguf import BLOCKS
from worker_service.models.torch_operations import Operations

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "docs"
SCHEDULER = "pagewire/scheduler/v1/scheduler.proto"
WORKER = "pagewire/worker/v1/worker.proto"
SAMPLING = "pagewire/client/sampling_params.py"
FIELDS = '    """The fields of `SamplingParams` as keyword arguments. Made by `make docs`; do not edit."""\n'
MADE = "<!-- Made by `make docs`; do not edit. -->"

# The types of structured fields in HTTP requests.
HTTP_TYPES = (
    StreamOptions,
    TextFormat,
    JsonObjectFormat,
    ValueFormat,
    JsonSchemaFormat,
    NamedSchema,
    StructuralTagFormat,
    StructuredOutputsField,
    ThinkingField,
)
HTTP_TITLE = """# The HTTP API

The fields of all requests to `pagewire serve` and `pagewire frontend`. An unknown field is refused, and the error names
the most similar field; with `--lenient` it is ignored. null means unset, also for an unknown field. A whole float
such as 100.0 is accepted as an integer.

A running server shows the same at `/docs`, and as OpenAPI at `/openapi.json`. It also serves `/v1/models`,
`/tokenizer_info`, `/health`, `/ping`, `/version` and `/metrics`, and of Ollama's API `/api/tags`, `/api/ps` and
`/api/version`."""
MAX_GROWTH = 1.1  # of a weight that counts as unchanged, from the file to memory
MEASURED = 4096  # inputs and outputs of the weight that is measured
METRICS_TITLE = """# Metrics

The scheduler and each front end serve metrics in Prometheus' text format over HTTP:

```
curl -s 127.0.0.1:9090/metrics
```

`--metrics-host` and `--metrics-port` set the address; port 0 turns metrics off. Metrics whose names begin with `vllm:`
have the names and buckets of vLLM, so dashboards and routers for vLLM work unchanged. The other names begin with
`pagewire:`.

Every series has the labels `model_name` and `engine` (always "0"). A histogram has the series `_bucket`, `_sum` and
`_count`. A dashboard and alerts are in [deploy/components/monitoring](../deploy/components/monitoring).

These gauges report data that the scheduler currently stores for clients:

| gauge | limit |
|---|---|
| `pagewire:waiting_text_bytes` | `--max-waiting-text-bytes` |
| `pagewire:detached_bytes` | `--max-detached-bytes` |
| `pagewire:kv_event_bytes` | `--max-kv-event-bytes` |
| `pagewire:waiting_grammar_bytes` | 64 MiB |
| `pagewire:unread_failures` | 1,024 per `GenerateMany` call |

`vllm:generation_tokens_total` counts output tokens that clients received over any API, including tokens that a client
did not read before it disconnected. `pagewire:discarded_tokens_total` counts computed tokens beyond these. When no
request is running, the sum is the number of computed output tokens."""
FRONT_END_METRICS = """## Front ends

A front end's metrics port reports its own clients. The scheduler's metrics include their requests, too, under other
names."""
API_TITLE = """# API reference

The gRPC API of the public port, generated from the comments of
[scheduler.proto](../protos/pagewire/scheduler/v1/scheduler.proto). The same port also serves gRPC health, reflection,
and `vllm.grpc.engine.VllmEngine` for routers (see [openai.md](openai.md))."""
WORKER_TITLE = """# The protocol between scheduler and worker

This protocol is internal. Clients do not need it, and it may change with every release. The page is generated from the
comments of [worker.proto](../protos/pagewire/worker/v1/worker.proto). [upgrading.md](upgrading.md) lists the versions
that work together."""

# Field numbers in google/protobuf/descriptor.proto. A comment's path consists of such numbers and indices.
FILE_PACKAGE, FILE_MESSAGE, FILE_ENUM, FILE_SERVICE = 2, 4, 5, 6
MESSAGE_FIELD, MESSAGE_NESTED, MESSAGE_ENUM = 2, 3, 4
ENUM_VALUE = SERVICE_METHOD = 2
FILE_SYNTAX = 12
IGNORED_COMMENT = "buf:lint:ignore"

FieldPath = tuple[int, ...]


def metrics_page() -> str:
    rows = ["| series | type | additional labels | meaning |", "|---|---|---|---|"]
    rows += _series(_exported().collect())
    front_end = FrontEndCollector(lambda: FrontEndStats(certificate_validity=_lives("scheduler"))).collect()
    own = [FRONT_END_METRICS, "", rows[0], rows[1], *_series(front_end)]
    return "\n".join([METRICS_TITLE, "", MADE, "", *rows, "", *own, ""])


def _series(families: Iterable[Metric]) -> Iterator[str]:
    """Yield a table row for each family of time series."""
    for family in families:
        name = f"{family.name}_total" if family.type == "counter" else family.name
        labels = {label for sample in family.samples for label in sample.labels} - {"model_name", "engine", "le"}
        own = ", ".join(_described_label(family, label) for label in sorted(labels))
        yield f"| `{name}` | {family.type} | {own} | {family.documentation} |"


def _described_label(family: Metric, label: str) -> str:
    values = sorted({sample.labels[label] for sample in family.samples})
    return f"`{label}`" if all(map(str.isdigit, values)) else f"`{label}`: {', '.join(values)}"


def _exported() -> MetricsCollector:
    capacity = WorkerCapacity("w", b"", 300, 256, 16, 64, 1, 8, 64, "cpu", "float32", "torch")
    stats = SchedulerStats(**{field.name: 0 for field in fields(SchedulerStats) if field.default is MISSING})
    worker = {f"worker 0 {flag}": Life(0.0, 1.0) for flag in ("--tls-cert", "--tls-client-ca")}
    service = ServiceStats(capacity, certificate_validity=worker | _lives("worker"))
    return MetricsCollector(Metrics(), lambda: stats, "model", lambda: service)


def _lives(other: str) -> dict[str, Life]:
    """Return one dummy validity period per certificate of a service that connects to the service `other`."""
    flags = "--tls-cert", "--tls-client-ca", f"--{other}-tls-cert", f"--{other}-tls-ca"
    return dict.fromkeys(flags, Life(0.0, 1.0))


def api_page() -> str:
    return ProtoPage(_described(SCHEDULER)).render(API_TITLE)


def worker_page() -> str:
    return ProtoPage(_described(WORKER)).render(WORKER_TITLE)


def _described(source: str) -> FileDescriptorProto:
    """Return the descriptor of a .proto file, with its comments."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "descriptors"
        command = [sys.executable, "-m", "grpc_tools.protoc", "-Iprotos", "--include_source_info"]
        subprocess.run([*command, f"--descriptor_set_out={output}", f"protos/{source}"], cwd=ROOT, check=True)
        (file,) = FileDescriptorSet.FromString(output.read_bytes()).file
    return file


def migrating_page() -> str:
    return with_part((FOLDER / "migrating.md").read_text(encoding="utf-8"), "options", _options())


def models_page() -> str:
    text = (FOLDER / "models.md").read_text(encoding="utf-8")
    parts = {
        "kinds of models": ranking_table(),
        "architectures": architectures_table(),
        "weights": _formats_table(),
        "GGUF files": _gguf_table(),
    }
    for name, part in parts.items():
        text = with_part(text, name, part)
    return text


def sizing_page() -> str:
    return with_part((FOLDER / "sizing.md").read_text(encoding="utf-8"), "KV cache of models", sizes_table())


def counting_page(path: Path) -> str:
    """Return a page with the current number of supported architectures."""
    return re.sub(r"\d+(?= architectures\])", str(len(BY_ARCHITECTURE)), path.read_text(encoding="utf-8"))


def gpu_page() -> str:
    return with_part((FOLDER / "gpu.md").read_text(), "results on GPUs", tables())


def architecture_page() -> str:
    return with_part((ROOT / "ARCHITECTURE.md").read_text(encoding="utf-8"), "states of a group", _states_of_a_group())


def sampling_module() -> str:
    """Return the source of the module with `SamplingFields` generated from the fields of `SamplingParams`."""
    text = (ROOT / SAMPLING).read_text(encoding="utf-8")
    (declared,) = (node for node in ast.parse(text).body if getattr(node, "name", "") == "SamplingParams")
    assert isinstance(declared, ast.ClassDef)
    own = [each for each in declared.body if isinstance(each, ast.AnnAssign)]
    lines = [f"    {ast.unparse(each.target)}: {ast.unparse(each.annotation)}" for each in own]
    before, _, rest = text.partition(FIELDS)
    after = rest.partition("\n\n\n")[2]
    return "\n".join([f"{before}{FIELDS}", *(line for line in lines if "InitVar" not in line), "", "", after])


def http_page() -> str:
    parts, described = [HTTP_TITLE, MADE], dict[type[Struct], str]()
    for route in POSTED:
        first = described.setdefault(route.request, route.path)
        fields = _http_fields(route.request) if first == route.path else [f"The fields are those of `{first}`."]
        parts += [f"## `{route.path}`", f"{route.summary}.", *fields]
    for route in NAMED:
        parts += [f"## `{route.method} {route.path}`", f"{route.summary}.", *_http_fields(route.request)]
    for kind in HTTP_TYPES:
        parts += [f"## {kind.__name__}", *_http_fields(kind)]
    return "\n\n".join(parts) + "\n"


def _http_fields(kind: type[Struct]) -> Iterator[str]:
    """Yield a table of supported fields, a line of fields without effect, and a table of unsupported fields."""
    rows = list(field_rows(kind))
    table = ["| Field | Type | Notes |", "|---|---|---|"]
    for row in rows:
        if row.takes and row.note != INERT:
            note = f"required{'; ' if row.note else ''}{row.note}" if row.is_required else row.note
            table.append(f"| `{row.name}` | {row.takes} | {note} |")
    yield "\n".join(table)
    if inert := ", ".join(f"`{row.name}`" for row in rows if row.note == INERT):
        yield f"No effect on the output: {inert}."
    if refused := "\n".join(f"| `{row.name}` | {row.note} |" for row in rows if not row.takes):
        yield f"| Not supported | Reason |\n|---|---|\n{refused}"


def _states_of_a_group() -> str:
    """Return a code block with one line for each state of a group and each reason to enter the state.

    A line lists all states from which the group enters the state for this reason.
    """
    befores: dict[tuple[str, str], list[str]] = {}
    for (before, after), reason in TRANSITIONS.items():
        befores.setdefault((after.value, reason), []).append(before.value)
    num_states = len(GroupState)
    names = {key: "any" if len(states) == num_states - 1 else ", ".join(states) for key, states in befores.items()}
    arrows = {key: f"{name} ──▶ {key[0]}" for key, name in names.items()}
    width = max(map(len, arrows.values()))
    return "\n".join(["```", *(f"{arrow:{width}}  {reason}" for (_, reason), arrow in arrows.items()), "```"])


def with_part(text: str, name: str, part: str) -> str:
    """Return a page with the text between `<!-- NAME -->` and `<!-- end of NAME -->` replaced by `part`.

    Raises ValueError unless the page has exactly one such place.
    """
    begin, end = f"<!-- {name} -->\n", f"<!-- end of {name} -->"
    before, _, rest = text.partition(begin)
    _, found, after = rest.partition(end)
    if not found or begin in after:
        raise ValueError(f"the page has no single place for {name}")
    return f"{before}{begin}\n{part}\n\n{end}{after}"


def by_hand(text: str) -> str:
    """Return the parts of a page that are not generated."""
    return "" if MADE in text else re.sub(r"<!-- (.+) -->\n.*?<!-- end of \1 -->", "", text, flags=re.DOTALL)


def _options() -> str:
    mapped = ["| option | Pagewire's options |", "|---|---|"]
    # Every option is converted with the value 1, since the resulting options do not depend on the value.
    mapped += [f"| `{name}` | {', '.join(f'`{ours}`' for ours in convert(1))} |" for name, convert in MAPPED.items()]
    short = ["| option | flag |", "|---|---|", *(f"| `{name}` | `{flag}` |" for flag, name in SYNONYMS.items())]
    parts = ["### Options with an equivalent", "\n".join(mapped)]
    parts += ["### Other names of flags", "\n".join(short)]
    parts += ["### Other options", _foreign_table(FOREIGN)]
    parts += ["### Other fields of `SamplingParams`", _foreign_table(SAMPLING_FIELDS)]
    parts += ["### Other fields of `StructuredOutputs`", _foreign_table(STRUCTURED_OUTPUTS_FIELDS)]
    return "\n\n".join(parts)


def _formats_table() -> str:
    """Return the table of weight formats, from the code's own lists.

    The operations of a device determine whether weights stay packed on the device.
    """
    keeps = [operations.can_store is not Operations.can_store for operations in (CpuProducts, TritonOperations)]
    kept = " | ".join("unchanged" if keep else "widened" for keep in keeps)
    floats = [element_type.name for element_type in SUPPORTED_TYPES.values() if not element_type.is_quantized]
    codes = defaultdict(list)  # the names of types by what a CPU and a GPU store
    for element_type in filter(lambda each: each.is_quantized, SUPPORTED_TYPES.values()):
        size = MEASURED**2 // element_type.block_size * element_type.block_bytes
        form = BLOCKS[element_type.name].format
        is_small = form.num_bytes(MEASURED, MEASURED) <= MAX_GROWTH * size
        on_cpu = "unchanged" if is_small else f"{4 if form.bits <= 4 else 6 if form.bits <= 6 else 8}-bit codes"
        on_gpu = "8-bit codes" if form.table or 4 < form.bits < 8 else on_cpu
        codes[f"{on_cpu} | {on_gpu}"].append(element_type.name)
    quantizing = " | ".join("yes" if keep else "refused" for keep in keeps)
    return "\n".join(
        [
            "| weights | CPU | GPU |",
            "|---|---|---|",
            f"| safetensors: {', '.join(DTYPES)} | unchanged | unchanged |",
            f"| safetensors: {', '.join(METHODS)}, except: | {kept} |",
            *(f"| safetensors: {', '.join(names)} | {stored} | {stored} |" for stored, names in _grown_layouts()),
            f"| GGUF: {', '.join(floats)} | unchanged | unchanged |",
            *(f"| GGUF: {', '.join(names)} | {stored} |" for stored, names in codes.items()),
            f"| `--quantization {'`, `'.join(BITS)}` | {quantizing} |",
        ]
    )


def _grown_layouts() -> Iterable[tuple[str, list[str]]]:
    """Return the layouts of safetensors files whose weights need more memory than in the file, by what is stored."""
    grown = defaultdict(list)
    for name, layout in BY_NAME.items():
        if layout.held is None:
            grown["widened"].append(name)
            continue
        kept = WeightFormat(name, layout.held.bits, 1, layout.held.group_size or MEASURED)
        tensors = layout.stored(kept, MEASURED, MEASURED).values()
        found = [list(tensor.shapes.items())[-1] for tensor in tensors if not tensor.is_optional]
        size = sum(math.prod(shapes[0]) * ELEMENT_BYTES[dtype] for dtype, shapes in found)
        form = layout.stored_format(kept, MEASURED, has_wide_scales="F32" in dict(found))
        if form is not None and form.num_bytes(MEASURED, MEASURED) > MAX_GROWTH * size:
            grown[f"{form.bits}-bit codes"].append(name)
    return grown.items()


def _gguf_table() -> str:
    """Return the table of the architectures and tensor types of GGUF files, from the code's own lists."""
    architectures = ", ".join(f"`{name}`" for name in sorted(ARCHITECTURES))
    types = ", ".join(sorted(element_type.name for element_type in SUPPORTED_TYPES.values()))
    rows = [f"| architectures | {architectures} |", f"| types | {types}, also mixtures such as Q4_K_M |"]
    return "\n".join(["| GGUF file | supported |", "|---|---|", *rows])


def _foreign_table(options: Mapping[str, Foreign]) -> str:
    rows = [
        "| option | values without effect | other values | reason or alternative |",
        "|---|---|---|---|",
    ]
    for _, group in groupby(options.items(), lambda each: id(each[1])):
        members = list(group)
        option = members[0][1]
        names = ", ".join(f"`{name}`" for name, _ in members)
        numbers = [value for value in option.harmless if type(value) is int]
        is_range = len(numbers) > 2
        shown = [f"`{value!r}`" for value in option.harmless if not (is_range and value in numbers[1:])]
        harmless = ", ".join(shown) + (f" to `{numbers[-1]}`" if is_range else "")
        treatment = "refused" if option.is_refused else "ignored, with a warning"
        rows.append(f"| {names} | {harmless} | {treatment} | {option.text} |")
    return "\n".join(rows)


class ProtoPage:
    """A .proto file as Markdown: its services, then its messages and enums in file order."""

    def __init__(self, file: FileDescriptorProto) -> None:
        self._file = file
        self._comments = {tuple(place.path): place.leading_comments for place in file.source_code_info.location}
        (self._introduction,) = (
            place.leading_detached_comments[0] if place.leading_detached_comments else place.leading_comments
            for place in file.source_code_info.location
            if tuple(place.path) == (FILE_SYNTAX,)
        )

    def render(self, title: str) -> str:
        parts = [title, MADE, _paragraphs(self._introduction)]
        for i, service in enumerate(self._file.service):
            parts += self._service((FILE_SERVICE, i), service)
        for i, message in enumerate(self._file.message_type):
            parts += self._message((FILE_MESSAGE, i), message)
        for i, enum in enumerate(self._file.enum_type):
            parts += self._enum((FILE_ENUM, i), enum)
        return "\n\n".join(part for part in parts if part) + "\n"

    def _service(self, path: FieldPath, service: ServiceDescriptorProto) -> Iterator[str]:
        yield f"## {self._file.package}.{service.name}"
        yield self._text(path)
        for i, method in enumerate(service.method):
            request = ("stream " if method.client_streaming else "") + self._link(method.input_type)
            response = ("stream " if method.server_streaming else "") + self._link(method.output_type)
            yield f"### {method.name}"
            yield f"{request} → {response}"
            yield self._text((*path, SERVICE_METHOD, i))

    def _message(self, path: FieldPath, message: DescriptorProto) -> Iterator[str]:
        yield f"## {message.name}"
        yield self._text(path)
        rows = []
        for i, field in enumerate(message.field):
            text = self._cell((*path, MESSAGE_FIELD, i))
            rows.append(f"| {field.number} | `{field.name}` | {self._type(message, field)} | {text} |")
        yield "\n".join(["| | field | type | |", "|---|---|---|---|", *rows]) if rows else "It has no fields."
        for i, enum in enumerate(message.enum_type):
            yield from self._enum((*path, MESSAGE_ENUM, i), enum)

    def _enum(self, path: FieldPath, enum: EnumDescriptorProto) -> Iterator[str]:
        yield f"## {enum.name}"
        yield self._text(path)
        rows = [
            f"| {value.number} | `{value.name}` | {self._cell((*path, ENUM_VALUE, i))} |"
            for i, value in enumerate(enum.value)
        ]
        yield "\n".join(["| | value | |", "|---|---|---|", *rows])

    def _type(self, message: DescriptorProto, field: FieldDescriptorProto) -> str:
        if not field.type_name:
            name = FieldDescriptorProto.Type.Name(field.type).removeprefix("TYPE_").lower()
        else:
            name = self._map(message, field.type_name) or self._link(field.type_name)
        if name.startswith("map"):
            return name
        if field.label == FieldDescriptorProto.LABEL_REPEATED:
            return f"repeated {name}"
        if field.proto3_optional:
            return f"optional {name}"
        if field.HasField("oneof_index"):
            return f"{name}, one of `{message.oneof_decl[field.oneof_index].name}`"
        return name

    def _map(self, message: DescriptorProto, type_name: str) -> str:
        """Return the key and value types of a map field, or an empty string for another field."""
        for nested in message.nested_type:
            if nested.options.map_entry and type_name.endswith(f".{message.name}.{nested.name}"):
                key, value = (self._type(nested, field) for field in nested.field)
                return f"map of {key} to {value}"
        return ""

    def _link(self, type_name: str) -> str:
        name = type_name.rpartition(".")[2]
        return f"[{name}](#{name.lower()})"

    def _text(self, path: FieldPath) -> str:
        return _paragraphs(self._comments.get(path, ""))

    def _cell(self, path: FieldPath) -> str:
        return self._text(path).replace("\n\n", "<br>").replace("\n", " ").replace("|", "\\|")


def _paragraphs(comment: str) -> str:
    lines = [line.strip() for line in comment.splitlines() if IGNORED_COMMENT not in line]
    text = "\n".join(lines).strip()
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in text.split("\n\n"))


PAGES = {
    "metrics.md": metrics_page,
    "api.md": api_page,
    "worker_protocol.md": worker_page,
    "migrating.md": migrating_page,
    "models.md": models_page,
    "gpu.md": gpu_page,
    "sizing.md": sizing_page,
    "http_api.md": http_page,
    "choosing.md": partial(counting_page, FOLDER / "choosing.md"),
    "../README.md": partial(counting_page, ROOT / "README.md"),
    "../ARCHITECTURE.md": architecture_page,
    f"../{SAMPLING}": sampling_module,
}


def main(arguments: Sequence[str]) -> int:
    if arguments:
        print("usage: python -m docs.reference", file=sys.stderr)
        return 2
    for name, page in PAGES.items():
        (FOLDER / name).write_text(page(), encoding="utf-8")
        print(FOLDER / name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
