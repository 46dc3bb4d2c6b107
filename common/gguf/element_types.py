"""The types that a GGUF file gives its tensors' elements, by number."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ElementType:
    """A type that is served. Elements are stored in blocks, which no row shares with another."""

    name: str
    block_size: int  # elements
    block_bytes: int

    @property
    def is_quantized(self) -> bool:
        return self.block_size > 1


SERVED_TYPES = {
    0: ElementType("F32", 1, 4),
    1: ElementType("F16", 1, 2),
    2: ElementType("Q4_0", 32, 18),
    3: ElementType("Q4_1", 32, 20),
    6: ElementType("Q5_0", 32, 22),
    7: ElementType("Q5_1", 32, 24),
    8: ElementType("Q8_0", 32, 34),
    12: ElementType("Q4_K", 256, 144),
    13: ElementType("Q5_K", 256, 176),
    14: ElementType("Q6_K", 256, 210),
    30: ElementType("BF16", 1, 2),
    39: ElementType("MXFP4", 32, 17),
}
_OTHER_NAMES = {
    9: "Q8_1",
    10: "Q2_K",
    11: "Q3_K",
    15: "Q8_K",
    16: "IQ2_XXS",
    17: "IQ2_XS",
    18: "IQ3_XXS",
    19: "IQ1_S",
    20: "IQ4_NL",
    21: "IQ3_S",
    22: "IQ2_S",
    23: "IQ4_XS",
    24: "I8",
    25: "I16",
    26: "I32",
    27: "I64",
    28: "F64",
    29: "IQ1_M",
    34: "TQ1_0",
    35: "TQ2_0",
    40: "NVFP4",
}


def type_name(number: int) -> str:
    """Return the name of a type, or its number where it has none."""
    served = SERVED_TYPES.get(number)
    return served.name if served is not None else _OTHER_NAMES.get(number, f"number {number}")
