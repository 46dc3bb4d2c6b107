"""docs/openai_fields.md, made of the routes' fields: `python -m tests.system.openai_api.document` writes it."""

import json
from importlib import metadata
from pathlib import Path

from tests.system.openai_api.chat_completions import CHAT_COMPLETIONS
from tests.system.openai_api.completions import COMPLETIONS
from tests.system.openai_api.field import Field, Route, Verdict
from tests.system.openai_api.generate import GENERATE
from tests.system.openai_api.responses import RESPONSES

DOCUMENT = Path("docs/openai_fields.md")
OPENAI_ROUTES = (COMPLETIONS, CHAT_COMPLETIONS, RESPONSES)
ROUTES = (*OPENAI_ROUTES, GENERATE)
_TITLE = f"""# Fields of the OpenAI API

Every field of a request through the [gateway](openai.md), and what becomes of it. The tests send every row to a real
gateway, over plain HTTP and with the `openai` client ({metadata.version("openai")}, of whose fields none is missing).

| treatment | the field |
|---|---|
| honoured | does what OpenAI, vLLM or sglang document |
| changed | does something else, which the note says |
| refused | makes the request fail with the status shown and a message that names it; by Pagewire: in every front end |
| ignored | counts as absent: the gateway drops it, so Pagewire cannot refuse it |

`logit_bias`, beam search, prompt log-probabilities, priorities and cache salts, which the gateway drops, are fields of
[`Generate`](api.md#generaterequest) over gRPC, and of `pagewire.Client`.

<!-- Made by `make docs`; do not edit. -->"""
_ORDER = list(Verdict)
_UNKNOWN = {
    Verdict.IGNORED: "Every other name is ignored too.",
    Verdict.REFUSED: "Every other name is refused by the gateway, 400.",
}


def table(route: Route) -> str:
    """Fields of one verdict and one note share a row."""
    lines = ["| Field | Treatment | Notes |", "|---|---|---|"]
    fields = sorted(route.fields, key=lambda field: (_ORDER.index(field.verdict), not field.note))
    rows: dict[tuple[Verdict, int, str], list[Field]] = {}
    for field in fields:
        rows.setdefault((field.verdict, field.status, field.note), []).append(field)
    for (verdict, status, note), members in rows.items():
        what = f"{verdict.value}, {status}" if status != 200 else verdict.value
        lines.append(f"| {', '.join(map(_title, members))} | {what} | {note} |")
    return "\n".join(lines)


def _title(field: Field) -> str:
    name, _, detail = field.name.partition(", ")
    return f"`{name}` ({detail})" if detail else f"`{name}`"


def block(route: Route) -> str:
    plain = json.dumps(route.plain)
    return f"Tested as additions to `{plain}`.\n\n{table(route)}\n\n{_UNKNOWN[route.unknown]}"


def page() -> str:
    routes = [f"## `{route.path}`\n\n{block(route)}" for route in ROUTES]
    return "\n\n".join([_TITLE, *routes]) + "\n"


if __name__ == "__main__":
    DOCUMENT.write_text(page())
