"""Tests that the product and its parts stay within the bounds in `counts.py`."""

import ast
import re
from collections import Counter

from testing.sources import PACKAGES, ROOT, sources
from tests.project import counts

_PUBLIC_WIRE = "the client has its own type of a message that the scheduler makes of its own"
# The reasons for type names that are defined more than once.
TWICE = {
    "BlockHolder": _PUBLIC_WIRE,
    "BlockMap": _PUBLIC_WIRE,
    "RequestReport": _PUBLIC_WIRE,
    "TokenLogprobs": _PUBLIC_WIRE,
    "SamplingParams": "what users write, and what a row is told, in which every value is set",
    "Message": "a mapping, as users pass it to the client and as templates get it",
    "Metadata": "of a call over gRPC, and of a GGUF file",
    "Session": "an epoch, as each side of the wire between scheduler and worker sees it",
}


def test_the_product_keeps_to_its_size() -> None:
    assert sum(counts.statements_by_package().values()) <= counts.MAX_STATEMENTS


def test_the_name_of_a_type_means_one_thing() -> None:
    twice = counts.type_names_twice()
    unexplained = {name: modules for name, modules in twice.items() if name not in TWICE}
    assert not unexplained, "give one of them another name, or use one type"
    assert not TWICE.keys() - twice.keys(), "these are defined once, and need no reason"


def test_each_protocol_stands_for_several_classes() -> None:
    assert not {name: found for name, found in counts.implementations().items() if len(found) < 2}


def test_functions_are_short() -> None:
    assert counts.long_functions() == []


def test_classes_have_few_methods() -> None:
    large = {
        node.name
        for _, node in counts.classes()
        if sum(isinstance(each, counts.Function) for each in node.body) > counts.MAX_METHODS
    }
    assert large == counts.LARGE_CLASSES.keys()


def test_folders_are_small() -> None:
    """A folder with many files is hard to overview."""
    sizes = Counter(path.parent for path in sources(*PACKAGES) if path.stem not in ("__init__", "__main__"))
    assert not {folder: size for folder, size in sizes.items() if size > counts.MAX_MODULES}


def test_few_modules_name_an_option_of_sampling() -> None:
    """A sampling option is a field on each side of the wire and arithmetic in kernels. Other modules loop over the
    fields."""
    named = [path for path in sources(*PACKAGES) if re.search(r"\btop_p\b", (ROOT / path).read_text(encoding="utf-8"))]
    assert len(named) <= 12, named


def test_what_is_counted() -> None:
    tree = ast.parse(
        '"""A."""\nclass A:\n    """B."""\n    x: int\n\n    def f(self):\n        """C."""\n        self.y = 1  # D\n'
    )
    assert counts.statements(tree) == 4
    (node,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    assert counts.members(node) == {"x", "f", "y"}


def test_which_names_are_seen() -> None:
    """Type names are found in every form of definition."""
    tree = ast.parse(
        "class A:\n    class Inner: ...\n"
        "Pair = namedtuple('Pair', 'a b')\n"
        "Alias: TypeAlias = int | str\n"
        "UserId = NewType('UserId', int)\n"
        "_Own = tuple[int, ...]\n"
        "Any = TypeVar('Any')\nLIMIT = 3\nvalue: int = 4\n"
    )
    assert set(counts.type_names(tree)) == {"A", "Inner", "Pair", "Alias", "UserId", "_Own"}
