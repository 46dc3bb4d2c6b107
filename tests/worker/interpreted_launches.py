"""Lets the fake device see the launches of Triton's interpreter as a GPU does, whatever that does to carry them out.

To be imported once the interpreter is chosen: see `testing.kernels.device`.
"""

import pytest
from triton.runtime.interpreter import GridExecutor

from tests.worker.fake_device import as_kernel


def record_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph of the fake device holds a launch of the interpreter as one, by the name of its kernel, not the copies
    that it makes by itself."""
    carry_out = GridExecutor.__call__

    def launch(executor, *args, **kwargs):
        def kernel(*args):
            carry_out(executor, *args, **kwargs)

        kernel.__name__ = executor.fn.__name__
        as_kernel(kernel)(*args)

    monkeypatch.setattr(GridExecutor, "__call__", launch)
