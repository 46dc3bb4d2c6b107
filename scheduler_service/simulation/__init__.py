"""The step loop driven by a trace of requests and a worker that costs modelled time, for `pagewire simulate`.

Nothing here is real but the step loop, its core and the trace: time is a number that jumps from event to event.
"""
