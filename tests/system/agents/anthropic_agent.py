"""The tool-running loop of Anthropic's client.

The command is `python -m tests.system.agents.anthropic_agent URL {whole,streamed}`.
"""

import sys

from anthropic import Anthropic, beta_tool
from anthropic.lib.streaming import BetaMessageStream

from tests.system.agents.tools import CALLS_A_CONVERSATION, NUM_CALLS, QUESTION, forecast, remember


def main(url: str, how: str) -> None:
    client = Anthropic(base_url=url, api_key="none", timeout=60, max_retries=0)
    for seed in range(NUM_CALLS // CALLS_A_CONVERSATION):
        runner = client.beta.messages.tool_runner(
            model="tooled",
            max_tokens=100,
            messages=[{"role": "user", "content": QUESTION}],
            tools=[beta_tool(forecast), beta_tool(remember)],
            tool_choice={"type": "any", "disable_parallel_tool_use": True},
            max_iterations=CALLS_A_CONVERSATION,
            stream=how == "streamed",
            extra_body={"seed": seed},
        )
        for answer in runner:
            message = answer.get_final_message() if isinstance(answer, BetaMessageStream) else answer
            assert message.stop_reason == "tool_use", message


if __name__ == "__main__":
    main(*sys.argv[1:])
