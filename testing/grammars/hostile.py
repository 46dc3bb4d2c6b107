"""Grammars that need minutes, gigabytes or the whole stack if no limits apply, or that the library refuses."""

import json


def nested(depth: int) -> str:
    return '{"type":"array","items":' * depth + '{"type":"integer"}' + "}" * depth


# The kind and the text of each grammar, by a descriptive name.
HOSTILE: dict[str, tuple[str, str]] = {
    "nested schemas": ("json_schema", nested(3000)),
    "nested arrays": ("json_schema", "[" * 200_000 + "]" * 200_000),
    "nested groups": ("regex", "(" * 20_000 + "a" + ")" * 20_000),
    "nested rules": ("grammar", "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "half a megabyte": ("regex", "abc|" * 120_000),
    "ten thousand properties": (
        "json_schema",
        json.dumps({"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(10_000)}}),
    ),
    "patterns that must all hold": (
        "json_schema",
        json.dumps({"type": "string", "allOf": [{"pattern": f"a.{{{i}}}b"} for i in range(40)]}),
    ),
    "alternatives times alternatives": (
        "json_schema",
        json.dumps({"allOf": [{"anyOf": [{"properties": {f"x{i}_{j}": {}}} for j in range(4)]} for i in range(12)]}),
    ),
    "many rules that may be empty": (
        "grammar",
        f"start: {' '.join(f'x{i}' for i in range(2000))}\n" + "\n".join(f'x{i}: "a" | "b" | ' for i in range(2000)),
    ),
    "many alternatives": ("grammar", "start: " + " | ".join(f'"{i:06d}"' for i in range(40_000))),
    # After about twenty tokens, each rule may have begun at each of them.
    "rules that are ambiguous together": (
        "grammar",
        "start: x0\n" + "\n".join(f'x{i}: x{i} x{(i + 1) % 30} | x{(i + 7) % 30} x{i} | "a" | "b"' for i in range(30)),
    ),
    "references in a circle": (
        "json_schema",
        json.dumps({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
    ),
}
