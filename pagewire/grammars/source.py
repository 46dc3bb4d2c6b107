"""The kinds of grammars in the one form that the library reads."""

import json

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from pagewire.grammars.json_schema import for_library
from pagewire.grammars.structural_tag import structural_tag_to_lark


def to_llguidance(kind: str, text: str) -> str:
    """Return a grammar as the library reads it, whether it is a good one or not. Raises ValueError for a text that is
    not of its kind, and a kind that is none."""
    match kind:
        case "json_schema":
            return LLMatcher.grammar_from_json_schema(json.dumps(for_library(json.loads(text))))
        case "json_object":
            return LLMatcher.grammar_from_json_schema(json.dumps(for_library({"type": "object"})))
        case "regex":
            return LLMatcher.grammar_from_regex(text)
        case "choice":
            return LLMatcher.grammar_from_lark("start: " + " | ".join(map(json.dumps, _choices(text))))
        case "grammar":
            return LLMatcher.grammar_from_lark(any_to_lark(text))
        case "structural_tag":
            return LLMatcher.grammar_from_lark(structural_tag_to_lark(text))
    raise ValueError(f"{kind} is no kind of grammar that this server has")


def _choices(text: str) -> list[str]:
    """Raises ValueError if it is not a JSON array of texts, at least one."""
    choices = json.loads(text)
    if (
        not isinstance(choices, list)
        or not choices
        or not all(isinstance(choice, str) and choice for choice in choices)
    ):
        raise ValueError("a choice is a JSON array of texts, at least one, none of them empty")
    return list(dict.fromkeys(choices))
