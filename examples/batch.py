"""Completes every line of a file and writes a JSON object per line, in the order of the input.

    pagewire serve models/storyteller
    python examples/batch.py prompts.txt completions.jsonl [HOST:PORT]

At most MAX_IN_FLIGHT requests run at the same time. If the server's queue is full, it refuses the request and names a
delay. The script then sends the request again after the delay. Any other error is written in place of the text.
"""

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path

from pagewire import AsyncClient, PagewireError, ResourceExhausted, SamplingParams

MAX_IN_FLIGHT = 64
SAMPLING = SamplingParams(temperature=0, max_tokens=32)


async def complete(client: AsyncClient, room: asyncio.Semaphore, prompt: str) -> dict[str, object]:
    async with room:
        while True:
            try:
                completion = await client.complete(prompt, SAMPLING)
            except ResourceExhausted as error:
                await asyncio.sleep(error.retry_delay or 1.0)
            except PagewireError as error:
                return {"prompt": prompt, "error": f"{error.code.name}: {error}"}
            else:
                output = completion.outputs[0]
                return {"prompt": prompt, "text": output.text, "finish_reason": output.finish_reason}


async def complete_all(prompts: Sequence[str], url: str) -> list[dict[str, object]]:
    room = asyncio.Semaphore(MAX_IN_FLIGHT)
    async with AsyncClient(url) as client:
        return await asyncio.gather(*(complete(client, room, prompt) for prompt in prompts))


def main(source: Path, target: Path, url: str) -> int:
    """Complete all prompts and return the number of prompts that failed."""
    prompts = [line for line in source.read_text(encoding="utf-8").splitlines() if line.strip()]
    results = asyncio.run(complete_all(prompts, url))
    target.write_text("".join(json.dumps(result) + "\n" for result in results), encoding="utf-8")
    num_failed = sum("error" in result for result in results)
    print(f"{len(results)} prompts, {num_failed} failed: {target}")
    return num_failed


if __name__ == "__main__":
    if len(sys.argv) not in (3, 4):
        sys.exit(f"usage: {sys.argv[0]} PROMPTS.txt COMPLETIONS.jsonl [HOST:PORT]")
    url = sys.argv[3] if len(sys.argv) == 4 else "127.0.0.1:50051"
    sys.exit(1 if main(Path(sys.argv[1]), Path(sys.argv[2]), url) else 0)
