"""What the Triton kernels are compared with and timed on: cases of each kernel, free of pytest."""

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
    )
)
