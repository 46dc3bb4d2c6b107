"""The fake device is as strict as a GPU; the tests of the CUDA runner depend on this."""

from functools import partial

import pytest
import torch

from tests.worker.fake_device import FakeDevice


def test_streams_keep_their_own_order_only() -> None:
    """Over many seeds, two streams interleave in more than one way, and a waiting operation follows its event."""
    orders = set()
    for seed in range(40):
        device = FakeDevice(seed)
        log: list[str] = []
        for name in ("a", "b"):
            device.compute.run(partial(log.append, name))
        device.moves.run(partial(log.append, "x"))
        device.moves.wait_for(device.compute.record())
        device.moves.run(partial(log.append, "y"))
        device.synchronize()
        assert log.index("a") < log.index("b") < log.index("y")
        orders.add(tuple(log))
    assert orders == {("x", "a", "b", "y"), ("a", "x", "b", "y"), ("a", "b", "x", "y")}


def test_nothing_has_happened_before_it_is_waited_for() -> None:
    device = FakeDevice(1, eagerness=0)
    log: list[int] = []
    device.compute.run(lambda: log.append(1))
    done = device.compute.record()
    device.compute.run(lambda: log.append(2))
    assert (log, done.query()) == ([], False)
    done.synchronize()
    assert (log, done.query()) == ([1], True)


def test_graph_holds_tensors_and_not_what_python_knew() -> None:
    device = FakeDevice(2)
    values, out = torch.tensor([1.0, 2.0]), torch.zeros(2)
    factor = 10.0

    def operation() -> None:
        out.copy_((values * factor + 1).flip(0)[:1].expand(2))

    replay = device.capture(operation)
    factor = 1000.0
    values.copy_(torch.tensor([3.0, 4.0]))
    replay()
    device.synchronize()
    assert out.tolist() == [41.0, 41.0]


@pytest.mark.parametrize(
    "operation",
    [
        lambda x: x.max().item(),
        lambda x: x[x > 0],
        lambda x: x + torch.tensor([1.0, 2.0]),
    ],
    ids=["a number", "as many as there are", "a tensor of the host"],
)
def test_operations_that_wait_for_the_device_are_refused(operation) -> None:
    x = torch.ones(2)
    device = FakeDevice(3, eagerness=0)
    device.compute.run(lambda: operation(x))
    with pytest.raises(AssertionError, match="the host would wait"):
        device.synchronize()


def test_pinned_memory_holds_garbage() -> None:
    device = FakeDevice(4)
    first, second = device.pinned((3, 5), torch.int32), device.pinned((3, 5), torch.int32)
    assert first.shape == (3, 5)
    assert not torch.equal(first, second)
    assert device.pinned((0, 4), torch.uint8).shape == (0, 4)
