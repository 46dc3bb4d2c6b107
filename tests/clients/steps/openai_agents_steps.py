"""openai-agents' first steps, run in its own environment: an agent with a tool, over both of OpenAI's APIs."""

import asyncio
import os

from agents import (
    Agent,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

HELLO = "Hello, here is a short text of a model that follows a script."
CLIENT = AsyncOpenAI(base_url=f"{os.environ['SERVER']}/v1", api_key="none", max_retries=0)
set_tracing_disabled(True)


class Person(BaseModel):
    name: str
    age: int


@function_tool
def weather(city: str) -> str:
    """Weather of a city."""
    return f"sun in {city}"


async def main() -> None:
    for kind in (OpenAIChatCompletionsModel, OpenAIResponsesModel):
        model = kind(model="chatty", openai_client=CLIENT)
        agent = Agent(name="helper", instructions="Be brief.", model=model, tools=[weather])
        result = await Runner.run(agent, "hi")
        assert result.final_output == HELLO, result
        result = await Runner.run(agent, "What is the weather in 'Oslo'?")
        assert result.final_output == "The result is sun in Oslo.", result
        question = {"role": "user", "content": "And the weather in 'Rome'?"}
        result = await Runner.run(agent, [*result.to_input_list(), question])
        assert result.final_output == "The result is sun in Rome.", result
        streamed = Runner.run_streamed(agent, "What is the weather in 'Oslo'?")
        num_events = len([event async for event in streamed.stream_events()])
        assert (streamed.final_output, num_events > 10) == ("The result is sun in Oslo.", True)
        typed = await Runner.run(Agent(name="typed", model=model, output_type=Person), "hi")
        assert isinstance(typed.final_output, Person), typed
        other = Agent(name="Weather expert", handoff_description="Knows weather.", model=model, tools=[weather])
        first = Agent(name="first", model=model, handoffs=[other])
        result = await Runner.run(first, "Transfer me.")
        assert result.last_agent is other, result
        print(f"passed {kind.__name__}")


asyncio.run(main())
