"""Test cases and benchmarks for the Triton kernels, independent of pytest."""

MODULES = tuple(
    f"testing.kernel_checks.{name}"
    for name in (
        "decode_attention",
        "prefill_attention",
        "cache",
        "blocks",
        "gathering",
        "sampler",
        "fused",
        "experts",
        "linear",
        "scaled",
        "states",
    )
)
