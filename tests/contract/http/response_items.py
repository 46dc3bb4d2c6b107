"""Helpers for tests of `/v1/responses`: sample requests, and the output items of a response."""

from typing import Any

from openai.types.responses import Response

from tests.contract.http.scripted import WEATHER

PATH = "/v1/responses"
TOOLS = [
    {"type": "function", "name": "weather", "description": "Tells.", "parameters": WEATHER, "strict": True},
    {"type": "function", "name": "now"},
]


def items(response: Response) -> list[tuple[Any, ...]]:
    """Return the output items of a response without their ids, as tuples of the item type and its content."""
    told: list[tuple[Any, ...]] = []
    for item in response.output:
        match item.type:
            case "message":
                told.append(("message", "".join(getattr(part, "text", "") for part in item.content)))
            case "reasoning":
                told.append(("reasoning", "".join(part.text for part in item.content or ())))
            case "function_call":
                told.append(("function_call", item.name, item.arguments))
            case "custom_tool_call":
                told.append(("custom_tool_call", item.name, item.input))
    return told
