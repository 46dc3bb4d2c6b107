"""The kinds of grammars in the one form that the library reads."""

import json
from collections.abc import Container, Mapping

from llguidance import LLMatcher
from llguidance.gbnf_to_lark import any_to_lark

from pagewire.common.grammars.json_schema import for_library
from pagewire.common.grammars.structural_tag import structural_tag_to_lark

# Where only one text can follow, the library would allow its tokens alone, as the tokenizer cuts that text: but a
# tokenizer may read another text there, in another form of Unicode, or a token that is called like it.
_ANY_TOKENS = '%llguidance {"no_forcing": true}'


def to_llguidance(kind: str, text: str, token_names: Mapping[str, int], alone: Container[str] = ()) -> str:
    """Return a grammar as the library reads it, whether it is a good one or not. Raises ValueError for a text that is
    not of its kind, and a kind that is none.

    `token_names`: tokens that may stand for their names in structural tags; `alone`: the names that no others spell.
    """
    return f"{_to_lark(kind, text, token_names, alone)}\n{_ANY_TOKENS}"


def _to_lark(kind: str, text: str, token_names: Mapping[str, int], alone: Container[str]) -> str:
    match kind:
        case "json_schema":
            return f"start: %json {json.dumps(for_library(json.loads(text)))}"
        case "json_object":
            return f"start: %json {json.dumps(for_library({'type': 'object'}))}"
        case "regex":
            return json.loads(LLMatcher.grammar_from_regex(text))["grammars"][0]["lark_grammar"]
        case "choice":
            return "start: " + " | ".join(map(json.dumps, _choices(text)))
        case "grammar":
            return any_to_lark(text)
        case "structural_tag":
            return structural_tag_to_lark(text, token_names, alone)
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
