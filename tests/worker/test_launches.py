"""The number of GPU launches of a step, within its graphs and around them.

A step of a model with the layers of Qwen3-0.6B runs in the GPU computation on a fake device, with the Triton kernels in
the interpreter. Launches are counted as in `FakeDevice.launches`.
"""

from collections import Counter

import pytest

from testing.kernels.device import choose_device

DEVICE = choose_device()

from testing.plans import Row, plan_steps  # noqa: E402
from tests.worker.fake_device import FakeDevice  # noqa: E402
from tests.worker.float32_products import float32_products  # noqa: E402
from tests.worker.interpreted_launches import record_launches  # noqa: E402
from tests.worker.triton_runner import BLOCK_SIZE, make_runner  # noqa: E402

pytestmark = [
    pytest.mark.thorough,
    pytest.mark.skipif(DEVICE.type != "cpu", reason="the fake device is the host"),
]


@pytest.fixture(autouse=True)
def _products_of_a_gpu(monkeypatch):
    with float32_products(monkeypatch):
        yield


def report(what, launches):
    print(f"{launches.total()} {what}:", *(f"{number} {name}" for name, number in launches.most_common()), sep="\n  ")


def run_last(runner, device, rows):
    """Return the launches of the last step of some rows, after all earlier steps are done."""
    *others, last = plan_steps(rows, block_size=BLOCK_SIZE, max_num_batched_tokens=5)
    runner.reset(epoch=1)
    for step in others:
        runner.execute(step.plan)
    device.synchronize()
    before = Counter(device.launches)
    runner.execute(last.plan)
    device.synchronize()
    return device.launches - before


def test_a_step_of_decoding_rows(tmp_path, monkeypatch):
    record_launches(monkeypatch)
    device = FakeDevice(seed=5)
    runner = make_runner(tmp_path, device, max_graph_batch_size=1)
    runner.computation.capture_graphs()
    around = run_last(runner, device, [Row([3, 1, 4], 2)])
    forward, step = (graph.launches for graph in device.graphs)
    assert [graph.num_replays for graph in device.graphs] == [0, 1]
    report("in the graph of the model alone", forward)
    report("in the graph of the step", step)
    report("with its replay", around)
    assert forward.total() <= 287
    assert step.total() <= 290
    assert around.total() <= 3


def test_a_step_over_codes(tmp_path, monkeypatch):
    """A multiplication with quantised weights is also one launch. Decoding the embedding's rows takes more than one."""
    record_launches(monkeypatch)
    device = FakeDevice(seed=5)
    runner = make_runner(tmp_path, device, max_graph_batch_size=1, num_layers=2, quantization="int4")
    runner.computation.capture_graphs()
    around = run_last(runner, device, [Row([3, 1, 4], 2)])
    _, step = (graph.launches for graph in device.graphs)
    report("in the graph of the step", step)
    assert step.total() <= 36  # 296 with 28 layers
    assert around.total() <= 3


def test_a_step_of_prompts_and_decoding_rows(tmp_path, monkeypatch):
    """One row decodes, and another computes the last two tokens of its prompt. Such steps have no graph."""
    record_launches(monkeypatch)
    device = FakeDevice(seed=6)
    runner = make_runner(tmp_path, device, max_graph_batch_size=0)
    launches = run_last(runner, device, [Row([3, 1, 4], 2), Row([1, 5, 9, 2], 1)])
    report("in all", launches)
    assert launches.total() <= 292
