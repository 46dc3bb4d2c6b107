"""The tables of docs/openai.md, made of the routes' fields.

`python -m tests.system.openai_api.document` writes them.
"""

import json
import re
from pathlib import Path

from tests.system.openai_api.chat_completions import CHAT_COMPLETIONS
from tests.system.openai_api.completions import COMPLETIONS
from tests.system.openai_api.field import Field, Route, Verdict
from tests.system.openai_api.generate import GENERATE
from tests.system.openai_api.responses import RESPONSES

DOCUMENT = Path("docs/openai.md")
OPENAI_ROUTES = (COMPLETIONS, CHAT_COMPLETIONS, RESPONSES)
ROUTES = (*OPENAI_ROUTES, GENERATE)
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


def with_tables(text: str) -> str:
    """`text` with every route's table between the comments that name it."""
    for route in ROUTES:
        begin, end = f"<!-- fields of {route.path} -->\n", f"<!-- end of {route.path} -->"
        pattern = re.compile(f"{re.escape(begin)}.*?{re.escape(end)}", re.DOTALL)
        parts = pattern.split(text)
        if len(parts) != 2:
            raise ValueError(f"the document has no single place for the fields of {route.path}")
        before, after = parts
        text = f"{before}{begin}\n{block(route)}\n\n{end}{after}"
    return text


if __name__ == "__main__":
    DOCUMENT.write_text(with_tables(DOCUMENT.read_text()))
