"""The house stays as small as it is: see `counts.py`, which holds the ceilings."""

import ast
from collections import Counter

import pytest

from tests.project import counts
from tests.project.sources import PACKAGES, sources

_PUBLIC_WIRE = "the client has its own type of a message that the scheduler makes of its own"
# Why a name is defined more than once.
TWICE = {
    "BlockHolder": _PUBLIC_WIRE,
    "BlockMap": _PUBLIC_WIRE,
    "RequestReport": _PUBLIC_WIRE,
    "TokenLogprobs": _PUBLIC_WIRE,
    "SamplingParams": "what users write, and what a row is told, in which every value is set",
    "Session": "an epoch, as each side of the wire between scheduler and worker sees it",
}


@pytest.mark.parametrize("package", PACKAGES)
def test_statements_keep_to_their_ceiling(package: str) -> None:
    number = counts.statements_by_package()[package]
    assert number <= counts.MAX_STATEMENTS[package], f"{number} statements in {package}"


def test_a_class_name_means_one_thing() -> None:
    twice = counts.class_names_twice()
    unexplained = {name: modules for name, modules in twice.items() if name not in TWICE}
    assert not unexplained, "give one of them another name, or use one class"
    assert not TWICE.keys() - twice.keys(), "these are defined once, and need no reason"
    assert len(twice) <= counts.MAX_CLASS_NAMES_TWICE


def test_protocols_are_few_and_each_stands_for_several_classes() -> None:
    implementations = counts.implementations()
    assert len(implementations) <= counts.MAX_PROTOCOLS, list(implementations)
    assert not {name: found for name, found in implementations.items() if len(found) < 2}


def test_functions_are_short() -> None:
    assert counts.long_functions() == []


def test_folders_are_small() -> None:
    """Nobody finds their way among many files of one level."""
    sizes = Counter(path.parent for path in sources(*PACKAGES) if path.stem not in ("__init__", "__main__"))
    assert not {folder: size for folder, size in sizes.items() if size > counts.MAX_MODULES}


def test_what_is_counted() -> None:
    tree = ast.parse(
        '"""A."""\nclass A:\n    """B."""\n    x: int\n\n    def f(self):\n        """C."""\n        self.y = 1  # D\n'
    )
    assert counts.statements(tree) == 4
    (node,) = (node for node in tree.body if isinstance(node, ast.ClassDef))
    assert counts.members(node) == {"x", "f", "y"}
