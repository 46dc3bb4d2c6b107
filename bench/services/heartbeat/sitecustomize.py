"""Times a heartbeat in a front end's event loop: PYTHONPATH=bench/services/heartbeat HEARTBEAT=FILE.

FILE begins with two doubles, which a reader may reset to 0. The first is the longest delay of a beat, in seconds. The
second is the longest CPU time that the process used during a delay. It excludes the time that other processes took.
"""

import asyncio.base_events
import mmap
import os
import struct
import sys
import time

PERIOD_S = 0.002
FORM = struct.Struct("dd")


def with_heartbeat(run_forever):
    def run(loop):
        file = os.open(os.environ["HEARTBEAT"], os.O_RDWR)
        longest = mmap.mmap(file, FORM.size)
        last = [time.perf_counter(), time.process_time()]

        def beat():
            now, computed = time.perf_counter(), time.process_time()
            late, held = now - last[0] - PERIOD_S, computed - last[1]
            before_late, before_held = FORM.unpack_from(longest)
            FORM.pack_into(longest, 0, max(before_late, late), max(before_held, min(late, held)))
            last[:] = now, computed
            loop.call_later(PERIOD_S, beat)

        loop.call_soon(beat)
        run_forever(loop)

    return run


if "frontend" in sys.orig_argv and os.environ.get("HEARTBEAT"):
    asyncio.base_events.BaseEventLoop.run_forever = with_heartbeat(asyncio.base_events.BaseEventLoop.run_forever)
