"""Strict parsing of YAML from files and flags: duplicate keys are errors, and every error is a ValueError."""

from collections.abc import Hashable
from typing import Any

import yaml


def parse_yaml(text: str) -> Any:
    """Parse a YAML text and return its value. Duplicate keys are errors. Raises ValueError with a message of one line
    for any invalid text.
    """
    try:
        return _UniqueKeyLoader(text).get_single_data()
    except RecursionError:
        raise ValueError("not readable YAML: it is nested too deeply") from None
    except Exception as error:  # a value that does not fit its tag raises the error of the failed conversion
        reason = str(error) if isinstance(error, yaml.YAMLError | ValueError) else f"an invalid value: {error!r}"
        raise ValueError(f"not YAML: {' '.join(reason.split())}") from None


class _UniqueKeyLoader(yaml.SafeLoader):
    """A PyYAML loader that refuses duplicate keys in a mapping. PyYAML's own loaders silently use the last value of
    such a key.
    """

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
