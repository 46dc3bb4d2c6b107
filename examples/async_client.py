"""Streams several completions at the same time from one asyncio program.

pagewire serve models/storyteller
python examples/async_client.py [HOST:PORT]
"""

import asyncio
import sys

from pagewire import AsyncClient, PagewireError, SamplingParams

PROMPTS = ("Once upon a time", "The little fox", "One rainy day")
SAMPLING = SamplingParams(temperature=0, max_tokens=24)


async def stream(client: AsyncClient, prompt: str) -> str:
    """Print the output as it arrives, and return the complete text."""
    text = ""
    async for output in client.stream(prompt, SAMPLING):
        text += output.text
        print(f"{prompt!r} +{output.text!r}")
    return text


async def main(url: str) -> None:
    async with AsyncClient(url) as client:
        info = await client.info()
        print(f"{info.served_model_name} at {url}")
        texts = await asyncio.gather(*(stream(client, prompt) for prompt in PROMPTS))
    for prompt, text in zip(PROMPTS, texts, strict=True):
        print(f"{prompt}{text}")


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"))
    except PagewireError as error:
        sys.exit(f"{error.code.name}: {error}")
