"""How the ranks of a tensor parallel model meet. Models see this and know nothing of processes."""

from typing import Protocol

from torch import Tensor


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
