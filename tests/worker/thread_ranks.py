"""Ranks of a model that are threads of this process."""

import threading
from concurrent.futures import ThreadPoolExecutor

import torch

from testing.models import load_model
from testing.worker.model_logits import CPU
from worker_service.models.linear import Linear
from worker_service.models.torch_operations import Operations, Product


class Meeting:
    """A barrier for the threads of all ranks, with the tensors that they exchange."""

    def __init__(self, size: int) -> None:
        self.size = size
        self.barrier = threading.Barrier(size, timeout=60)
        self.brought: list[torch.Tensor] = [torch.empty(0)] * size


class ThreadRank:
    """A `Communicator` for one of the threads."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self.rank, self.size = rank, meeting.size
        self._meeting = meeting

    def all_reduce(self, x: torch.Tensor) -> torch.Tensor:
        return torch.stack(self._exchange(x)).sum(0)

    def all_gather(self, x: torch.Tensor) -> torch.Tensor:
        return torch.cat(self._exchange(x), dim=1)

    def _exchange(self, x: torch.Tensor) -> list[torch.Tensor]:
        self._meeting.brought[self.rank] = x
        self._meeting.barrier.wait()
        brought = [part.clone() for part in self._meeting.brought]
        self._meeting.barrier.wait()  # from here on, each rank may overwrite its own tensor
        return brought


def on_every_rank(size, compute):
    """Return the result of `compute(communicator)` on each rank, with one thread for each."""
    meeting = Meeting(size)
    with ThreadPoolExecutor(size) as pool:
        return list(pool.map(compute, [ThreadRank(meeting, rank) for rank in range(size)]))


class KeptProduct(Product):
    __call__ = None  # it is never called

    def __init__(self, weight, bias):
        self.weight, self.bias = weight, bias


class KeepingOperations(Operations):
    """Operations that only store the weights of their multiplications."""

    def prepare_product(self, weight, bias, computed, *, rounds_inputs=False):
        return KeptProduct(weight.to_floats(computed), bias)


def kept(path, size):
    """Return the multiplications of every rank's model, by name."""

    def load(communicator):
        options = {"operations": KeepingOperations(), "communicator": communicator}
        model = load_model(path, dtype=torch.float32, device=CPU, **options)
        return {name: module.product for name, module in model.named_modules() if isinstance(module, Linear)}

    return on_every_rank(size, load)
