"""The tensors of a checkpoint that a model does not use, such as further layers, a second head or a vision tower."""

import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import accumulate

_MAX_SHOWN = 3
_NUMBER = re.compile(r"\.\d+\.")


def unused_parts(names: Iterable[str], used: Iterable[str]) -> dict[str, list[str]]:
    """Group the unused tensors of a checkpoint by part. A part is the outermost module without a tensor in `used`, or a
    single tensor of a used module. Return the names of the tensors, keyed by the name of the part."""
    unused, parts = sorted(names), dict[str, list[str]]()
    modules = {module for name in used for module in _modules(name)} if unused else set()
    for name in unused:
        part = next((module for module in _modules(name) if module not in modules), name)
        parts.setdefault(part, []).append(name)
    return parts


def is_apart(part: str, tensors: Collection[str], used: Iterable[str]) -> bool:
    """Return whether a checkpoint's part, as `unused_parts` returns it, cannot change the outputs of a model: whether
    it is a further layer, a module outside the language model, or a module with submodules beside the layers. `used`
    are the tensors of the model. All other parts, such as a bias or a norm, belong to the model's computation."""
    layers = next((match[1] for name in used if (match := re.match(r"(.+?)\.\d+\.", name))), "")
    owner, _, own_name = part.rpartition(".")
    if own_name.isdecimal():
        return owner == layers
    if part in tensors or _NUMBER.search(part):
        return False
    return owner != layers.rpartition(".")[0] or any(name.count(".") > part.count(".") + 1 for name in tensors)


def describe_parts(parts: Mapping[str, Collection[str]]) -> str:
    """Return a log line with the number of unused tensors and the names of their parts. A star replaces the numbers of
    layers, and only the first names are included."""
    shown = list(dict.fromkeys(_NUMBER.sub(".*.", part) for part in parts))
    more = f" and {len(shown) - _MAX_SHOWN} more" if len(shown) > _MAX_SHOWN else ""
    num_tensors = sum(map(len, parts.values()))
    return f"tensors of the checkpoint that are not used: {num_tensors} ({', '.join(shown[:_MAX_SHOWN])}{more})"


def _modules(name: str) -> Iterator[str]:
    """Yield the name of each module that contains a tensor, from the outside in, and then the tensor's own name."""
    return accumulate(name.split("."), "{}.{}".format)
