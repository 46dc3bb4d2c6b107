"""The tools of the agents. Their results depend on their arguments."""

import json
from typing import Any, Literal

City = Literal["Oslo", "Rome", "Lima"]
NUM_CALLS = 50
# This many calls of a conversation fit the model's context.
CALLS_A_CONVERSATION = 10
QUESTION = "Once there was a brave turtle who asked for the weather."


def forecast(city: City, days: Literal[1, 2, 3]) -> str:
    """Tell the weather of a city."""
    _print("forecast", city=city, days=days)
    return f"{len(city) * days} degrees"


def remember(word: Literal["sun", "rain"]) -> str:
    """Keep a word."""
    _print("remember", word=word)
    return word


def _print(name: str, **arguments: Any) -> None:
    print(json.dumps([name, arguments]), flush=True)
