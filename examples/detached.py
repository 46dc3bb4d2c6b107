"""Submits a detached request, disconnects, and reads the result later from other clients.

pagewire serve models/storyteller
python examples/detached.py [HOST:PORT]
"""

import asyncio
import sys

from pagewire import AsyncClient, PagewireError, SamplingParams


async def submit(url: str) -> str:
    async with AsyncClient(url) as client:
        return await client.submit("Once upon a time", SamplingParams(temperature=0, max_tokens=40, ignore_eos=True))


async def read_some(url: str, request_id: str, num_tokens: int) -> tuple[int, str]:
    """Read until at least `num_tokens` tokens have arrived. Return the number of tokens and their text."""
    count, text = 0, ""
    async with AsyncClient(url) as client:
        async for output in client.attach(request_id):
            count, text = count + len(output.token_ids), text + output.text
            if count >= num_tokens:
                break
    return count, text


async def read_on(url: str, request_id: str, from_token: int) -> str:
    async with AsyncClient(url) as client:
        return "".join([output.text async for output in client.attach(request_id, from_token=from_token)])


async def main(url: str) -> None:
    request_id = await submit(url)
    print(f"submitted {request_id}; this client is gone now")
    count, text = await read_some(url, request_id, 10)
    print(f"a second client read {count} tokens: {text!r}")
    print(f"a third one reads on from token {count}: {await read_on(url, request_id, count)!r}")
    async with AsyncClient(url) as client:
        result = await client.result(request_id)
    print(f"all of it ({result.state}): {result.outputs[0].text!r}")


if __name__ == "__main__":
    try:
        asyncio.run(main(sys.argv[1] if len(sys.argv) > 1 else "127.0.0.1:50051"))
    except PagewireError as error:
        sys.exit(f"{error.code.name}: {error}")
