"""Kernels for GPUs, in Triton: functions on tensors. What each computes is specified in `kernels/reference.py`.

The worker attends by `PagedAttention`, once a step for all layers. `paged_attention_v1`, `paged_attention_v2` and
`paged_prefill` are its parts for callers with one layer, and for those who tune tiles. A `Selection`, for attention
that reads some blocks of a row, is for such callers too: no model that is served has it.
"""
