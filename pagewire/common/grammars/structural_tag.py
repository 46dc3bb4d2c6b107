"""Conversion of xgrammar's structural tags to Lark. A structural tag describes text that contains tagged parts.

A tag is JSON: {"type": "structural_tag", "format": FORMAT}, where FORMAT is an object with a `type` (see
https://xgrammar.mlc.ai/docs/tutorials/structural_tag.html), or the older {"structures": [...], "triggers": [...]}.
"""

import json
import re
from collections.abc import Callable, Container, Mapping, Sequence
from typing import Any

from pagewire.common.grammars.json_schema import for_llguidance
from pagewire.common.strict_json import from_json

_ANY_TEXT = r"/(?s:.*)/"
# The fields of the supported formats besides their type.
_FIELDS = {
    "const_string": {"value"},
    "json_schema": {"json_schema"},
    "any_text": {"excludes", "max_tokens"},
    "regex": {"pattern", "excludes"},
    "sequence": {"elements"},
    "or": {"elements"},
    "tag": {"begin", "content", "end"},
    "tags_with_separator": {"tags", "separator", "at_least_one", "stop_after_first"},
    "triggered_tags": {"triggers", "tags", "at_least_one", "stop_after_first", "excludes"},
    # An extension to xgrammar: a sequence of tags in which the tags that are not required may be missing.
    "tags_in_order": {"tags", "separator", "required"},
}


def _is_text(value: Any) -> bool:
    return isinstance(value, str)


def _are_texts(value: Any) -> bool:
    return isinstance(value, list) and all(map(_is_text, value))


def _are_flags(value: Any) -> bool:
    return isinstance(value, list) and all(isinstance(each, bool) for each in value)


# The type of each field, the same in all formats, and the type's name in error messages.
_TYPES: dict[str, tuple[Callable[[Any], bool], str]] = {
    **dict.fromkeys(("type", "value", "pattern", "begin", "separator"), (_is_text, "a text")),
    **dict.fromkeys(("elements", "tags", "structures"), (lambda value: isinstance(value, list), "a list")),
    **dict.fromkeys(
        ("excludes", "special_tokens"), (lambda value: value is None or _are_texts(value), "a list of texts")
    ),
    "triggers": (_are_texts, "a list of texts"),
    "required": (_are_flags, "a list of true or false"),
    "end": (lambda value: _is_text(value) or _are_texts(value), "a text or a list of texts"),
    "max_tokens": (
        lambda value: value is None or (type(value) is int and 0 <= value < 1 << 32),  # a bool is no number here
        "a whole number from 0",
    ),
    **dict.fromkeys(
        ("at_least_one", "stop_after_first"), (lambda value: isinstance(value, bool | None), "true or false")
    ),
}


def structural_tag_to_lark(text: str, token_names: Mapping[str, int], alone: Container[str]) -> str:
    """Convert a structural tag (xgrammar's JSON format for text with tagged parts) to a grammar in Lark. Raises
    ValueError for an invalid tag or an unsupported feature.

    `token_names` has the ids of tokens by name. Where a text contains such a name, the grammar also allows the token.
    Models that have a token for the beginning of a tag are trained to use the token. For a name in `alone`, the grammar
    allows only the token, because no other tokens can spell the name.
    """
    rules = _Rules(token_names, alone)
    start = rules.expression(format_in(text))
    return "\n".join([f"start: {start}", *rules.lines])


def format_in(text: str) -> Any:
    """Return the format (a JSON object with a type) of a structural tag. A tag of the older form with "structures" is
    converted. Raises ValueError for an invalid tag.
    """
    tag = from_json(text)
    if _checked(tag, "a structural tag").get("type", "structural_tag") != "structural_tag":
        raise ValueError(f"a structural tag has the type {tag['type']!r:.80}, but must have the type 'structural_tag'")
    if "structures" not in tag:
        form = _field(tag, "format", "a structural tag")
        _kind(form)
        return form
    tags = [
        {
            "begin": _field(structure, "begin", "a structure"),
            "content": {"type": "json_schema", "json_schema": _field(structure, "schema", "a structure")},
            "end": structure.get("end", ""),
        }
        for structure in (_checked(each, "a structure") for each in tag["structures"])
    ]
    return {"type": "triggered_tags", "triggers": _field(tag, "triggers", "a structural tag"), "tags": tags}


class _Rules:
    """A Lark grammar under construction, to which each format of a structural tag adds its rules."""

    def __init__(self, token_names: Mapping[str, int], alone: Container[str]) -> None:
        self._token_names = token_names
        self._alone = alone
        self.lines: list[str] = []
        self._names: dict[str, str] = {}  # the names of rules by their definitions
        self._schemas: dict[str, str] = {}  # the names of rules by their JSON Schemas

    def expression(self, form: Any) -> str:
        """Add the rules of a structural tag format to the Lark grammar. Return the Lark expression that refers to these
        rules. Raises ValueError for an unsupported format.
        """
        kind = _kind(form)
        match kind:
            case "const_string":
                return self.literal(_field(form, "value", kind))
            case "json_schema":
                given = json.dumps(_field(form, "json_schema", kind))
                if given not in self._schemas:  # parsing a schema is slow
                    self._schemas[given] = self.rule(f"%json {json.dumps(for_llguidance(form['json_schema']))}")
                return self._schemas[given]
            case "any_text":
                most = form.get("max_tokens")
                return '""' if most == 0 else self.rule(self.text(form), "" if most is None else f"[max_tokens={most}]")
            case "regex":
                return self.rule(self.text(form, pattern=_regex(_field(form, "pattern", kind))))
            case "sequence":
                return self.sequence(map(self.expression, _field(form, "elements", kind)))
            case "or":
                return self.either([self.expression(element) for element in _field(form, "elements", kind)])
            case "tag":
                return self.tag(form)
            case "tags_with_separator":
                return self.separated(form)
            case "triggered_tags":
                return self.triggered(form)
            case "tags_in_order":
                return self.in_order(form)
        raise ValueError(f"a structural tag has a format of type {kind!r}, but must have one of {', '.join(_FIELDS)}")

    def rule(self, body: str, attributes: str = "") -> str:
        """Add a rule with this body to the Lark grammar, and return the name of the rule. Equal rules share one name,
        because the grammar library would otherwise parse each of them.
        """
        line = f"{attributes}: {body}"
        if line not in self._names:
            self._names[line] = f"r{len(self.lines)}"
            self.lines.append(f"{self._names[line]}{line}")
        return self._names[line]

    def sequence(self, parts: Any) -> str:
        return self.rule(" ".join(part for part in parts if part != '""') or '""')

    def either(self, parts: Sequence[str]) -> str:
        if not parts:
            raise ValueError("a structural tag has an empty list of elements, tags or ends; add at least one")
        return self.rule(" | ".join(parts))

    def tag(self, form: Any) -> str:
        begin, content, end = (_field(form, name, "a tag") for name in ("begin", "content", "end"))
        ends = [end] if isinstance(end, str) else end
        if _kind(content) == "any_text" and all(ends):
            # The text extends to the first end.
            return self.sequence([self.literal(begin), self.up_to(ends, content)])
        ending = self.either([self.literal(one) for one in ends])
        return self.sequence([self.literal(begin), self.expression(content), ending])

    def literal(self, text: str, *, takes_tokens: bool = False) -> str:
        """Return the Lark expression that matches a constant text. Where the text contains the name of a special token,
        the expression matches both the characters of the name and the token.

        With `takes_tokens`, the expression matches only the token. The same applies to a name that no other tokens can
        spell.
        """
        before, name, behind = self._cut(text)
        if not name:
            return _quoted(before)
        token = f"<[{self._token_names[name]}]>"
        if name not in self._alone and not takes_tokens:
            token = f"({_quoted(name)} | {token})"
        return self.sequence([_quoted(before), token, self.literal(behind, takes_tokens=takes_tokens)])

    def text(self, form: Any, ends: Sequence[str] = (), pattern: str = _ANY_TEXT) -> str:
        """Return the Lark expression of any text that matches `pattern`. The text must contain none of `ends`, and none
        of the texts that the format `form` excludes.
        """
        excluded = [_quoted(text) for text in (*(form.get("excludes") or ()), *ends)]
        if not excluded:
            return pattern
        name = f"T{len(self.lines)}"
        self.lines.append(f"{name}: {pattern} & ~({_ANY_TEXT} ({' | '.join(excluded)}) {_ANY_TEXT})")
        return name

    def up_to(self, ends: Sequence[str], form: Any) -> str:
        """Return the Lark expression of a format's free text, up to and including the first of the texts `ends`.

        Where an end contains the name of a special token, the model may produce the token instead. If the format has
        `max_tokens`, an end must follow after that many tokens of text.
        """
        text, most = self.text(form), form.get("max_tokens")
        if most is None:
            found = [self.rule(text, f"[suffix={_quoted(end)}]") for end in ends]
            return self.either([*found, *(part for end in ends for part in self.up_to_token(end, text))])
        if most == 0:
            return self.either([self.literal(end, takes_tokens=True) for end in ends])
        # At its limit, the library ends a text in which nothing else can follow. The search for an end would then end
        # without one, so the limit of the search is one token lower.
        limited = self.rule(self.text(form, ends), f"[max_tokens={most}]")
        found = [self.rule(text, f"[max_tokens={most - 1},suffix={_quoted(end)}]") for end in ends if most > 1]
        forced = self.either([self.literal(end, takes_tokens=True) for end in ends])
        return self.either([*found, self.sequence([limited, forced])])

    def up_to_token(self, end: str, text: str) -> list[str]:
        """Return the Lark expression of free text up to and including `end`, where the model produces a special token
        instead of the token's name in `end`. The result is a list of one expression, or an empty list if `end` contains
        no token's name.
        """
        before, name, behind = self._cut(end)
        if not name:
            return []
        begun = f"T{len(self.lines)}"
        self.lines.append(f"{begun}: {text} {_quoted(before) if before else ''}")
        token = f"<[{self._token_names[name]}]>"
        return [self.sequence([begun, token, self.literal(behind)])]

    def _cut(self, text: str) -> tuple[str, str, str]:
        """Find the first name of a special token in a text. Return a tuple: the text in front of the name, the name,
        and the text after the name. If the text contains no name, return the whole text and two empty texts.

        If several names begin at the same position, the longest name is chosen.
        """
        found = [(text.find(name), -len(name), name) for name in self._token_names if name in text]
        if not found:
            return text, "", ""
        start, _, name = min(found)
        return text[:start], name, text[start + len(name) :]

    def _is_within_token(self, position: int, text: str) -> bool:
        before, name, _ = self._cut(text)
        return len(before) < position < len(before) + len(name)

    def separated(self, form: Any) -> str:
        """Return the Lark expression of a structural tag format that consists of tags with a separator between them."""
        tag = self.either([self.tag(one) for one in _tags(form)])
        more = "" if form.get("stop_after_first") else f" ({self.literal(form.get('separator', ''))} {tag})*"
        tags = self.rule(f"{tag}{more}")
        return tags if form.get("at_least_one") else self.rule(f"{tags} |")

    def in_order(self, form: Any) -> str:
        """Return the Lark expression of a structural tag format whose tags occur in a fixed order, with a separator
        between them. Tags that are not required may be missing.

        Each rule refers to the rule of the following tags, so the number of rules is proportional to the number of
        tags.
        """
        tags, required = _tags(form), _field(form, "required", "tags_in_order")
        if len(tags) != len(required):
            raise ValueError(
                f"tags_in_order has {len(tags)} tags, but required has {len(required)} entries; send one for each tag"
            )
        separator = self.literal(form.get("separator", ""))
        first = later = '""'  # the tags from a position on, if no tag or some tag preceded them
        for form_of_tag, is_required in zip(reversed(tags), reversed(required), strict=True):
            tag = self.tag(form_of_tag)
            first = self.either([self.sequence([tag, later]), *([] if is_required else [first])])
            later = self.either([self.sequence([separator, tag, later]), *([] if is_required else [later])])
        return first

    def triggered(self, form: Any) -> str:
        """Return the Lark expression of free text that contains tags. A trigger is the beginning of one or more tags:
        wherever the text contains a trigger, the rest of one of these tags must follow. Raises ValueError if a tag
        begins with no trigger, or a trigger begins no tag.
        """
        triggers, tags = _field(form, "triggers", "triggered_tags"), _tags(form)
        for tag in tags:
            if not _field(tag, "begin", "a tag").startswith(tuple(triggers)):
                raise ValueError(f"the tag {tag['begin']!r} begins with none of the triggers {triggers!r:.80}; add one")
        parts, text = [], self.text(form)
        for trigger in triggers:
            begun = [tag for tag in tags if tag["begin"].startswith(trigger)]
            if not trigger or not begun:
                raise ValueError(f"no tag begins with the trigger {trigger!r}; remove it, or add a tag")
            rests = self.either([self.tag({**tag, "begin": tag["begin"][len(trigger) :]}) for tag in begun])
            parts.append(self.sequence([self.up_to([trigger], form), rests]))
            parts += [
                self.sequence([*self.up_to_token(tag["begin"], text), self.tag({**tag, "begin": ""})])
                for tag in begun
                if self._is_within_token(len(trigger), tag["begin"])
            ]
        part = self.either(parts)
        if form.get("stop_after_first"):
            return part if form.get("at_least_one") else self.rule(f"{part} | {text}")
        return self.rule(f"{part}{'+' if form.get('at_least_one') else '*'} {text}")


def _kind(form: Any) -> str:
    """Return the type of a structural tag format, such as "sequence". Raises ValueError if the format has a field that
    this server does not support for the type.
    """
    kind: str = _field(_checked(form, "a format"), "type", "a format")
    for name in form.keys() - _FIELDS.get(kind, form.keys()) - {"type"}:
        if form[name] not in (None, False, [], "json"):  # values that xgrammar writes for fields that are not set
            raise ValueError(
                f"a structural tag has {name!r} in a format of type {kind!r}, which is not supported; leave it out"
            )
    return kind


def _tags(form: Any) -> list[Any]:
    """Return the tags in a structural tag format that has a list of tags, such as "triggered_tags". A tag may omit its
    field "type". Raises ValueError if an entry has another type than "tag".
    """
    tags: list[Any] = _field(form, "tags", form["type"])
    for tag in tags:
        if (kind := _kind({"type": "tag"} | _checked(tag, "a tag"))) != "tag":
            raise ValueError(
                f"a structural tag has a format of type {kind!r} among its tags, but only tags are allowed there"
            )
    return tags


def _checked(form: Any, what: str) -> dict[str, Any]:
    """Check a part of a structural tag, and return it unchanged. `what` names the part in error messages. Raises
    ValueError if the part is no JSON object or has fields of wrong types.
    """
    if not isinstance(form, dict):
        raise ValueError(f"{what} must be a JSON object, but is {form!r:.80}")
    for name, value in form.items():
        is_legal, expected = _TYPES.get(name, (lambda _: True, ""))
        if not is_legal(value):
            raise ValueError(f"a structural tag has {value!r:.80} as {name}, which must be {expected}")
    return form


def _field(form: dict[str, Any], name: str, what: str) -> Any:
    if name not in form:
        raise ValueError(f"{what} in a structural tag has no {name!r}; add it")
    return form[name]


def _quoted(text: str) -> str:
    return json.dumps(text)


def _regex(pattern: str) -> str:
    """Return a regular expression in Lark's syntax: between slashes, with the slashes in the expression escaped."""
    return "/" + re.sub(r"(\\.)|/", lambda found: found[1] or r"\/", pattern, flags=re.DOTALL) + "/"
