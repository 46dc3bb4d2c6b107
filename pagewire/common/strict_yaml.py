"""YAML from files and flags, without what its library lets pass: a key that is there twice, errors of many types."""

from collections.abc import Hashable
from typing import Any

import yaml


def parse_yaml(text: str) -> Any:
    """Return what the text stands for. Raises ValueError, one line."""
    try:
        return _UniqueKeyLoader(text).get_single_data()
    except RecursionError:
        raise ValueError("not YAML that can be read: it is nested too deeply") from None
    except Exception as error:  # for a value that its tag does not fit, that of whatever conversion failed
        reason = str(error) if isinstance(error, yaml.YAMLError | ValueError) else f"a value of no sense: {error!r}"
        raise ValueError(f"not YAML: {' '.join(reason.split())}") from None


class _UniqueKeyLoader(yaml.SafeLoader):
    """Refuses a mapping that has a key twice, of which YAML's own would silently take the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if isinstance(key, Hashable) and key in seen:
                raise yaml.constructor.ConstructorError(
                    "while reading a mapping", node.start_mark, f"found {key!r} twice", key_node.start_mark
                )
            seen |= {key} if isinstance(key, Hashable) else set()
        return super().construct_mapping(node, deep)
