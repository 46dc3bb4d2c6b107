"""The ranks of a tensor parallel worker as processes that meet through torch.distributed: gloo on a CPU, NCCL on a GPU.

In each epoch they meet anew, in a store of that epoch (`rank_store.py`): a process that was started again finds the
others, and none hears of an epoch before. They meet when the first step asks for it, since by then every rank has
answered, and none is missing.

All ranks choose equal tokens: each computes its part of the logits, gathering copies the parts bit for bit, and
sampling is a pure function of logits that all of them hold. (Sums, and so hidden states, are equal too: each element is
added up by one rank and handed to the others.)
"""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

from worker_service.models.ranks.rank_store import rank_store

# Its annotations do not name what it exports.
dist: Any = torch.distributed

# All ranks are idle when they meet, and in step from then on: what takes longer than this is lost.
_MEETING_TIMEOUT = timedelta(seconds=10)
_COLLECTIVE_TIMEOUT = timedelta(seconds=30)


class RankGroup:
    """A `models.communicator.Communicator`. Before the first epoch each is alone: sums and logits are its own.

    Where a rank is lost, calls of the others raise: at once if its connections close, else after a timeout. NCCL ends
    the process instead.
    """

    def __init__(self, rank: int, size: int, address: str, listen_host: str, device: torch.device) -> None:
        """`address`: where they meet, HOST:PORT of rank 0's store, which listens at `listen_host`, or file:DIRECTORY.
        Raises OSError."""
        self.rank = rank
        self.size = size
        self._device = device
        self._store = rank_store(rank, address, listen_host, _MEETING_TIMEOUT)
        self._epoch: int | None = None
        self._group: Any = None

    def begin(self, epoch: int) -> None:
        """Leave the group of the epoch before: who still waits there gets an error."""
        if self._group is not None and self._device.type == "cuda":
            self._group.abort()
        self._group = None
        self._epoch = epoch

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._epoch is None:
            return x
        if self._device.type == "cuda":
            self._meet().allreduce([x]).wait()
            return x
        # In the order of ranks, so that a row's sums are the same bits however many rows there are.
        gathered = x.new_empty(self.size * x.numel())
        self._meet()._allgather_base(gathered, x.contiguous().flatten()).wait()
        parts = gathered.view(self.size, *x.shape)
        x.copy_(parts[0])
        for part in parts[1:]:
            x.add_(part)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        if self._epoch is None:
            return x.repeat(1, self.size)
        gathered = x.new_empty(self.size * len(x), x.shape[1])
        self._meet()._allgather_base(gathered, x.contiguous()).wait()
        return gathered.unflatten(0, (self.size, len(x))).transpose(0, 1).flatten(1)

    def _meet(self) -> Any:
        assert self._epoch is not None
        if self._group is None:
            store = self._store.of_epoch(self._epoch)
            store.set(f"rank {self.rank}", "here")
            store.wait([f"rank {rank}" for rank in range(self.size)], _MEETING_TIMEOUT)
            if self._device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = _COLLECTIVE_TIMEOUT
                self._group = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
            else:
                options = dist.ProcessGroupGloo._Options()
                options._timeout = _COLLECTIVE_TIMEOUT
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._store.own_address())]
                self._group = dist.ProcessGroupGloo(store, self.rank, self.size, options)
        return self._group
