"""Communication between the ranks of a tensor-parallel model. Models use a `Communicator` and know nothing about
processes. The ranks communicate through torch.distributed: gloo on a CPU, NCCL on a GPU.

In each epoch, the ranks form a new process group through a store of that epoch (`RankStore`). A restarted process
therefore finds the other ranks, and no message of an earlier epoch reaches it. The group is formed when the first step
needs it: by then every rank has answered, so no rank is missing.

All ranks choose the same tokens. Each rank computes its part of the logits, `all_gather` copies the parts bit for bit,
and sampling is a pure function of the complete logits. Sums, and therefore hidden states, are equal on all ranks too:
on a CPU every rank adds the parts in the same order, and NCCL adds each element on one rank and sends the result to the
others.
"""

import socket
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed
from torch import Tensor

# The annotations of torch.distributed do not list all that it exports.
dist: Any = torch.distributed

# All ranks are idle when they form a group, and run in step afterwards. A rank that exceeds these timeouts is lost.
_RENDEZVOUS_TIMEOUT = timedelta(seconds=10)
_COLLECTIVE_TIMEOUT = timedelta(seconds=30)

_FILE_SCHEME = "file:"
# The address at which this process reaches a store that listens on all interfaces.
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}
_EPOCH_FILE = "epoch-"


class Communicator(Protocol):
    """The connection of one rank to the other ranks (worker processes) that compute one model together by tensor
    parallelism. There are `size` ranks, and every rank must call the same methods in the same order."""

    @property
    def rank(self) -> int:
        """The index of this rank, from 0."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def begin(self, epoch: int) -> None:
        """Begin a new epoch, the period in which one scheduler process uses the workers. Call this when a scheduler
        connects. From then on, any other rank may be a new process."""

    def all_reduce(self, x: Tensor) -> Tensor:
        """Return the elementwise sum of the tensors `x` of all ranks. The tensors must have the same shape. The sum may
        be written to `x`."""

    def all_gather(self, x: Tensor) -> Tensor:
        """Concatenate the tensors `x` of all ranks, each of shape [R, L], along the columns in the order of the ranks.
        Return a tensor of shape [R, size * L] that has the same bits on every rank."""


class SingleRank:
    """A `Communicator` for a model that a single process computes alone. Its methods do not communicate."""

    rank = 0
    size = 1

    def begin(self, epoch: int) -> None:
        pass

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        return x


class RankGroup:
    """A `Communicator` for several ranks (worker processes with tensor parallelism), built on torch.distributed. Before
    the first call of `begin`, the ranks do not communicate: `all_reduce` returns its input, and `all_gather` repeats
    its input once for each rank.

    If the process of one rank is lost, calls on the other ranks raise an error: at once if the connections to the lost
    process close, otherwise after a timeout. On a GPU, NCCL instead terminates the processes of the other ranks.
    """

    def __init__(self, rank: int, size: int, address: str, listen_host: str, device: torch.device) -> None:
        """Create the communicator of rank `rank` of `size` ranks. `address` tells the ranks where to find each other:
        HOST:PORT of a store that rank 0 serves on the interface `listen_host`, or file:DIRECTORY. Raises OSError if the
        directory does not exist or rank 0 cannot listen."""
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
        """Begin a new epoch, the period in which one scheduler process uses the workers. This rank leaves the process
        group of the previous epoch. If it still waits for other ranks in that group, the waiting call raises an
        error."""
        if self._group is not None and self._device.type == "cuda":
            self._group.abort()
        self._group = None
        self._epoch = epoch

    def all_reduce(self, x: Tensor) -> Tensor:
        if self._epoch is None:
            return x
        if self._device.type == "cuda":
            self._init_process_group().allreduce([x]).wait()
            return x
        # Add in the order of ranks, so that a row's sums have the same bits for any number of rows.
        gathered = x.new_empty(self.size * x.numel())
        self._init_process_group()._allgather_base(gathered, x.contiguous().flatten()).wait()
        parts = gathered.view(self.size, *x.shape)
        x.copy_(parts[0])
        for part in parts[1:]:
            x.add_(part)
        return x

    def all_gather(self, x: Tensor) -> Tensor:
        if self._epoch is None:
            return x.repeat(1, self.size)
        gathered = x.new_empty(self.size * len(x), x.shape[1])
        self._init_process_group()._allgather_base(gathered, x.contiguous()).wait()
        return gathered.unflatten(0, (self.size, len(x))).transpose(0, 1).flatten(1)

    def _init_process_group(self) -> Any:
        assert self._epoch is not None
        if self._group is None:
            store = self._store.of_epoch(self._epoch)
            store.set(f"rank {self.rank}", "here")
            store.wait([f"rank {rank}" for rank in range(self.size)], _RENDEZVOUS_TIMEOUT)
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
    """A source of torch.distributed key-value stores. In each epoch (the period in which one scheduler process uses the
    workers) the ranks find each other through one store and form a process group."""

    def of_epoch(self, epoch: int) -> Any:
        """Return the torch.distributed.Store through which the ranks find each other in this epoch. It does not contain
        the entries of earlier epochs."""

    def own_address(self) -> str:
        """Return the IP address of the network interface on which the other ranks reach this rank."""


class FileRankStore:
    """A `RankStore` that keeps one file per epoch in a directory that all ranks can access. Only the ranks may have
    permission to write to the directory."""

    def __init__(self, directory: Path) -> None:
        """Keep the files of all epochs in `directory`. Raises OSError if the directory does not exist."""
        if not directory.is_dir():
            raise OSError(f"the ranks' directory {directory} does not exist; see --tensor-parallel-address")
        self._directory = directory

    def of_epoch(self, epoch: int) -> Any:
        # All ranks have begun this epoch, so no rank needs the files of earlier epochs.
        for path in self._directory.glob(f"{_EPOCH_FILE}*"):
            if int(path.name.removeprefix(_EPOCH_FILE)) < epoch:
                with suppress(FileNotFoundError):
                    path.unlink()
        store = dist.FileStore(str(self._directory / f"{_EPOCH_FILE}{epoch}"), -1)
        store.set_timeout(_RENDEZVOUS_TIMEOUT)
        return store

    def own_address(self) -> str:
        return "127.0.0.1"


class TcpRankStore:
    """A `RankStore` that runs in the process of rank 0. The other ranks connect to rank 0 over TCP."""

    def __init__(self, rank: int, address: str, listen_host: str) -> None:
        """Use the store of rank 0 at `address`, in the form HOST:PORT. If `rank` is 0, begin to listen on the interface
        `listen_host`. Raises OSError if rank 0 cannot listen."""
        host, port = address.rsplit(":", 1)
        self._host = host.strip("[]")
        self._port = int(port)
        self._served = _serve(listen_host, self._port) if rank == 0 else None

    def of_epoch(self, epoch: int) -> Any:
        # Rank 0 may be a different process than in the previous epoch.
        store = self._served or dist.TCPStore(
            self._host, self._port, is_master=False, timeout=_RENDEZVOUS_TIMEOUT, wait_for_workers=False
        )
        return dist.PrefixStore(f"epoch {epoch}", store)

    def own_address(self) -> str:
        """Return the IP address of the network interface through which this rank reaches rank 0."""
        family, kind, _, _, target = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])


def _serve(host: str, port: int) -> Any:
    """Start a torch.distributed.TCPStore that listens only on the interface `host`, at `port`, and return it. The
    socket is opened here because a store that torch opens listens on every interface. Raises OSError if the address is
    not available."""
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
        timeout=_RENDEZVOUS_TIMEOUT,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
