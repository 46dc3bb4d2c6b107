"""GPU kernels in Triton, as functions on tensors. `kernels/reference.py` specifies the result of each function, and
`kernels/states.py` the functions of `states.py`, which the worker does not use yet.

The worker uses `PagedAttention`, which it prepares once per step for all layers. `paged_attention_v1`,
`paged_attention_v2` and `paged_prefill` compute one layer each; they are for other callers and for tuning tiles.
"""
