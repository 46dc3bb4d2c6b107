"""A simulator of the step loop, for `pagewire simulate`: a trace of requests, and a worker with modelled step times.

Only the step loop, its core and the trace are real. Time is a number that jumps from event to event.
"""
