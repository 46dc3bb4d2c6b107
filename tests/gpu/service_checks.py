"""The checks of `tests/gpu/check.py` on the whole system: scheduler and worker processes over gRPC, on a device.

transformers computes the expected results on the CPU in float32. In float32, sequences must be equal, or may diverge
where both choices are equally good within `FLOAT32_MARGIN`. In narrower types, the logit of every token must be within
a margin of the best logit.
"""

import asyncio
import importlib.util
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
import transformers
from tokenizers import Tokenizer

from pagewire import AsyncClient, SamplingParams
from pagewire.client.server_info import Loads
from testing import oracle, services
from testing.checkpoints import packed
from testing.checkpoints.families import FAMILIES, make_checkpoint
from testing.parity import (
    CASES,
    FLOAT32_MARGIN,
    STORYTELLER,
    VOCAB_SIZE,
    ParityCase,
    assert_logprobs,
    assert_the_cache_was_used,
    generate_all,
    prompts_of,
    sample_alone,
    sample_together,
    serve_twice,
    tokens_of,
)
from testing.part import Case, UnavailableError
from testing.services import System
from testing.streams import Request, requests_of, run_streams, run_with_ends

NUM_KILLS = 10
MAX_NEAR_TIES = 0.02  # the largest share of sequences that may diverge at a near tie
# In bfloat16, another order of summation rounds differently, and a near tie may be decided the other way. A token of
# the bundled model may be this far below the best logit of float32, teacher-forced.
BF16_MARGIN = 0.25
# The same margin for random weights, whose logits have a spread of several units: twice the shortfall of bfloat16 on a
# CPU. Rounding moves logits much further where it changes the choice of experts or where scores grow with positions. In
# that case, a token may be as far below the best as the worst token that transformers chooses in its place in bfloat16,
# in any of this many random roundings. The mean may be twice the mean of transformers' tokens.
RANDOM_BF16_MARGIN = 0.5
NUM_ROUNDINGS = 8
# For keys and values in 8 bits: the largest shortfall of a token, and the mean of all tokens. Both are about three
# times the shortfall of transformers with keys and values rounded in the same way. A random token would have a larger
# shortfall.
FP8_MARGIN, FP8_MEAN = 6.0, 0.15
# The shortfall on a CPU with an 8-bit cache (largest, mean), for families whose random weights amplify it, because
# experts change or scores grow with positions. A GPU may fall short by three times as much.
FP8_ON_A_CPU = {
    "ministral3": (6.10, 0.140),
    "qwen3_moe": (3.68, 0.044),
    "mixtral": (7.04, 0.159),
    "olmoe": (3.28, 0.051),
    "qwen2_moe": (8.20, 0.136),
    "glm4_moe": (3.08, 0.091),
    "gpt_oss": (3.10, 0.068),
}
# For random weights of 8 and 4 bits: twice the shortfall on a CPU (this part with `--device cpu`), which rounds inputs
# to 8 bits with a scale for each 32 of them. Inputs in FP8 are as coarse as a cache in FP8, and have the cache's
# margin.
CODES_MARGIN = 2.3
NUM_BF16_TOKENS = 60
# Head sizes that the Triton kernels support; the heads of the random checkpoints are smaller.
WIDE_HEADS: dict[str, dict[str, Any]] = {
    **{family: {"head_dim": 32} for family in FAMILIES},
    "gpt_neox": {"num_attention_heads": 2},
    "bloom": {"n_head": 2},
    "mpt": {"n_heads": 2},
    "olmoe": {"hidden_size": 128, "head_dim": 32},  # its norms cover whole projections of hidden_size
    "gpt2": {"n_embd": 128},
}
# Every family with its block sizes, and with head sizes of published models.
KERNEL_CASES = {
    "llama, 8 heads of 64, ratio 4, blocks of 16": ParityCase(
        "llama", {"hidden_size": 128, "num_attention_heads": 8, "num_key_value_heads": 2, "head_dim": 64}
    ),
    "mistral, heads of 32, window of 50, chunks of 64, blocks of 32": ParityCase(
        "mistral", {"head_dim": 32, "sliding_window": 50}, 32, {"max_num_batched_tokens": 64}
    ),
    "mistral, heads of 64, window of 200, small pool, blocks of 16": ParityCase(
        "mistral", {"head_dim": 64, "sliding_window": 200}, 16, {"num_device_blocks": 60}
    ),
    "qwen2, 4 heads of 128, ratio 4, blocks of 256": ParityCase(
        "qwen2", {"hidden_size": 128, "num_key_value_heads": 1, "head_dim": 128}, 256
    ),
    "qwen3, 4 heads of 128, ratio 2, blocks of 64": ParityCase("qwen3", {"hidden_size": 128, "head_dim": 128}, 64),
    "qwen3, heads of 32, small pool, chunks of 100, blocks of 16": ParityCase(
        "qwen3", {"head_dim": 32}, 16, {"num_device_blocks": 70, "max_num_batched_tokens": 100}
    ),
    "gpt2, heads of 32, chunks of 48, blocks of 128": ParityCase(
        "gpt2", {"n_embd": 128}, 128, {"max_num_batched_tokens": 48}
    ),
}


@dataclass(frozen=True)
class Setting:
    """The device of the services, and the directory of checkpoints."""

    device: str
    directory: Path

    @property
    def is_cuda(self) -> bool:
        return self.device == "cuda"

    def running(
        self, model: Path, *, worker: Sequence[object] = (), scheduler: Sequence[object] = (), num_ranks: int = 1
    ) -> AbstractContextManager[System]:
        """Run the services with these flags; later flags override earlier ones.

        The number of blocks is fixed, so that other services can run on the same device. The attention backend is
        fixed, so that no other backend replaces it.
        """
        attention = ["--attention-backend", "triton"] if self.is_cuda else []
        worker = ["--device", self.device, "--num-device-blocks", 4096, *attention, *worker]
        scheduler = ["--worker-timeout", 120, *scheduler]
        return services.running(model, worker=worker, scheduler=scheduler, num_ranks=num_ranks)

    def checkpoint(self, name: str, family: str, *, seed: int, **options: Any) -> Path:
        """Return a random checkpoint that every backend supports."""
        return make_checkpoint(self.directory / name, family, seed=seed, **{**WIDE_HEADS[family], **options})

    def require_cuda(self) -> None:
        if not self.is_cuda:
            raise UnavailableError(f"needs --device cuda, not {self.device}")


# Parity with transformers.


def parity(setting: Setting) -> Iterator[Case]:
    """Compare greedy tokens and log-probabilities of every family in float32, with sizes that the kernels support."""
    for seed, (name, case) in enumerate(KERNEL_CASES.items(), start=len(CASES)):
        yield Case(f"parity: {name}", partial(check_parity, setting, case, seed, []))


def small_parity(setting: Setting) -> Iterator[Case]:
    """Compare greedy tokens in float32 with heads and blocks of any size, on any backend that supports them."""
    any_backend = ["--attention-backend", "auto"]
    for seed, (name, case) in enumerate(CASES.items()):
        yield Case(f"parity: {name}", partial(check_parity, setting, case, seed, any_backend))


def check_parity(setting: Setting, case: ParityCase, seed: int, flags: Sequence[object]) -> dict[str, Any]:
    path = make_checkpoint(setting.directory / f"parity-{seed}", case.family, seed=seed, **case.overrides)
    model, prompts = oracle.load(path), prompts_of(seed)
    expected = [oracle.greedy(model, prompt, case.num_output_tokens) for prompt in prompts]
    with setting.running(path, worker=[*flags, *case.worker_flags]) as system:
        served = asyncio.run(serve_twice(system.url, prompts, case.num_output_tokens))
    assert_the_cache_was_used(case, served)
    requests = [(prompt, SamplingParams(temperature=0)) for prompt in prompts]
    assert_logprobs(model, prompts, served.first)
    return assert_same(model, requests * 2, tokens_of(served.first) + tokens_of(served.again), expected * 2)


def assert_same(
    model: transformers.PreTrainedModel,
    requests: Sequence[Request],
    served: Sequence[list[int]],
    expected: Sequence[list[int]],
) -> dict[str, Any]:
    """Check that sequences are equal, except for a few that diverge where float32 cannot distinguish the choices."""
    num_near_ties = 0
    for i, ((prompt, sampling), ours, theirs) in enumerate(zip(requests, served, expected, strict=True)):
        assert len(ours) == len(theirs), f"sequence {i} has {len(ours)} tokens, not {len(theirs)}"
        first = next((t for t, (one, other) in enumerate(zip(ours, theirs, strict=True)) if one != other), None)
        if first is None:
            continue
        scores = oracle.preferences(
            model, prompt + theirs[:first], temperature=sampling.temperature, seed=sampling.seed or 0
        )
        gap = float((scores[ours[first]] - scores[theirs[first]]).abs())
        parting = f"sequence {i}, prompt of {len(prompt)}, token {first}: {ours[first]} instead of {theirs[first]}"
        assert gap <= FLOAT32_MARGIN, f"{parting}, {gap:.2e} apart"
        num_near_ties += 1
    assert num_near_ties <= max(1, MAX_NEAR_TIES * len(requests)), f"{num_near_ties} sequences part at near ties"
    return {"sequences": len(requests), "near_ties": num_near_ties}


# Narrower types.


def bfloat16(setting: Setting) -> Iterator[Case]:
    """Check the bundled model and random weights of every family: tokens are within a margin of float32's best."""
    yield Case("bfloat16: the bundled model", partial(check_storyteller, setting, [], BF16_MARGIN))
    for family in FAMILIES:
        yield Case(f"bfloat16: {family}, random", partial(check_random, setting, family, [], RANDOM_BF16_MARGIN))


def fp8(setting: Setting) -> Iterator[Case]:
    """Check that a KV cache in 8 bits works, and that its tokens stay within a margin."""
    flags = ["--kv-cache-dtype", "fp8"]

    def check(family: str | None) -> dict[str, Any]:
        setting.require_cuda()
        largest, mean = FP8_ON_A_CPU.get(family or "", (FP8_MARGIN / 3, FP8_MEAN / 3))
        run = check_storyteller if family is None else partial(check_random, family=family)
        figures = run(setting, flags=flags, margin=3 * largest)
        assert figures["mean_shortfall"] <= 3 * mean, f"the mean shortfall is {figures['mean_shortfall']:.3f}"
        return figures

    yield Case("fp8 cache: the bundled model", partial(check, None))
    for family in FAMILIES:
        yield Case(f"fp8 cache: {family}, random", partial(check, family))


def check_storyteller(setting: Setting, flags: Sequence[object], margin: float) -> dict[str, Any]:
    tokenizer = Tokenizer.from_file(str(STORYTELLER / "tokenizer.json"))
    texts = ["Once", "Once upon a time", "The little fox", "Mia was a clever", "There once was a brave turtle"]
    prompts = [tokenizer.encode(text).ids for text in texts]
    prompts += oracle.random_prompts(6, tokenizer.get_vocab_size(), (1, 40, 300, 700))
    return check_margin(setting, STORYTELLER, prompts, flags, margin)


def check_random(setting: Setting, family: str, flags: Sequence[object], margin: float) -> dict[str, Any]:
    path = setting.checkpoint(f"bfloat16-{family}", family, seed=21, dtype="bfloat16")
    return check_margin(setting, path, prompts_of(22), flags, margin)


def check_margin(
    setting: Setting,
    model: Path,
    prompts: Sequence[list[int]],
    flags: Sequence[object],
    margin: float,
    meant: Path | None = None,
) -> dict[str, Any]:
    """Check that the served tokens are within `margin` of the best logit.

    `meant`: the model that determines the best tokens, if it is another model. `flags` may ask for coarser keys and
    values. If `flags` is empty and a token exceeds the margin, the limit is taken from transformers' choices in
    bfloat16 at the same positions. The reason is that a change of experts depends on the text and on the rounding of
    two experts' scores.
    """
    with setting.running(model, worker=["--dtype", "bfloat16", *flags]) as system:
        served = tokens_of(asyncio.run(generate_all(system.url, prompts, NUM_BF16_TOKENS)))
    exact = oracle.load(meant or model)
    shortfalls = shortfalls_of(exact, prompts, served)
    mean = margin
    if max(shortfalls) > margin and not flags:
        texts = list(zip(prompts, served, strict=True))
        rounded, unsteady = oracle.load_rounded(meant or model), oracle.load_with_noise(meant or model, seed=24)
        theirs = [fall for text in texts for fall in oracle.shortfalls_of_rounding(rounded, exact, *text).tolist()]
        drawn = [oracle.shortfalls_of_rounding(unsteady, exact, *text) for text in texts * NUM_ROUNDINGS]
        margin, mean = max(margin, *(falls.max().item() for falls in drawn)), 2 * fmean(theirs)
    assert fmean(shortfalls) <= mean, f"tokens lie {fmean(shortfalls):.4f} below the best on average; {mean:.4f} may be"
    assert max(shortfalls) <= margin, f"a token lies {max(shortfalls):.3f} below the best; at most {margin:.3f} may be"
    return {
        "tokens": len(shortfalls),
        "best_tokens": sum(shortfall == 0 for shortfall in shortfalls),
        "mean_shortfall": fmean(shortfalls),
        "largest_shortfall": max(shortfalls),
    }


def shortfalls_of(
    exact: transformers.PreTrainedModel, prompts: Sequence[list[int]], outputs: Sequence[list[int]]
) -> list[float]:
    texts = zip(prompts, outputs, strict=True)
    return [shortfall for prompt, tokens in texts for shortfall in oracle.shortfalls(exact, prompt, tokens).tolist()]


def quantized(setting: Setting) -> Iterator[Case]:
    """Check that tokens over quantised weights are within a margin of the best token of the dequantised weights."""
    made = packed
    exact_inputs = (made.awq("AWQ", 32), made.gptq("GPTQ", 4, 128, version="gptq", sym=True, g_idx="none"))
    rounded_inputs = (made.fp8("FP8", None, "weight_scale"), made.fp8("FP8 in blocks of 128", (128, 128)))
    for case in (*exact_inputs, made.w8a8("W8A8")):
        yield Case(f"quantised: {case.name}", partial(check_quantized, setting, case, CODES_MARGIN))
    yield Case("quantised: MXFP4", partial(check_mxfp4, setting))
    for case in rounded_inputs:
        yield Case(f"quantised: {case.name}", partial(check_quantized, setting, case, FP8_MARGIN))


def check_quantized(setting: Setting, case: packed.Case, margin: float) -> dict[str, Any]:
    directory = setting.directory / case.name
    directory.mkdir()
    sizes = {"dtype": "bfloat16", "hidden_size": 256, "intermediate_size": 384}  # multiples of 128
    model, meant = packed.make_quantized(directory, "llama", case, seed=23, **WIDE_HEADS["llama"], **sizes)
    return check_margin(setting, model, prompts_of(22), [], margin, meant)


def check_mxfp4(setting: Setting) -> dict[str, Any]:
    directory = setting.directory / "mxfp4"
    directory.mkdir()
    model, meant = packed.make_mxfp4(directory, seed=23, dtype="bfloat16", **WIDE_HEADS["gpt_oss"])
    return check_margin(setting, model, prompts_of(22), [], CODES_MARGIN, meant)


# The same tokens in two ways of running.


@dataclass(frozen=True)
class Way:
    """A way of running the services: their flags, and a check that the intended feature was in use."""

    worker: Sequence[object] = ()
    scheduler: Sequence[object] = ()
    check: Callable[[Loads], None] = lambda loads: None
    num_ranks: int = 1


def check_ways(setting: Setting, name: str, family: str, one: Way, other: Way, **overrides: Any) -> dict[str, Any]:
    """Check that greedy and seeded streams in float32 are the same in both ways."""
    path = setting.checkpoint(name, family, seed=31, **overrides)
    requests = requests_of(32, VOCAB_SIZE, num_requests=40)
    first, second = (asyncio.run(serve(setting, path, way, requests)) for way in (one, other))
    return assert_same(oracle.load(path), requests, second, first)


async def serve(setting: Setting, model: Path, way: Way, requests: Sequence[Request]) -> list[list[int]]:
    worker = ["--dtype", "float32", *way.worker]
    with setting.running(model, worker=worker, scheduler=way.scheduler, num_ranks=way.num_ranks) as system:
        async with AsyncClient(system.url) as client:
            streams = await run_streams(client, requests)
            way.check(await client.loads())
    return streams


def graphs(setting: Setting) -> Iterator[Case]:
    """Compare runs with and without CUDA graphs."""

    def check(family: str) -> dict[str, Any]:
        setting.require_cuda()
        eager = Way(worker=["--max-graph-batch-size", 0])
        return check_ways(setting, f"graphs-{family}", family, Way(), eager)

    for family in FAMILIES:
        yield Case(f"graphs on = graphs off: {family}", partial(check, family))


def depth(setting: Setting) -> Iterator[Case]:
    """Compare two steps in flight with one step."""
    ways = (Way(scheduler=["--pipeline-depth", 2]), Way(scheduler=["--pipeline-depth", 1]))
    for family in ("qwen3", "mistral"):
        yield Case(f"depth 2 = depth 1: {family}", partial(check_ways, setting, f"depth-{family}", family, *ways))


def swap(setting: Setting) -> Iterator[Case]:
    """Compare a pool that is much too small with a pool in which everything fits."""

    def has_swapped(loads: Loads) -> None:
        assert loads.num_swap_preemptions > 0, "no group was swapped"
        assert loads.num_held_host_blocks == loads.num_held_blocks == 0

    pool = ["--num-device-blocks", 48, "--num-host-blocks", 400]
    for pipeline_depth in (1, 2):
        flags = ["--preemption", "swap", "--pipeline-depth", pipeline_depth]
        squeezed = Way(pool, flags, has_swapped)
        name = f"swap-{pipeline_depth}"
        yield Case(
            f"swapped = undisturbed, depth {pipeline_depth}",
            partial(check_ways, setting, name, "qwen3", Way(), squeezed),
        )


def ranks(setting: Setting) -> Iterator[Case]:
    """Compare two tensor parallel ranks, each on a GPU of its own, with a single rank."""

    def check(family: str) -> dict[str, Any]:
        num_gpus = torch.cuda.device_count()
        if setting.is_cuda and num_gpus < 2:
            raise UnavailableError(f"needs two GPUs, and there is {num_gpus}")
        return check_ways(setting, f"ranks-{family}", family, Way(), Way(num_ranks=2))

    for family in ("qwen3", "mistral"):
        yield Case(f"two ranks = one: {family}", partial(check, family))


def backends(setting: Setting) -> Iterator[Case]:
    """Compare our attention with torch's, and with flash_attn where it is installed."""
    ours = "triton" if setting.is_cuda else "cpu"
    shapes: dict[str, tuple[str, int, dict[str, Any]]] = {
        "llama, blocks of 16": ("llama", 16, {}),
        "mistral, window of 20, blocks of 32": ("mistral", 32, {}),
        "qwen3, heads of 128, blocks of 64": ("qwen3", 64, {"hidden_size": 128, "head_dim": 128}),
    }
    for index, (name, (family, block_size, overrides)) in enumerate(shapes.items()):
        ways = [Way(worker=["--attention-backend", backend, "--block-size", block_size]) for backend in (ours, "torch")]
        check = partial(check_ways, setting, f"backends-{index}", family, *ways, **overrides)
        yield Case(f"{ours} = torch: {name}", check)
    yield Case("flash_attn in bfloat16: the bundled model", partial(check_flash_attn, setting))


def check_flash_attn(setting: Setting) -> dict[str, Any]:
    setting.require_cuda()
    if importlib.util.find_spec("flash_attn") is None:
        raise UnavailableError("flash_attn is not installed")
    return check_storyteller(setting, ["--attention-backend", "flash_attn"], BF16_MARGIN)


# Sampling and recovery.


def sampling(setting: Setting) -> Iterator[Case]:
    """Compare seeded samples in float32, with filters."""
    yield Case("seeded samples are equal alone, in a batch and under preemption", partial(check_sampling, setting))


def check_sampling(setting: Setting) -> dict[str, Any]:
    path = setting.checkpoint("sampling", "qwen3", seed=5)

    async def sample(url: str, *ways: Callable[[AsyncClient], Any]) -> tuple[list[Any], Loads]:
        async with AsyncClient(url) as client:
            return [await way(client) for way in ways], await client.loads()

    with setting.running(path, worker=["--dtype", "float32"]) as system:
        (alone, batch), _ = asyncio.run(sample(system.url, sample_alone, sample_together))
    with setting.running(path, worker=["--dtype", "float32", "--num-device-blocks", 24]) as system:
        (squeezed,), loads = asyncio.run(sample(system.url, sample_together))
    assert loads.num_preemptions > 0
    # A GPU's matmul selects another algorithm for another number of rows, which changes the last bits. Where two tokens
    # score equally within these bits, the sample may be either token. One sequence in about fifty runs differs; two are
    # a fault.
    num_allowed = 1 if setting.is_cuda else 0
    num_differing = {"in a batch": _num_differing(alone, batch), "under preemption": _num_differing(alone, squeezed)}
    for where, number in num_differing.items():
        assert number <= num_allowed, f"{number} samples differ {where}"
    assert all(first != second for first, second in alone)
    return {"sequences": sum(map(len, alone)), "differing": num_differing}


def _num_differing(requests: Sequence[Sequence[Any]], others: Sequence[Sequence[Any]]) -> int:
    """Return the number of samples that differ between two runs."""
    pairs = zip(requests, others, strict=True)
    return sum(one != other for request, same in pairs for one, other in zip(request, same, strict=True))


def kills(setting: Setting) -> Iterator[Case]:
    """Kill the worker's process repeatedly under load."""
    yield Case(f"{NUM_KILLS} kills change no stream", partial(check_kills, setting))


def check_kills(setting: Setting) -> dict[str, Any]:
    path = setting.checkpoint("kills", "qwen3", seed=3)
    # A GPU is fast: its streams are longer, so that one run of them outlasts the kills.
    requests = requests_of(1, VOCAB_SIZE, max_tokens=(600, 900) if setting.is_cuda else (60, 120))
    worker = ["--dtype", "float32", "--num-device-blocks", 8192]
    flags = {"worker": worker, "scheduler": ["--max-num-batched-tokens", 512]}
    run = asyncio.run(run_with_ends(setting.running, path, requests, NUM_KILLS, **flags))
    figures = assert_same(oracle.load(path), requests, run.disturbed[-1], run.calm)
    return {**figures, "kills": NUM_KILLS, "seconds_to_recover": run.seconds_to_recover}


def device_tests(setting: Setting) -> Iterator[Case]:
    """Run `pytest -m gpu tests/gpu` without the acceptance tests, which run these parts."""

    def check() -> dict[str, Any]:
        setting.require_cuda()
        command = [sys.executable, "-m", "pytest", "-q", "-m", "gpu", "-p", "no:cacheprovider", "tests/gpu"]
        command += ["--ignore", "tests/gpu/test_acceptance.py"]
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == 0, ended.stdout[-1500:]
        return {"said": ended.stdout.strip().splitlines()[-1]}

    yield Case("tests/gpu", check)


PARTS: dict[str, Callable[[Setting], Iterator[Case]]] = {
    part.__name__: part
    for part in (
        *(parity, small_parity, bfloat16, quantized, graphs, depth, swap, ranks, backends, fp8, sampling, kills),
        device_tests,
    )
}
