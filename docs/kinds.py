"""The kinds of models that people run, from kinds.tsv, and the tables of models.md that list them.

The order is by downloads from the Hugging Face Hub (May 2026) and by the number of benchmark results that users
published (August 2026). Kinds without a rank follow in no order. A kind is supported if its cell `missing` is empty; a
test compares this with the published config.json of the example.
"""

from collections import defaultdict
from dataclasses import dataclass
from pathlib import Path

from pagewire.network.families import BY_ARCHITECTURE

FILE = Path(__file__).with_name("kinds.tsv")
_MULTIMODAL = "ForConditionalGeneration"


@dataclass(frozen=True)
class Kind:
    """A row of kinds.tsv."""

    rank: str  # may be empty
    models: str  # names, for readers
    example: str  # a repository of the Hugging Face Hub
    architectures: tuple[str, ...]  # names in config.json, the example's first
    missing: str  # what Pagewire lacks to serve these models, or empty

    @property
    def support(self) -> str:
        if self.missing:
            return f"no: {self.missing}"
        return "text only" if self.architectures[0].endswith(_MULTIMODAL) else "yes"


def _read() -> tuple[Kind, ...]:
    _, *rows = (line.split("\t") for line in FILE.read_text(encoding="utf-8").splitlines())
    return tuple(
        Kind(rank, models, example, tuple(named.split(", ")), gap) for rank, models, example, named, gap in rows
    )


KINDS = _read()


def ranking_table() -> str:
    rows = ["| rank | models | for example | supported |", "|---|---|---|---|"]
    rows += [f"| {kind.rank} | {kind.models} | `{kind.example}` | {kind.support} |" for kind in KINDS]
    return "\n".join(rows)


def architectures_table() -> str:
    """Return a table of the supported architectures in alphabetical order, with the names of their models."""
    models = defaultdict(list)
    for kind in KINDS:
        for architecture in () if kind.missing else kind.architectures:
            models[architecture].append(kind.models)
    rows = [
        f"| `{name}` | {', '.join(models[name])} |"
        for name in sorted(BY_ARCHITECTURE, key=lambda name: (name.lower(), name))
    ]
    return "\n".join(["| architecture in `config.json` | models |", "|---|---|", *rows])
