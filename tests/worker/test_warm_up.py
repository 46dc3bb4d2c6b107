"""Compilation of all kernels before a worker is ready: no later step launches a kernel in a new variant."""

import random

import pytest
import torch
from triton.runtime.interpreter import GridExecutor

from testing.kernels.device import choose_device

DEVICE = choose_device()

from pagewire.common.grammars import GrammarCompiler  # noqa: E402
from pagewire.common.wire.messages import SamplingParams  # noqa: E402
from testing.plans import Row, plan_steps  # noqa: E402
from tests.worker.fake_device import FakeDevice  # noqa: E402
from tests.worker.float32_products import float32_products  # noqa: E402
from tests.worker.interpreted_launches import record_launches  # noqa: E402
from tests.worker.letters import letters_tokenizer  # noqa: E402
from tests.worker.triton_runner import BLOCK_SIZE, CONFIG, make_runner  # noqa: E402
from worker_service.epoch_grammars import CompileThread, EpochGrammars  # noqa: E402
from worker_service.startup.warm_up import warm_up  # noqa: E402

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(DEVICE.type != "cpu", reason="the fake device is the host"),
]


MAX_NUM_SEQS = 17


@pytest.fixture(autouse=True)
def _products_of_a_gpu(monkeypatch):
    with float32_products(monkeypatch):
        yield


@pytest.fixture
def variants(monkeypatch):
    """Return the set of launched kernels, each with its compiled argument types: see `kind_of`."""
    found = set()
    record_launches(monkeypatch)
    call_executor = GridExecutor.__call__

    def launch(executor, *args, **kwargs):
        given = dict(zip(executor.arg_names, args, strict=False)) | kwargs
        constants = {name for name in given if name in executor.constexprs or name not in executor.arg_names}
        kinds = {name: value if name in constants else kind_of(value) for name, value in given.items()}
        found.add((executor.fn.__name__, str(sorted(kinds.items()))))
        call_executor(executor, *args, **kwargs)

    monkeypatch.setattr(GridExecutor, "__call__", launch)
    return found


def kind_of(value):
    """Return a tensor's dtype or a number's type. `tests.kernels.triton.launching` checks that sizes do not matter."""
    if isinstance(value, tuple):
        return tuple(map(kind_of, value))
    return str(value.dtype) if isinstance(value, torch.Tensor) else type(value).__name__


def random_sampling(rng):
    asked = {
        "temperature": rng.choice([0.0, 1.3]),
        "top_p": rng.choice([1.0, 0.8]),
        "top_k": rng.choice([0, 5]),
        "presence_penalty": rng.choice([0.0, 0.0, 1.0]),
        "num_logprobs": rng.choice([None, None, 0, 3]),
        "num_prompt_logprobs": rng.choice([None, None, 2]),
    }
    if rng.random() < 0.3:
        token_ids = tuple(rng.sample(range(CONFIG["vocab_size"]), rng.choice([1, 5, 90])))
        asked |= {"logit_bias_token_ids": token_ids, "logit_bias_values": (0.5,) * len(token_ids)}
    if rng.random() < 0.3:
        asked |= {"min_tokens": rng.choice([1, 3]), "stop_token_ids": tuple(range(rng.choice([1, 4])))}
    return SamplingParams(**asked)


def random_rows(rng, num_long):
    lengths = rng.choices([1, 2, 7, 40], k=rng.randrange(1, 5))
    lengths[:num_long] = [600] * num_long  # attention over them is split
    prompts = ([rng.randrange(CONFIG["vocab_size"]) for _ in range(length)] for length in lengths)
    return [Row(prompt, rng.randrange(1, 5), random_sampling(rng), seed=rng.getrandbits(32)) for prompt in prompts]


@pytest.mark.parametrize(("max_graph_batch_size", "quantization"), [(0, None), (2, None), (0, "int4")])
def test_random_steps_launch_nothing_new(tmp_path, variants, max_graph_batch_size, quantization):
    device = FakeDevice(seed=5)
    # Multiplications by quantised weights have tiles for up to 16 rows, and for more.
    options = {"quantization": quantization, "max_num_seqs": MAX_NUM_SEQS if quantization else 4}
    runner = make_runner(tmp_path, device, max_graph_batch_size, num_layers=1, **options)
    warm_up(runner, EpochGrammars(None, CONFIG["vocab_size"]), lambda doing: None)
    runner.computation.capture_graphs()
    known = set(variants)
    rng = random.Random(8)
    print("seed 8")
    for epoch in range(1, 4 if quantization else 6):
        runner.reset(epoch)
        rows = random_rows(rng, num_long=int(epoch == 1))
        if quantization and epoch == 2:
            rows = [Row([index], 2) for index in range(MAX_NUM_SEQS)]
        for step in plan_steps(rows, block_size=BLOCK_SIZE, max_num_batched_tokens=64, epoch=epoch):
            runner.execute(step.plan)
    assert variants - known == set()
    assert len({name for name, _ in known}) >= 12


def test_rows_with_grammars_are_among_the_steps_of_which_it_tells(tmp_path, variants):
    """A warm-up that takes minutes reports its progress."""
    vocab_size = CONFIG["vocab_size"]
    thread = CompileThread(lambda: GrammarCompiler(letters_tokenizer(), vocab_size).compile)
    grammars = EpochGrammars(thread, vocab_size)
    runner = make_runner(tmp_path, FakeDevice(seed=6), 0, num_layers=1, grammars=grammars)
    told = []
    warm_up(runner, grammars, told.append)
    grammars.close()
    assert "_mask_kernel" in {name for name, _ in variants}
    assert len({kinds for name, kinds in variants if name == "_edit_kernel"}) == 6  # with masks and without
    assert told[0] == f"compiling kernels: 0 of {len(told)} (prompts of 1 tokens)"
    assert "penalties" in " ".join(told)
    assert not runner.table.occupied.any()
