"""The stores in which the ranks of a worker find each other, anew in each epoch: rank 0's store over TCP, or files on
one machine."""

import socket
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch.distributed

# Its annotations do not name what it exports.
dist: Any = torch.distributed

FILE_SCHEME = "file:"
_LOOPBACK = {"0.0.0.0": "127.0.0.1", "::": "127.0.0.1"}  # where this process reaches a store that listens everywhere
_EPOCH_FILE = "epoch-"


class RankStore(Protocol):
    def of_epoch(self, epoch: int) -> Any:
        """A torch.distributed.Store that is empty until a rank writes to it in this epoch."""

    def own_address(self) -> str:
        """Return the address of the interface on which the other ranks reach this one."""


def rank_store(rank: int, address: str, listen_host: str, timeout: timedelta) -> RankStore:
    """`address`: HOST:PORT of rank 0's store, which listens at `listen_host`, or file:DIRECTORY. `timeout` is for what
    a rank asks of it. Raises OSError."""
    if address.startswith(FILE_SCHEME):
        return FileRankStore(Path(address.removeprefix(FILE_SCHEME)), timeout)
    return TcpRankStore(rank, address, listen_host, timeout)


class FileRankStore:
    """A file for each epoch, in a directory to which the ranks alone may write."""

    def __init__(self, directory: Path, timeout: timedelta) -> None:
        """Raises OSError."""
        if not directory.is_dir():
            raise OSError(f"the ranks' directory {directory} is not there; see --tensor-parallel-address")
        self._directory = directory
        self._timeout = timeout

    def of_epoch(self, epoch: int) -> Any:
        # All ranks have begun this epoch: no rank looks for those before.
        for path in self._directory.glob(f"{_EPOCH_FILE}*"):
            if int(path.name.removeprefix(_EPOCH_FILE)) < epoch:
                with suppress(FileNotFoundError):
                    path.unlink()
        store = dist.FileStore(str(self._directory / f"{_EPOCH_FILE}{epoch}"), -1)
        store.set_timeout(self._timeout)
        return store

    def own_address(self) -> str:
        return "127.0.0.1"


class TcpRankStore:
    def __init__(self, rank: int, address: str, listen_host: str, timeout: timedelta) -> None:
        """Raises OSError if rank 0 cannot listen."""
        host, port = address.rsplit(":", 1)
        self._host = host.strip("[]")
        self._port = int(port)
        self._timeout = timeout
        self._served = _serve(listen_host, self._port, timeout) if rank == 0 else None

    def of_epoch(self, epoch: int) -> Any:
        # Rank 0 may be another process than in the epoch before.
        store = self._served or dist.TCPStore(
            self._host, self._port, is_master=False, timeout=self._timeout, wait_for_workers=False
        )
        return dist.PrefixStore(f"epoch {epoch}", store)

    def own_address(self) -> str:
        """Return the address of the interface that leads to rank 0."""
        family, kind, _, _, target = socket.getaddrinfo(self._host, self._port, type=socket.SOCK_DGRAM)[0]
        with socket.socket(family, kind) as probe:
            probe.connect(target)  # sends nothing
            return str(probe.getsockname()[0])


def _serve(host: str, port: int, timeout: timedelta) -> Any:
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
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=listening.detach(),
    )
