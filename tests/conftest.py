"""What holds for all tests."""

import os

# Tests run tiny models, several processes at a time: a second OpenMP thread each would only wait for a core.
os.environ.setdefault("OMP_NUM_THREADS", "1")
