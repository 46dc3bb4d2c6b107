"""The kinds of grammars in the one form that the library reads."""

import json

from llguidance import LLMatcher


def to_llguidance(kind: str, text: str) -> str:
    """Return a grammar as the library reads it, whether it is a good one or not. Raises ValueError for a text that is
    not of its kind, and a kind that is none."""
    match kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(text)
        case "json_object":
            return LLMatcher.grammar_from_json_schema('{"type": "object"}')
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "choice":
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, json.loads(text))))
        case "grammar":
            return LLMatcher.grammar_from_lark(text)
    raise ValueError(f"{kind} is no kind of grammar that this server has")
