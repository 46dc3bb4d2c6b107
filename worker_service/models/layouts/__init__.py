"""The layouts in which checkpoints store quantised weights, one file per group of related layouts.

To add a layout, define a `Layout` in a file of this package, and parse its name from config.json in
`pagewire/network/quantization.py` or in a module of `pagewire/network/quantization_methods`.
"""

from pkgutil import iter_modules, resolve_name

from pagewire.network.weight_formats import WeightFormat, unserved
from worker_service.models.layouts.layout import Layout

BY_NAME = {
    layout.name: layout
    for found in iter_modules(__path__)
    for layout in vars(resolve_name(f"{__name__}.{found.name}")).values()
    if isinstance(layout, Layout)
}


def layout_of(module: str, kept: WeightFormat) -> Layout:
    """Return the layout (the set of tensors and their encoding) in which the quantised weight of a linear module is
    stored. Raises CheckpointError if Pagewire does not support the layout."""
    if kept.layout not in BY_NAME:
        raise unserved(f"{module}.weight", kept.layout, f"in one of {', '.join(BY_NAME)}")
    return BY_NAME[kept.layout]
