"""The gateway's process: `python -m pagewire.hosting.gateway_process URL FLAGS_OF_SMG...`. It ends with its parent."""

import http.client
import json
import os
import sys
import threading
import time
import urllib.request
from typing import Any
from urllib.parse import urlsplit

from pagewire.common.process import announce_ready, exit_with_parent
from pagewire.hosting.gateway import ADMIN_KEY_VARIABLE, reachable
from pagewire.hosting.supervisor import free_port

_POLL_INTERVAL = 0.1  # seconds
_TIMEOUT = 5.0
# smg reads a stop text in a time that grows with the square of its length, half a minute for 100,000 characters, on one
# of these threads. By default there is one for each core, so that two such requests would stop everybody else's.
_NUM_THREADS = 64
# No proxy: the gateway is on this machine.
_OPENER = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def main(arguments: list[str]) -> None:
    from smg.launch_router import parse_router_args
    from smg.router import Router

    exit_with_parent()
    os.environ.setdefault("TOKIO_WORKER_THREADS", str(_NUM_THREADS))
    url, *flags = arguments
    key = os.environ.pop(ADMIN_KEY_VARIABLE, None)
    if key is not None:
        # Not on the command line, which everybody on this machine may read.
        flags.append(f"--control-plane-api-keys=serve:serve:admin:{key}")
    router = parse_router_args(flags)
    try:
        # smg takes no 0. At each start another one, should somebody have taken the last.
        router.prometheus_port = router.prometheus_port or free_port(router.prometheus_host, {router.port})
        threading.Thread(target=_announce, args=(url,), daemon=True).start()
        Router.from_args(router).start()
    except (OSError, RuntimeError) as error:
        sys.exit(f"the gateway cannot start: {error}")


def _announce(url: str) -> None:
    """Say that the gateway is ready once it can serve a request."""
    while not _is_ready(url):
        time.sleep(_POLL_INTERVAL)
    announce_ready(url)


def _is_ready(url: str) -> bool:
    """Whether the gateway has a scheduler and its tokenizer, which it loads last."""
    try:
        _fetch(url, "/readiness")
        models = json.loads(_fetch(url, "/v1/models"))["data"]
        _fetch(url, "/v1/tokenize", {"model": models[0]["id"], "prompt": "a"})
    except (OSError, http.client.HTTPException, LookupError, ValueError):
        return False
    return True


def _fetch(url: str, path: str, body: dict[str, Any] | None = None) -> bytes:
    """Fetch the body of an answer. Raises OSError, for what is no success too, and HTTPException."""
    content = None if body is None else json.dumps(body).encode()
    address = f"http://{reachable(urlsplit(url).netloc)}{path}"
    request = urllib.request.Request(address, content, {"Content-Type": "application/json"})
    with _OPENER.open(request, timeout=_TIMEOUT) as response:
        answer: bytes = response.read()
        return answer


if __name__ == "__main__":
    main(sys.argv[1:])
