"""What holds for all tests."""

import os
import signal
from pathlib import Path

import pytest

from tests.costs import Costs

# Tests run tiny models, several processes at a time: a second OpenMP thread each would only wait for a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")

# Shells start what runs in the background with SIGINT ignored, as would every child: tests of Ctrl-C would not end.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)

# What is compiled is kept in the user's cache, and not every user has a home that can be written to.
HOME = Path(os.path.expanduser("~"))
if not (HOME.is_dir() and os.access(HOME, os.W_OK)):
    os.environ.setdefault("XDG_CACHE_HOME", str(Path(__file__).parents[1] / ".pytest_cache" / "home"))
    os.environ.setdefault("TRITON_HOME", os.environ["XDG_CACHE_HOME"])

# Triton chooses its interpreter while it is imported; transformers imports it before tests/kernels/triton can choose.
DEVICES = ("nvidia*", "nvhost*", "dxg")
if not any(device for pattern in DEVICES for device in Path("/dev").glob(pattern)):
    os.environ["TRITON_INTERPRET"] = "1"


def pytest_configure(config: pytest.Config) -> None:
    config.pluginmanager.register(Costs())
