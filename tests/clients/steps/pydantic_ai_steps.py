"""pydantic-ai's first steps, run in its own environment: agents of each API with a tool and with a typed output."""

import asyncio
import os

from pydantic import BaseModel
from pydantic_ai import Agent
from pydantic_ai.models.anthropic import AnthropicModel
from pydantic_ai.models.ollama import OllamaModel
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel
from pydantic_ai.providers.anthropic import AnthropicProvider
from pydantic_ai.providers.ollama import OllamaProvider
from pydantic_ai.providers.openai import OpenAIProvider

SERVER = os.environ["SERVER"]
HELLO = "Hello, here is a short text of a model that follows a script."
OPENAI = OpenAIProvider(base_url=f"{SERVER}/v1", api_key="none")
MODELS = [
    OpenAIChatModel("chatty", provider=OPENAI),
    OpenAIResponsesModel("chatty", provider=OPENAI),
    OllamaModel("chatty", provider=OllamaProvider(base_url=f"{SERVER}/v1")),
    AnthropicModel("chatty", provider=AnthropicProvider(base_url=SERVER, api_key="none")),
]


class Person(BaseModel):
    name: str
    age: int


async def steps(model: object) -> None:
    agent = Agent(model, instructions="Be brief.")

    @agent.tool_plain
    def weather(city: str) -> str:
        """Weather of a city."""
        return f"sun in {city}"

    result = await agent.run("hi")
    assert result.output == HELLO, result
    assert result.usage.output_tokens > 0, result.usage
    result = await agent.run("What is the weather in 'Oslo'?")
    assert result.output == "The result is sun in Oslo.", result
    again = await agent.run("And the weather in 'Rome'?", message_history=result.all_messages())
    assert again.output == "The result is sun in Rome.", again
    async with agent.run_stream("What is the weather in 'Oslo'?") as streamed:
        texts = [text async for text in streamed.stream_text(delta=True, debounce_by=None)]
    assert "".join(texts) == "The result is sun in Oslo.", texts
    typed = await Agent(model, output_type=Person).run("hi")
    assert isinstance(typed.output, Person), typed


async def main() -> None:
    for model in MODELS:
        await steps(model)
        print(f"passed {type(model).__name__}")


asyncio.run(main())
