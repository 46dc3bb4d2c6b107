"""Runs both services where only one address family exists: `python -m tests.contract.one_family 4|6`.

`test_address_families.py` runs it in a separate network namespace, where all ports are free.
"""

import asyncio
import contextlib
import socket
import subprocess
import sys
import tempfile
import urllib.request
from pathlib import Path

from pagewire import AsyncClient
from pagewire.common.wire.transport.addresses import join
from scheduler_service import front_end
from scheduler_service.config import FrontEndConfig
from testing.scheduler_stack import expected_tokens, make_checkpoint, serve

ADDRESSES = {"4": "10.1.2.3", "6": "fd00:1::1"}
PROMPT = [5, 6, 7, 8, 9]
EVERYWHERE = "::"
DISABLE_IPV6 = Path("/proc/sys/net/ipv6/conf/all/disable_ipv6")


def set_up(family: str) -> str:
    """Configure loopback and the namespace's only address. Return the address."""
    subprocess.run(["ip", "link", "set", "lo", "up"], check=True)
    if family == "4" and DISABLE_IPV6.exists():
        DISABLE_IPV6.write_text("1")
        with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
            raise AssertionError("there is an address of IPv6")
    flags = ["nodad"] if family == "6" else []
    subprocess.run(["ip", "addr", "add", ADDRESSES[family], "dev", "lo", *flags], check=True)
    return ADDRESSES[family]


def fetch(host: str, port: int, path: str) -> str:
    with urllib.request.urlopen(f"http://{join(host, port)}{path}", timeout=10) as response:
        return response.read().decode()


async def check_tokens(host: str, port: int) -> None:
    async with AsyncClient(join(host, port)) as client:
        completion = await client.complete(prompt_token_ids=PROMPT, temperature=0, seed=0, max_tokens=4, timeout=60)
        assert list(completion.outputs[0].token_ids) == expected_tokens(PROMPT, 4)


async def check_front_end(checkpoint: Path, host: str) -> None:
    config = FrontEndConfig(
        model=str(checkpoint),
        scheduler=join(host, 50051),
        host=EVERYWHERE,
        port=50052,
        metrics_host=EVERYWHERE,
        metrics_port=9091,
    )
    stop, url = asyncio.Event(), asyncio.get_running_loop().create_future()
    running = asyncio.create_task(front_end.run(config, stop=stop, ready=url.set_result))
    try:
        await asyncio.wait_for(url, 60)
        await check_tokens(host, 50052)
        assert "pagewire:" in await asyncio.to_thread(fetch, host, 9091, "/metrics")
    finally:
        stop.set()
        await running


async def main(host: str) -> None:
    with tempfile.TemporaryDirectory() as directory:
        checkpoint = make_checkpoint(Path(directory) / "tiny")
        everywhere = {"host": EVERYWHERE, "port": 50051, "metrics_host": EVERYWHERE, "metrics_port": 9090}
        async with serve(checkpoint, **everywhere):
            await check_tokens(host, 50051)
            assert "vllm:" in await asyncio.to_thread(fetch, host, 9090, "/metrics")
            await check_front_end(checkpoint, host)
    print(f"all of them answer at {host}")


if __name__ == "__main__":
    asyncio.run(main(set_up(sys.argv[1])))
