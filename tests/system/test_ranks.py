"""Two ranks of a worker as processes, which share a model and communicate over gloo: the tokens survive any crash."""

import asyncio
import os
import signal
import socket
import time

import pytest

from pagewire import AsyncClient, SamplingParams
from pagewire.hosting.supervisor import free_port
from testing import oracle, services
from testing.checkpoints.families import FIRST_FAMILIES, make_checkpoint
from testing.forked import running
from testing.parity import assert_logprobs, generate_all, tokens_of
from testing.streams import Progress, requests_of, run_streams, run_while_ending, until_connected, until_lost
from tests.thorough import thorough

FLOAT32 = ["--dtype", "float32"]
PROMPTS = oracle.random_prompts(41, 151, (1, 16, 17, 64, 100, 300))
VARIANTS = [
    ("llama", {"num_key_value_heads": 1, "tie_word_embeddings": True}),  # both ranks store the KV head
    # test_tensor_parallel.py tests all families.
    *thorough(*((family, {}) for family in (*FIRST_FAMILIES, "olmo2", "gpt_neox", "bloom"))),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("ranks") / "model", "qwen3", seed=42)


@pytest.mark.parametrize(("family", "overrides"), VARIANTS)
async def test_greedy_float32_is_what_transformers_generates(tmp_path, family, overrides):
    path = make_checkpoint(tmp_path / "model", family, seed=43, **overrides)
    model = oracle.load(path)
    with running(path, worker=[*FLOAT32, "--max-num-batched-tokens", 64], num_ranks=2) as system:
        completions = await generate_all(system.url, PROMPTS, 24)
    assert tokens_of(completions) == [oracle.greedy(model, prompt, 24) for prompt in PROMPTS]
    assert_logprobs(model, PROMPTS, completions)


async def test_samples_are_those_of_one_rank_with_blocks_that_move(model):
    """Seeded samples and beams run in a pool so small that requests are swapped on every rank."""
    requests = requests_of(44, 151, num_requests=16)
    pool = ["--num-device-blocks", 40, "--num-host-blocks", 100]
    beams = SamplingParams(beam_width=3, n=3, max_tokens=20, ignore_eos=True)
    tokens, found = [], []
    for num_ranks in (1, 2):
        flags = {"worker": [*FLOAT32, *pool], "scheduler": ["--preemption", "swap"]}
        with running(model, num_ranks=num_ranks, **flags) as system:
            async with AsyncClient(system.url) as client:
                tokens.append(await run_streams(client, requests))
                search = await client.complete(None, beams, prompt_token_ids=PROMPTS[2])
                found.append([output.token_ids for output in search.outputs])
                loads = await client.loads()
        assert loads.num_moved_blocks_out > 0
        assert loads.num_worker_losses == 0
    assert tokens[0] == tokens[1]
    assert found[0] == found[1]


async def test_streams_go_on_when_ranks_are_killed(model):
    """Either rank is killed, including the rank that hosts the store for both. They reconnect in a new epoch."""
    requests = requests_of(45, 151, num_requests=16, max_tokens=(100, 150))
    with running(model, worker=FLOAT32, num_ranks=2) as system:
        async with AsyncClient(system.url) as client:
            calm = await run_streams(client, requests)
            runs, _ = await run_while_ending(system, client, requests, (1, 0, 1, 0), run_streams)
            loads = await client.loads()
    assert all(served == calm for served in runs)
    assert loads.num_worker_losses == 4
    assert loads.num_held_blocks == 0


@pytest.mark.thorough
async def test_ranks_that_restart_in_order_end_with_0(model):
    requests = requests_of(46, 151, num_requests=8, max_tokens=(100, 150))
    with running(model, worker=FLOAT32, num_ranks=2) as system:
        async with AsyncClient(system.url) as client:
            calm = await run_streams(client, requests)
            runs, _ = await run_while_ending(system, client, requests, (0, 1), run_streams, kills=False)
            assert all(served == calm for served in runs)


@pytest.mark.alone
@pytest.mark.parametrize(("rank", "returns"), [(0, True), (1, False)])
async def test_a_stopped_rank_ends_the_epoch(model, rank, returns):
    """The other rank waits in the middle of a step, until the stopped one continues or its connections close."""
    requests = requests_of(47, 151, num_requests=8)
    with running(model, worker=FLOAT32, num_ranks=2, scheduler=["--worker-timeout", 60]) as system:
        async with AsyncClient(system.url) as client:
            calm = await run_streams(client, requests)
            progress = Progress()
            streams = asyncio.create_task(run_streams(client, requests, progress))
            await progress.until(100)
            system.workers[rank].send_signal(signal.SIGSTOP)
            stopped_at = time.monotonic()
            await until_connected(client, False)
            assert time.monotonic() - stopped_at <= 4.0
            if returns:
                system.workers[rank].send_signal(signal.SIGCONT)
            else:
                system.workers[rank].kill()
                system.restart_worker(rank)
            assert await streams == calm
            assert (await client.loads()).num_worker_losses == 1


async def test_serve_starts_every_rank_and_again_when_it_dies(model):
    flags = ["--port", 0, "--metrics-port", 0, "--tensor-parallel-size", 2, *FLOAT32, "--log-level", "error"]
    service = services.Service("serve", [model, *flags])
    sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = oracle.greedy(oracle.load(model), PROMPTS[2], 20)
    try:
        async with AsyncClient(service.wait_until_ready()) as client:
            first = await client.complete(None, sampling, prompt_token_ids=PROMPTS[2])
            ranks = services.children_of(service.pid)
            assert len(ranks) == 2
            os.kill(ranks[1], signal.SIGKILL)
            await until_lost(client, 1)
            again = await client.complete(None, sampling, prompt_token_ids=PROMPTS[2])
        assert list(first.outputs[0].token_ids) == list(again.outputs[0].token_ids) == expected
        ranks = services.children_of(service.pid)
        assert len(ranks) == 2
    finally:
        assert service.stop() == 0
    assert not [pid for pid in ranks if services.is_alive(pid)]


def free_ports_in_a_row(count: int) -> int:
    """Return the first of `count` consecutive free ports."""
    while True:
        first = free_port(services.HOST)
        try:
            sockets = [socket.create_server((services.HOST, first + offset)) for offset in range(count)]
        except OSError:
            continue
        for listening in sockets:
            listening.close()
        return first


@pytest.mark.thorough
async def test_a_worker_starts_its_ranks_and_all_of_them_again_when_one_dies(model):
    """The ranks use consecutive ports, as in one pod with several GPUs."""
    port = free_ports_in_a_row(2)
    flags = ["--model", model, "--port", port, "--tensor-parallel-size", 2, *FLOAT32, "--log-level", "error"]
    addresses = f"{services.HOST}:{port},{services.HOST}:{port + 1}"
    sampling = SamplingParams(temperature=0, max_tokens=20, ignore_eos=True)
    expected = oracle.greedy(oracle.load(model), PROMPTS[2], 20)
    link = ["--worker", addresses, "--model", model, "--port", 0, "--metrics-port", 0]
    worker = services.Service("worker", flags)
    scheduler = services.Service("scheduler", [*link, "--log-level", "error"])
    try:
        assert worker.wait_until_ready() == f"{services.HOST}:{port}"
        async with AsyncClient(scheduler.wait_until_ready()) as client:
            first = await client.complete(None, sampling, prompt_token_ids=PROMPTS[2])
            before = services.children_of(worker.pid)
            assert len(before) == 2
            os.kill(before[1], signal.SIGKILL)
            await until_lost(client, 1)
            again = await client.complete(None, sampling, prompt_token_ids=PROMPTS[2])
        assert list(first.outputs[0].token_ids) == list(again.outputs[0].token_ids) == expected
        after = services.children_of(worker.pid)
        assert len(after) == 2
        assert not {*before} & {*after}, "the one that lived was started again, too"
    finally:
        exit_codes = [scheduler.stop(), worker.stop()]
    assert exit_codes == [0, 0]
    assert not [pid for pid in after if services.is_alive(pid)]


def test_a_worker_whose_ranks_cannot_start_gives_up(tmp_path):
    flags = ["--model", str(tmp_path), "--port", str(free_ports_in_a_row(2)), "--tensor-parallel-size", "2"]
    worker = services.start_process(["worker", *flags])
    try:
        assert worker.wait(120) != 0
    finally:
        worker.kill()
        worker.wait()
        worker.stdout.close()
