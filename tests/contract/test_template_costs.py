"""The cost of preparing a conversation for its template: it is linear in each length, and no state is
kept afterwards.
"""

import tracemalloc
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest

from pagewire.common.chat.chat_template import ChatTemplateError, render, without_suffix
from tests.growth import check_costs, check_growth

TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
# The template renders lists of content parts for messages of the role 'listing' only.
NAMING = (
    "{% for m in messages %}{% if m.role == 'listing' %}{% for part in m.content %}[{{ part.text }}]{% endfor %}"
    "{% else %}{{ m.content }}{% endif %}{% endfor %}"
)
# The template accepts one tool call for each message.
SINGLE = (
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls|length != 1 %}{{ raise_exception('no') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}{% endfor %}"
)
NUM_ROLES, ROLE_CHARS = 140, 100_000


def rendered(messages: list[dict[str, Any]], template: str = TEMPLATE) -> str:
    return render(template, messages, special_tokens={})


def test_nothing_is_kept_of_roles_of_clients() -> None:
    rendered([{"role": "critic", "content": "x"}])
    tracemalloc.start()
    try:
        before, _ = tracemalloc.get_traced_memory()
        for number in range(NUM_ROLES):
            role = "r" * ROLE_CHARS + str(number)
            assert rendered([{"role": role, "content": "x"}]) == f"<{role}>x"
        after, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert after - before < 5 * ROLE_CHARS


def test_roles_that_a_template_does_not_name_cost_no_trial_each() -> None:
    long = "{% for i in range(300) %}{% endfor %}" + TEMPLATE  # as if the template began with a lot of other work

    def render_roles(num_roles: int) -> str:
        return rendered([{"role": f"role {number % num_roles}", "content": "x"} for number in range(400)], long)

    check_costs("roles", lambda: partial(render_roles, 1), lambda: partial(render_roles, 400), 6)


def test_a_role_that_a_template_names_has_its_own_form() -> None:
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "y"}]
    for content in (parts, "xy"):
        listed = "[x][y]" if content == parts else "[xy]"
        assert rendered([{"role": "listing", "content": content}], NAMING) == listed
        for role in ("critic", "listings", "'listing'", "l" * 100):
            assert rendered([{"role": role, "content": content}], NAMING) == "xy"


def calls_with_results(num: int) -> list[dict[str, Any]]:
    calls = [{"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in range(num)]
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": "r"} for i in reversed(range(num))]
    return [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": calls}, *results]


def test_results_find_their_calls_at_once() -> None:
    check_growth("results", lambda num: partial(rendered, calls_with_results(num), SINGLE), 500)
    answer = [*calls_with_results(2), {"role": "tool", "tool_call_id": "other", "content": "s"}]
    assert rendered(answer, SINGLE) == "<user>q<assistant>{}<tool>r<assistant>{}<tool>r<tool>s"


@pytest.mark.parametrize(
    "content",
    [
        lambda num: "ab" + "a" * num,
        lambda num: "a" * num + "b",
        lambda num: "b" + "a" * num,
        lambda num: "a" * (num // 2) + "b" + "a" * (num // 2),
    ],
)
def test_a_last_message_is_found_at_once(content: Callable[[int], str]) -> None:
    def searching(num: int) -> Callable[[], None]:
        prompt, message = "a" * (2 * num), {"content": content(num)}

        def search() -> None:
            with pytest.raises(ChatTemplateError, match="the prompt does not contain the last message"):
                without_suffix(prompt, message)

        return search

    check_growth("a prompt", searching, 25_000)


def test_the_last_place_of_a_message_counts() -> None:
    for prompt, content, kept in (
        ("aXaXb", "X", "aXaX"),
        ("aXX", "XX ", "aXX"),
        (" x x ", " x ", " x x "),
        ("aaa", "aa", "aaa"),
    ):
        assert without_suffix(prompt, {"content": content}) == kept
