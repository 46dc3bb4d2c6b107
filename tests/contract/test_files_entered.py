"""How many files a request enters on its way, in client and scheduler: as many as a reader must open to follow it."""

import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from pagewire import AsyncClient, SamplingParams
from testing.scheduler_stack import serve
from tests.project.sources import ROOT

PRODUCT = tuple(f"{ROOT}/{folder}/" for folder in ("pagewire", "common", "scheduler_service"))
MAX_FILES_OF_A_TOKEN = 42
MAX_FILES_OF_A_REQUEST = 59  # of which `turns.py` is what all work on texts waits in


@contextmanager
def entered() -> Iterator[set[str]]:
    """The product's files of which a function is called inside the block, in whichever thread."""
    files: set[str] = set()

    def called(frame: FrameType, event: str, _: object) -> None:
        name = frame.f_code.co_filename
        if event == "call" and name.startswith(PRODUCT) and "/gen/" not in name:
            files.add(name.removeprefix(f"{ROOT}/"))

    before = sys.getprofile()
    threading.setprofile(called)
    sys.setprofile(called)
    try:
        yield files
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


async def test_a_request_enters_few_files(checkpoint: Path) -> None:
    """Of several requests those that each enters: timers of the server enter some at any time."""
    sampling = SamplingParams(max_tokens=60, temperature=0.5, seed=1, ignore_eos=True)
    requests, tokens = [], []
    async with serve(checkpoint) as stack, AsyncClient(stack.url) as client:
        await client.complete("once", sampling)  # what is done once is done
        stack.worker.step_seconds = 0.005
        for prompt in ("once upon", "a little", "hello"):
            with entered() as beginning:
                stream = client.stream(prompt, sampling)
                for _ in range(10):
                    await anext(stream)
            with entered() as steady:
                for _ in range(20):
                    await anext(stream)
            with entered() as end:
                async for _ in stream:
                    pass
            requests.append(beginning | steady | end)
            tokens.append(steady)
    of_request, of_token = set.intersection(*requests), set.intersection(*tokens)
    print(*sorted(of_request), sep="\n")
    print(f"{len(of_token)} files of a token, {len(of_request)} of a request")
    assert len(of_token) <= MAX_FILES_OF_A_TOKEN
    assert len(of_request) <= MAX_FILES_OF_A_REQUEST
    assert "scheduler_service/core/scheduler.py" in of_token
    assert "scheduler_service/serving/intake.py" in of_request - of_token
