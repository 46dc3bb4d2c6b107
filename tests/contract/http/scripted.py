"""A model that generates a given text, and whose chat template supports tool calls and reasoning."""

from collections.abc import Callable
from pathlib import Path

from testing.serving.http_server import make_chat_checkpoint

# Makes the model generate a text, whatever the prompt is.
Say = Callable[[str], None]
TEMPLATE = (
    "{% for tool in tools or [] %}{{ tool.function.name }},{% endfor %}"
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}"
    "{% for call in message.tool_calls %}<tool_call>{{ call.function.arguments | tojson }}</tool_call>{% endfor %}"
    "{% endfor %}{% if add_generation_prompt %}<assistant>{% if thinks %}<think>\n{% endif %}{% endif %}"
    "{# <think> </think> #}"
)
WEATHER = {"type": "object", "properties": {"city": {"enum": ["Oslo", "Rome"]}}, "required": ["city"]}
CALL = '<tool_call>\n{"name": "weather", "arguments": {"city": "Oslo"}}\n</tool_call>'
SECOND = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'


def make_tool_checkpoint(path: Path, *, max_model_len: int = 256) -> Path:
    """Write a checkpoint with tool calls and reasoning, and a second template named `plain` without either."""
    make_chat_checkpoint(path, max_model_len=max_model_len, plain="{{ messages[0].content }}")
    (path / "chat_template.jinja").write_text(TEMPLATE)
    return path
