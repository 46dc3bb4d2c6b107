"""Recording of the launches of Triton's interpreter on the fake device, as a GPU would count them.

Import this module after the interpreter is chosen: see `testing.kernels.device`.
"""

import pytest
from triton.runtime.interpreter import GridExecutor

from tests.worker.fake_device import as_kernel


def record_launches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make a graph of the fake device record a launch of the interpreter as one launch, by the kernel's name.

    The copies that the interpreter makes itself are not recorded.
    """
    call_executor = GridExecutor.__call__

    def launch(executor, *args, **kwargs):
        def kernel(*args):
            call_executor(executor, *args, **kwargs)

        kernel.__name__ = executor.fn.__name__
        as_kernel(kernel)(*args)

    monkeypatch.setattr(GridExecutor, "__call__", launch)
