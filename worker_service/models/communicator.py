"""How the ranks of a tensor parallel model meet. Models see a `Communicator` and know nothing of processes; these meet
through torch.distributed: gloo on a CPU, NCCL on a GPU.

In each epoch they meet anew, in a store of that epoch (`RankStore`): a process that was started again finds the
others, and none hears of an epoch before. They meet when the first step asks for it, since by then every rank has
answered, and none is missing.

All ranks choose equal tokens: each computes its part of the logits, gathering copies the parts bit for bit, and
sampling is a pure function of logits that all of them hold. (Sums, and so hidden states, are equal too: each element is
added up by one rank and handed to the others.)
"""

import socket
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

# Its annotations do not name what it exports.
dist: Any = torch.distributed

# All ranks are idle when they meet, and in step from then on: what takes longer than this is lost.
_MEETING_TIMEOUT = timedelta(seconds=10)
_COLLECTIVE_TIMEOUT = timedelta(seconds=30)

_FILE_SCHEME = "file:"
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}  # where this process reaches a store that listens everywhere
_EPOCH_FILE = "epoch-"


class Communicator(Protocol):
    """One of `size` ranks that compute one model together. Every rank calls the same methods in the same order."""

    @property
    def rank(self) -> int:
        """From 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def begin(self, epoch: int) -> None:
        """An epoch begins: any of the other ranks may be another process now."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """The sum of what all ranks pass, of one shape; may be written to `x`."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Return what all ranks pass, [R, L] each, side by side in their order: [R, size * L], the same bits on every
        rank."""


class SingleRank:
    """A model that is computed by one rank alone."""

    rank = 0
    size = 1

    def begin(self, epoch: int) -> None:
        pass

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x


class RankGroup:
    """A `Communicator`. Before the first epoch each is alone: sums and logits are its own.

    Where a rank is lost, calls of the others raise: at once if its connections close, else after a timeout. NCCL ends
    the process instead.
    """

    def __init__(self, rank: int, size: int, address: str, listen_host: str, device: torch.device) -> None:
        """`address`: where they meet, HOST:PORT of rank 0's store, which listens at `listen_host`, or file:DIRECTORY.
        Raises OSError."""
        self.rank = rank
        self.size = size
        self._device = device
        self._store: RankStore = (
            FileRankStore(Path(address.removeprefix(_FILE_SCHEME)))
            if address.startswith(_FILE_SCHEME)
            else TcpRankStore(rank, address, listen_host)
        )
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


class RankStore(Protocol):
    def of_epoch(self, epoch: int) -> Any:
        """A torch.distributed.Store that is empty until a rank writes to it in this epoch."""

    def own_address(self) -> str:
        """Return the address of the interface on which the other ranks reach this one."""


class FileRankStore:
    """A file for each epoch, in a directory to which the ranks alone may write."""

    def __init__(self, directory: Path) -> None:
        """Raises OSError."""
        if not directory.is_dir():
            raise OSError(f"the ranks' directory {directory} is not there; see --tensor-parallel-address")
        self._directory = directory

    def of_epoch(self, epoch: int) -> Any:
        # All ranks have begun this epoch: no rank looks for those before.
        for path in self._directory.glob(f"{_EPOCH_FILE}*"):
            if int(path.name.removeprefix(_EPOCH_FILE)) < epoch:
                with suppress(FileNotFoundError):
                    path.unlink()
        store = dist.FileStore(str(self._directory / f"{_EPOCH_FILE}{epoch}"), -1)
        store.set_timeout(_MEETING_TIMEOUT)
        return store

    def own_address(self) -> str:
        return "127.0.0.1"


class TcpRankStore:
    def __init__(self, rank: int, address: str, listen_host: str) -> None:
        """Raises OSError if rank 0 cannot listen."""
        host, port = address.rsplit(":", 1)
        self._host = host.strip("[]")
        self._port = int(port)
        self._served = _serve(listen_host, self._port) if rank == 0 else None

    def of_epoch(self, epoch: int) -> Any:
        # Rank 0 may be another process than in the epoch before.
        store = self._served or dist.TCPStore(
            self._host, self._port, is_master=False, timeout=_MEETING_TIMEOUT, wait_for_workers=False
        )
        return dist.PrefixStore(f"epoch {epoch}", store)

    def own_address(self) -> str:
        """Return the address of the interface that leads to rank 0."""
        family, kind, _, _, target = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])


def _serve(host: str, port: int) -> Any:
    """Return a store that listens on `host` and `port` alone: torch's own socket would listen on every interface.
    Raises OSError."""
    if host == "::" and not socket.has_dualstack_ipv6():
        host = "0.0.0.0"
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        listening = socket.create_server((host, port), family=family, dualstack_ipv6=host == "::")
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
