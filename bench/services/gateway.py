"""Measures how much the gateway adds to the latency of the first token, and whether conversations follow their cache.

    python -m bench gateway

Latency: one replica of the bundled model and smg before it, all processes. In turns, prompts of one kind are sent to
the gateway's /v1/completions, and to VllmEngine's Generate on the scheduler's port; both connections stay open.
Conversations: two replicas; each conversation's turns are its story so far and a new sentence. They are held through
the policies `cache_aware` and `round_robin` of the gateway, with empty caches each time; what was cached is told by the
replicas' counters. Raw numbers go to bench/results/gateway.json.
"""

import argparse
import contextlib
import http.client
import json
import random
import statistics
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import grpc
from smg_grpc_proto import vllm_engine_pb2, vllm_engine_pb2_grpc
from tokenizers import Tokenizer

from bench.goals import verdict
from models.story_grammar import write_story
from pagewire.protos.gen.pagewire.scheduler.v1 import scheduler_pb2, scheduler_pb2_grpc
from testing.gateway import Gateway, send
from testing.services import System

MODEL = Path("models/storyteller")
NAME = MODEL.name
POLICIES = ("cache_aware", "round_robin")
NUM_TURNS = 5
NUM_TALKERS = 8  # conversations that wait for an answer at the same time
THINK_SECONDS = 0.05  # between an answer and the next turn
MAX_TOKENS = 32
GOAL_ADDED_MS, GOAL_HITS, GOAL_SAVED = 3.0, 0.9, 0.4


@contextlib.contextmanager
def replicas(count: int) -> Iterator[list[System]]:
    systems: list[System] = []
    flags = ["--num-device-blocks", 4096, "--num-threads", 1]
    try:
        for _ in range(count):
            systems.append(System(MODEL, worker=flags))
        yield systems
    finally:
        for system in systems:
            system.stop()


# The first token


def first_tokens(num_requests: int) -> dict[str, list[float]]:
    """Returns the seconds to the first token of each request, by arm."""
    tokenizer = Tokenizer.from_file(str(MODEL / "tokenizer.json"))
    rng = random.Random(0)
    prompts = [write_story(rng)[:120] for _ in range(num_requests)]
    seconds: dict[str, list[float]] = {"gateway": [], "direct": []}
    with replicas(1) as (system,), Gateway([system.url], "--policy=round_robin") as front:
        connection = http.client.HTTPConnection("127.0.0.1", front.port)
        with grpc.insecure_channel(system.url) as channel:
            stub = vllm_engine_pb2_grpc.VllmEngineStub(channel)
            arms = {
                "gateway": lambda prompt: ask_gateway(connection, prompt),
                "direct": lambda prompt: ask_engine(stub, tokenizer, prompt),
            }
            for i, prompt in enumerate(prompts):
                for arm in sorted(arms, reverse=bool(i % 2)):
                    start = time.perf_counter()
                    came_at = arms[arm](f"{arm} {i} {prompt}")  # no prompt is ever in the cache
                    seconds[arm].append(came_at - start)
        connection.close()
    return {arm: each[len(each) // 10 :] for arm, each in seconds.items()}  # the first ones warm up


def ask_gateway(connection: http.client.HTTPConnection, prompt: str) -> float:
    """Asks the gateway, and returns when the first token's text came."""
    body = {"model": NAME, "prompt": prompt, "max_tokens": 2, "temperature": 0, "stream": True}
    send(connection, "POST", "/v1/completions", body)
    response = connection.getresponse()
    assert response.status == 200
    while line := response.readline():
        if line.startswith(b"data: {") and json.loads(line[6:])["choices"][0]["text"]:
            break
    came_at = time.perf_counter()
    response.read()
    return came_at


def ask_engine(stub: vllm_engine_pb2_grpc.VllmEngineStub, tokenizer: Tokenizer, prompt: str) -> float:
    """Asks the scheduler's engine, and returns when the first token came."""
    sampling = vllm_engine_pb2.SamplingParams(max_tokens=2, temperature=0)
    tokenized = vllm_engine_pb2.TokenizedInput(input_ids=tokenizer.encode(prompt).ids)
    request = vllm_engine_pb2.GenerateRequest(tokenized=tokenized, sampling_params=sampling, stream=True)
    responses = stub.Generate(request)
    assert next(responses).chunk.token_ids
    came_at = time.perf_counter()
    for _ in responses:
        pass
    return came_at


# Conversations


def converse(num_conversations: int, policy: str) -> dict[str, float]:
    rng = random.Random(1)
    stories = [[f"{write_story(rng)[:300]} " for _ in range(NUM_TURNS)] for _ in range(num_conversations)]
    with replicas(2) as systems, Gateway([system.url for system in systems], f"--policy={policy}") as front:
        outcomes: list[tuple[int, int]] = []  # prompt tokens of a follow-up, and how many of them were cached

        def hold(story: list[str]) -> None:
            text = ""
            for turn, sentence in enumerate(story):
                text += sentence
                answer = front.post("/v1/completions", model=NAME, prompt=text, max_tokens=MAX_TOKENS, temperature=0)
                assert answer.status == 200, answer
                if turn:
                    outcomes.append((answer.body["usage"]["prompt_tokens"], answer.num_cached_tokens))
                text += answer.text
                time.sleep(THINK_SECONDS)

        with ThreadPoolExecutor(NUM_TALKERS) as pool:
            list(pool.map(hold, stories))
        loads = [loads_of(system) for system in systems]
    num_prompt_tokens = sum(load.num_prompt_tokens for load in loads)
    return {
        "followups": len(outcomes),
        "hits": sum(num_cached >= num_tokens // 2 for num_tokens, num_cached in outcomes) / len(outcomes),
        "prompt_tokens": num_prompt_tokens,
        "computed": num_prompt_tokens - sum(load.num_cached_prompt_tokens for load in loads),
        "least_share": min(load.num_prompt_tokens for load in loads) / num_prompt_tokens,
    }


def loads_of(system: System) -> scheduler_pb2.GetLoadsResponse:
    with grpc.insecure_channel(system.url) as channel:
        return scheduler_pb2_grpc.SchedulerServiceStub(channel).GetLoads(scheduler_pb2.GetLoadsRequest())


def measure(arguments: argparse.Namespace) -> dict:
    seconds = first_tokens(arguments.requests)
    p50 = {arm: 1000 * statistics.median(each) for arm, each in seconds.items()}
    talks = {policy: converse(arguments.conversations, policy) for policy in POLICIES}
    return {
        "load": {"requests": arguments.requests, "conversations": arguments.conversations, "turns": NUM_TURNS},
        "first_token_ms_p50": p50,
        "added_ms_p50": p50["gateway"] - p50["direct"],
        "conversations": talks,
        "saved": 1 - talks["cache_aware"]["computed"] / talks["round_robin"]["computed"],
        "first_token_seconds": seconds,
    }


def report(figures: dict) -> None:
    p50, added = figures["first_token_ms_p50"], figures["added_ms_p50"]
    print(f"first token, p50: {p50['gateway']:.2f} ms through the gateway, {p50['direct']:.2f} ms direct")
    print(f"  added: {added:.2f} ms {verdict(added, GOAL_ADDED_MS, at_least=False)}")
    for policy, talks in figures["conversations"].items():
        print(f"{policy}: {talks['hits']:.1%} of {talks['followups']} follow-ups landed on their prefix, ", end="")
        print(f"{talks['computed']:,} of {talks['prompt_tokens']:,} prompt tokens computed", end="")
        print(f", the replicas' shares {talks['least_share']:.0%} and {1 - talks['least_share']:.0%}")
    print(f"  landed {verdict(figures['conversations']['cache_aware']['hits'], GOAL_HITS, at_least=True)}")
    print(f"  {figures['saved']:.1%} less to compute {verdict(figures['saved'], GOAL_SAVED, at_least=True)}")


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--requests", type=int, default=400, help="first tokens of each arm (default: 400)")
    parser.add_argument("--conversations", type=int, default=100, help="conversations (default: 100)")
