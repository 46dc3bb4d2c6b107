"""Reduces sessions of coding agents to the size of a small model, as entries of a trace file.

Tokens and seconds are divided by one number N, so that a worker with the same rates has the same load. A block of 64
tokens becomes a block of 64 / N tokens. Block ids do not change, so prompts share the same prefixes as before.
"""

import json
import random
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

BLOCK_SIZE = 64
# Parameters of random sessions, in tokens and seconds.
FIRST_PROMPTS, MEAN_GROWTH, MEAN_OUTPUT, MEAN_THINK_S = (15_000, 100_000), 1_200, 400, 20.0
SHARE_OF_EDITS = 0.1  # share of requests whose prompt has lost a part of its end

Session = dict[str, Any]  # a line of a trace file


@dataclass(frozen=True, slots=True)
class Reduction:
    """The reduction of sessions. Limits are in tokens and seconds after the reduction."""

    factor: int
    max_requests: int  # per session
    max_context: int  # of prompt and output together; a session ends before it exceeds this
    max_output: int
    max_think_s: float


def reduce_session(session: Session, reduction: Reduction) -> Session:
    """Reduce a session. The result has no requests if the first one is too long.

    Raises ValueError if the factor does not divide the block size.
    """
    factor = reduction.factor
    if session["block_size"] % factor:
        raise ValueError(f"the block size {session['block_size']} is not a multiple of the factor {factor}")
    requests: list[dict[str, Any]] = []
    for request in session["requests"][: reduction.max_requests]:
        num_prompt = max(1, request["input"] // factor)
        num_output = min(max(1, round(request["output"] / factor)), reduction.max_output)
        if num_prompt + num_output > reduction.max_context:
            break
        think_s = min((request["think_s"] or 0.0) / factor, reduction.max_think_s)
        requests.append({"think_s": think_s, "input": num_prompt, "output": num_output, "blocks": request["blocks"]})
    return {"session": session["session"], "block_size": session["block_size"] // factor, "requests": requests}


def reduce_sessions(sessions: Iterable[Session], reduction: Reduction, num_sessions: int) -> list[Session]:
    """Return the first reduced sessions that have at least two requests, in their order."""
    found: list[Session] = []
    for session in sessions:
        reduced = reduce_session(session, reduction)
        if len(reduced["requests"]) > 1:
            found.append(reduced)
        if len(found) == num_sessions:
            break
    return found


def random_session(seed: str, num_requests: int) -> Session:
    """Return a session whose prompts grow and sometimes lose a part of their end. Thinking times are geometric."""
    rng = random.Random(seed)
    num_tokens, runs, last_id = rng.randint(*FIRST_PROMPTS), list[list[int]](), 0
    requests = []
    for index in range(num_requests):
        if index:
            if rng.random() < SHARE_OF_EDITS:
                num_tokens = _lose_end(runs, rng.randint(1, max(1, runs[-1][1] - 1)))
            num_tokens += requests[-1]["output"] + _geometric(rng, MEAN_GROWTH)
        num_new = num_tokens // BLOCK_SIZE - sum(count for _, count in runs)
        if num_new > 0:
            runs.append([last_id + 1, num_new])
            last_id += num_new
        requests.append(
            {
                "think_s": float(_geometric(rng, MEAN_THINK_S)) if index else 0.0,
                "input": num_tokens,
                "output": _geometric(rng, MEAN_OUTPUT),
                "blocks": [list(run) for run in runs],
            }
        )
    return {"session": seed, "block_size": BLOCK_SIZE, "requests": requests}


def write_sessions(path: Path, sessions: Sequence[Session]) -> None:
    path.write_text("".join(json.dumps(session) + "\n" for session in sessions), encoding="utf-8")


def _lose_end(runs: list[list[int]], num_blocks: int) -> int:
    """Remove blocks from the last run. Return the number of remaining tokens."""
    runs[-1][1] -= min(num_blocks, runs[-1][1] - 1)
    return sum(count for _, count in runs) * BLOCK_SIZE


def _geometric(rng: random.Random, mean: float) -> int:
    """Draw the number of trials until the first success, with a success probability of 1 / mean."""
    return 1 + int(rng.expovariate(1 / mean))
