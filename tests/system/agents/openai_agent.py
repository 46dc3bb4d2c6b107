"""An agent of openai-agents, over one of OpenAI's APIs.

    python -m tests.system.agents.openai_agent {chat,responses,stored} URL {whole,streamed}

`stored` uses the responses API and sends only the newest items of the conversation.
"""

import asyncio
import sys
from typing import Any

from agents import (
    Agent,
    MaxTurnsExceeded,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    Runner,
    function_tool,
    set_tracing_disabled,
)
from openai import AsyncOpenAI

from tests.system.agents.tools import CALLS_A_CONVERSATION, NUM_CALLS, QUESTION, forecast, remember

_MODELS = {"chat": OpenAIChatCompletionsModel, "responses": OpenAIResponsesModel, "stored": OpenAIResponsesModel}


async def main(api: str, url: str, how: str) -> None:
    set_tracing_disabled(True)
    client = AsyncOpenAI(base_url=f"{url}/v1", api_key="none", timeout=60, max_retries=0)
    model: Model = _MODELS[api]("tooled", client)
    for seed in range(NUM_CALLS // CALLS_A_CONVERSATION):
        agent = Agent(
            "weather",
            tools=[function_tool(forecast), function_tool(remember)],
            model=model,
            model_settings=ModelSettings(
                temperature=1,
                max_tokens=100,
                tool_choice="required",
                parallel_tool_calls=False,
                store=api == "stored",
                extra_body={"seed": seed},
            ),
            reset_tool_choice=False,
        )
        options: dict[str, Any] = {"max_turns": CALLS_A_CONVERSATION, "auto_previous_response_id": api == "stored"}
        try:
            if how == "streamed":
                async for _ in Runner.run_streamed(agent, QUESTION, **options).stream_events():
                    pass
            else:
                await Runner.run(agent, QUESTION, **options)
        except MaxTurnsExceeded:
            continue
        raise AssertionError("an answer came where a call is required")


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
