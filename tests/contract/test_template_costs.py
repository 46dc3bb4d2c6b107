"""What conversations cost before a template renders them: no product of two lengths."""

import time
from collections.abc import Callable
from typing import Any

import pytest

from pagewire.common.chat_template import ChatTemplateError, render, up_to_last

MAX_RATIO = 6  # of processor time at four times the size
TEMPLATE = "{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
# It takes one call a message.
SINGLE = (
    "{% for m in messages %}{% if m.tool_calls and m.tool_calls|length != 1 %}{{ raise_exception('no') }}{% endif %}"
    "<{{ m.role }}>{{ m.content }}"
    "{% if m.tool_calls %}{{ m.tool_calls[0].function.arguments | tojson }}{% endif %}{% endfor %}"
)


def processor_time(run: Callable[[], object]) -> float:
    """The best of three."""
    times = []
    for _ in range(3):
        began = time.process_time()
        run()
        times.append(time.process_time() - began)
    return min(times)


def rendered(messages: list[dict[str, Any]], template: str = TEMPLATE) -> str:
    return render(template, messages, special_tokens={})


def calls_with_results(num: int) -> list[dict[str, Any]]:
    calls = [{"id": f"c{i}", "type": "function", "function": {"name": "f", "arguments": "{}"}} for i in range(num)]
    results = [{"role": "tool", "tool_call_id": f"c{i}", "content": "r"} for i in reversed(range(num))]
    return [{"role": "user", "content": "q"}, {"role": "assistant", "tool_calls": calls}, *results]


def test_results_find_their_calls_at_once() -> None:
    rendered(calls_with_results(2), SINGLE)
    times = [processor_time(lambda num=num: rendered(calls_with_results(num), SINGLE)) for num in (1000, 4000)]
    assert times[1] <= MAX_RATIO * times[0], times
    answer = [*calls_with_results(2), {"role": "tool", "tool_call_id": "other", "content": "s"}]
    assert rendered(answer, SINGLE) == "<user>q<assistant>{}<tool>r<assistant>{}<tool>r<tool>s"


@pytest.mark.parametrize(
    "content", [lambda num: "ab" + "a" * num, lambda num: "a" * num + "b", lambda num: "b" + "a" * num]
)
def test_a_last_message_is_found_at_once(content: Callable[[int], str]) -> None:
    def search(num: int) -> None:
        with pytest.raises(ChatTemplateError, match="does not stand in the prompt"):
            up_to_last("a" * (2 * num), {"content": content(num)})

    times = [processor_time(lambda num=num: search(num)) for num in (50_000, 200_000)]
    assert times[1] <= MAX_RATIO * max(times[0], 1e-3), times


def test_the_last_place_of_a_message_counts() -> None:
    for prompt, content, kept in (
        ("aXaXb", "X", "aXaX"),
        ("aXX", "XX ", "aXX"),
        (" x x ", " x ", " x x "),
        ("aaa", "aa", "aaa"),
    ):
        assert up_to_last(prompt, {"content": content}) == kept
