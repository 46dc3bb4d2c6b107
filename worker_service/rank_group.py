"""The ranks of a tensor parallel worker as processes that meet through torch.distributed: gloo on a CPU, NCCL on a GPU.

Rank 0 keeps a store at an address that all know. In each epoch they meet anew, under a prefix of the store that the
epoch names: a process that was started again finds the others, and nobody hears of an epoch before. They meet when the
first step asks for it, since by then every rank has answered Ready, and none is missing.

All ranks choose equal tokens: each computes its part of the logits, gathering copies the parts bit for bit, and
sampling is a pure function of logits that all of them hold. (Sums, and so hidden states, are equal too: each element is
added up by one rank and handed to the others.)
"""

import socket
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
from torch import Tensor

# Its annotations do not name what it exports.
dist: Any = torch.distributed

# All ranks are idle when they meet, and in step from then on: what takes longer than this is lost.
_MEETING_TIMEOUT = timedelta(seconds=10)
_COLLECTIVE_TIMEOUT = timedelta(seconds=30)
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # where this process reaches a store that listens everywhere


class RankGroup:
    """A `models.communicator.Communicator`. Before the first epoch each is alone: sums and logits are its own.

    Where a rank is lost, calls of the others raise: at once if its connections close, else after a timeout. NCCL ends
    the process instead.
    """

    def __init__(self, rank: int, size: int, address: str, listen_host: str, device: torch.device) -> None:
        """`address`: HOST:PORT of rank 0's store, which listens at `listen_host`. Raises OSError if it cannot."""
        self.rank = rank
        self.size = size
        self._host, port = address.rsplit(":", 1)
        self._port = int(port)
        self._device = device
        self._store = _serve_store(listen_host, self._port) if rank == 0 else None
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
        self._meet().allreduce([x]).wait()
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        if self._epoch is None:
            return x.repeat(1, self.size)
        gathered = x.new_empty(self.size * len(x), x.shape[1])
        self._meet()._allgather_base(gathered, x.contiguous()).wait()
        return gathered.unflatten(0, (self.size, len(x))).transpose(0, 1).flatten(1)

    def _meet(self) -> Any:
        if self._group is None:
            store = dist.PrefixStore(f"epoch {self._epoch}", self._connect())
            store.set(f"rank {self.rank}", "here")
            store.wait([f"rank {rank}" for rank in range(self.size)], _MEETING_TIMEOUT)
            if self._device.type == "cuda":
                options = dist.ProcessGroupNCCL.Options()
                options._timeout = _COLLECTIVE_TIMEOUT
                self._group = dist.ProcessGroupNCCL(store, self.rank, self.size, options)
            else:
                options = dist.ProcessGroupGloo._Options()
                options._timeout = _COLLECTIVE_TIMEOUT
                options._devices = [dist.ProcessGroupGloo.create_device(hostname=self._own_address())]
                self._group = dist.ProcessGroupGloo(store, self.rank, self.size, options)
        return self._group

    def _connect(self) -> Any:
        """Rank 0 may be another process than in the epoch before."""
        return self._store or dist.TCPStore(
            self._host, self._port, is_master=False, timeout=_MEETING_TIMEOUT, wait_for_workers=False
        )

    def _own_address(self) -> str:
        """Of the interface that leads to rank 0: gloo listens there alone."""
        family, kind, _, _, target = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])


def _serve_store(host: str, port: int) -> Any:
    """Left to itself it would listen on every interface. Raises OSError."""
    try:
        listening = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
    except OSError as error:
        raise OSError(
            f"rank 0's store cannot listen on {host}:{port} ({error.strerror}); see --host and "
            "--tensor-parallel-address"
        ) from error
    return dist.TCPStore(
        _LOOPBACK.get(host, host),
        port,
        is_master=True,
        timeout=_MEETING_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
