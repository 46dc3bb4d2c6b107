"""A checkpoint with quantised linear weights, each of which is stored as several tensors."""

import time
from collections.abc import Iterable, Mapping
from itertools import accumulate, chain
from typing import NamedTuple, NoReturn

from pagewire.kernels.weight import StoredFormat, StoredWeight
from pagewire.network.checkpoint_files import CONFIG_FILE, FLOAT_BYTES, CheckpointError
from pagewire.network.weight_formats import SECTION, Quantization, QuantizationRule, WeightFormat, unserved
from worker_service.models.checkpoint import Checkpoint, Piece, Tensors
from worker_service.models.layouts import layout_of
from worker_service.models.layouts.layout import (
    FaultyTensorError,
    Layout,
    StoredTensor,
    TensorShape,
    copy_floats,
)

_SUFFIX = ".weight"
# Limits on CPU time. Matching one pattern with one module takes microseconds; the largest models take a second or two
# in total.
_MAX_MATCH_S = 0.2
_MAX_MATCHING_S = 60.0


def formats_of(quantization: Quantization, modules: Iterable[str]) -> dict[str, WeightFormat]:
    """Find the quantised format of each linear module according to the rules in the checkpoint's quantization_config.
    The first rule that matches a module applies. Return the formats keyed by the names of the modules; modules that are
    not quantised are left out. Raises CheckpointError if a pattern is invalid or takes too long to match (0.2 s for one
    module, 60 s in total)."""
    end, found = time.thread_time() + _MAX_MATCHING_S, {}
    for module in modules:
        for rule in quantization.rules:
            left = end - time.thread_time()
            if left <= 0:
                expected = f"patterns that can be matched with all modules in {_MAX_MATCHING_S} s"
                raise unserved(SECTION, f"{len(quantization.rules)} rules", expected)
            if is_found(rule, module, min(left, _MAX_MATCH_S)):
                if rule.format is not None:
                    found[module] = rule.format
                break
    return found


def is_found(rule: QuantizationRule, module: str, timeout_s: float) -> bool:
    """Return whether a rule of the checkpoint's quantization_config applies to a module. Raises CheckpointError if the
    rule's regular expression is invalid or takes longer than `timeout_s` seconds to match. The package `regex` is used
    because Python's `re` has no timeout."""
    if rule.names:
        return not rule.names.isdisjoint(accumulate(module.split("."), "{}.{}".format))
    if not rule.source[0]:
        return rule.pattern.search(module) is not None
    import regex  # needed only for the checkpoint's own patterns

    try:
        return regex.search(rule.pattern.pattern, module, timeout=timeout_s) is not None
    except (TimeoutError, regex.error, RecursionError) as error:
        expected = f"a pattern that can be matched with {module} in less than {_MAX_MATCH_S} s"
        raise unserved(*rule.source, expected) from error


class _Weight(NamedTuple):
    """The quantised weight of one linear module of a checkpoint, which is stored as several tensors."""

    module: str
    format: WeightFormat
    layout: Layout


class QuantizedCheckpoint(Tensors):
    """The weights of a checkpoint in which the weights of some linear modules are quantised.

    Quantised weights are decoded as they are read. If the checkpoint stores the weight of such a module as floats,
    without the other tensors of the quantised format (such as scales), the weight is read as floats.
    """

    def __init__(self, checkpoint: Checkpoint, formats: Mapping[str, WeightFormat]) -> None:
        """Read quantised weights from the tensors of `checkpoint`. `formats` maps the names of linear modules to the
        quantised formats of their weights. Raises CheckpointError if a file cannot be read or the layout of a weight is
        unknown."""
        self._checkpoint = checkpoint
        weights = [_Weight(module, kept, layout_of(module, kept)) for module, kept in formats.items()]
        self._weights = {f"{weight.module}{_SUFFIX}": weight for weight in weights if self._is_stored(weight)}
        self.formats = tuple(sorted({weight.format.describe() for weight in self._weights.values()}))
        unneeded = {f"{weight.module}.bias" for weight in self._weights.values() if weight.layout.may_have_zero_biases}
        self.names = frozenset(name for name in checkpoint.names if name not in unneeded or checkpoint.read(name).any())

    def check_embedding(self, module: str) -> None:
        """Raise CheckpointError if the embedding table of the given name is quantised, which is not supported."""
        parts = sorted(name for name in self.names if name.rpartition(".")[0] == module)
        others = [name for name in parts if name != f"{module}{_SUFFIX}"]
        if others:
            self._refuse(others[0], "belongs to a quantised embedding; only embeddings in floats are supported")

    def format(self, name: str, in_size: int) -> StoredFormat | None:
        """Return the format in which a weight with `in_size` inputs can be kept in memory. Return None if the weight is
        missing, or if it must be dequantised to floats."""
        weight, stored = self._weights.get(name), self.stored_names(name) & self._checkpoint.names
        if weight is None:
            return self._checkpoint.format(name, in_size)
        has_wide_scales = any(self._checkpoint.header(tensor).dtype == "F32" for tensor in stored)
        return weight.layout.stored_format(weight.format, in_size, has_wide_scales)

    def num_bytes(self) -> int:
        """Return the size of all safetensors files that contain weights, in bytes."""
        return self._checkpoint.num_bytes()

    def stored_names(self, name: str) -> frozenset[str]:
        """Return the names of the checkpoint tensors (codes, scales, zero points) that store the weight `name`. The
        tensors need not exist."""
        weight = self._weights.get(name)
        return self._checkpoint.stored_names(name) if weight is None else frozenset(self._names(weight).values())

    def working_bytes(self, name: str, num_elements: int) -> int:
        """Return an upper bound on the temporary memory, in bytes, needed to read and decode a weight with
        `num_elements` elements. The memory of the target tensor is not included."""
        weight = self._weights.get(name)
        if weight is None:
            return self._checkpoint.working_bytes(name, num_elements)
        return weight.layout.working_bytes(weight.format, num_elements)

    def check(self, name: str, piece: Piece) -> None:
        """Check that all tensors that store a weight exist and have the expected dtypes and shapes. Raise
        CheckpointError if not. Raise ValueError if this rank's part of the weight would begin or end within a group of
        inputs that share a scale."""
        weight = self._weights.get(name)
        if weight is None:
            self._checkpoint.check(name, piece)
            return
        for kind, stored in self._stored(weight, *(piece.shape or piece.target.shape)).items():
            self._check_header(f"{weight.module}.{kind}", stored, weight.format)
        (_, columns), group_size = piece.rows_and_columns(), weight.format.columns
        if columns != slice(None) and group_size and (columns.start % group_size or columns.stop % group_size):
            raise ValueError(
                f"--tensor-parallel-size cuts the groups of {group_size} inputs of {name}: this rank would get inputs "
                f"{columns.start} to {columns.stop - 1}; lower it"
            )

    def copy(self, name: str, piece: Piece) -> None:
        """Read a weight, or a part of it, into the target of `piece`. A quantised weight is dequantised to the target's
        dtype. The piece must have passed `check`. Raises CheckpointError if a tensor cannot be read or has invalid
        content."""
        if name in self._weights:
            copy_floats(piece.target, self.quantized(name, piece))
        else:
            self._checkpoint.copy(name, piece)

    def quantized(self, name: str, piece: Piece) -> StoredWeight:
        """Read and decode a quantised weight, or the rows and columns that `piece` selects, without conversion to
        floats where possible. Raises CheckpointError if a tensor cannot be read or has invalid content."""
        weight, (rows, columns) = self._weights[name], piece.rows_and_columns()
        names = self._names(weight)
        tensors = {kind: self._checkpoint.read(each) for kind, each in names.items() if each in self._checkpoint.names}
        try:
            whole = weight.layout.decode(weight.format, tensors, *(piece.shape or piece.target.shape))
        except FaultyTensorError as error:
            kind, fault = error.args
            self._refuse(names[kind], fault, error)
        return piece.choose_rows(whole[rows]).cut(columns)

    def _is_stored(self, weight: _Weight) -> bool:
        names, own_name = self._checkpoint.names, f"{weight.module}{_SUFFIX}"
        has_others = any(name in names for name in self._names(weight).values() if name != own_name)
        return has_others or own_name not in names or self._checkpoint.header(own_name).dtype not in FLOAT_BYTES

    def _names(self, weight: _Weight) -> dict[str, str]:
        """Return the full names of the tensors (codes, scales and so on) that store a quantised weight, keyed by their
        suffixes, such as "qweight". The names are the same for weights of all sizes."""
        size = 32 * (weight.format.columns or 1)
        return {kind: f"{weight.module}.{kind}" for kind in self._stored(weight, 32, size)}

    def _stored(self, weight: _Weight, out_size: int, in_size: int) -> dict[str, StoredTensor]:
        """Return the expected dtypes and shapes of the tensors that store a quantised weight [out_size, in_size], keyed
        by the suffixes of their names. Raises CheckpointError if a weight of these sizes cannot have this format."""
        try:
            stored = weight.layout.stored(weight.format, out_size, in_size)
        except ValueError as error:
            raise CheckpointError(
                f"{CONFIG_FILE}: quantization_config does not fit {weight.module}{_SUFFIX}: {error}"
            ) from error
        return {
            tensor.other_kind if f"{weight.module}.{tensor.other_kind}" in self._checkpoint.names else kind: tensor
            for kind, tensor in stored.items()
        }

    def _check_header(self, name: str, stored: StoredTensor, weight_format: WeightFormat) -> None:
        if name not in self._checkpoint.names:
            if stored.is_optional:
                return
            shapes = _alternatives(chain.from_iterable(stored.shapes.values()))
            place = f"{weight_format.describe()} requires it in {f'shape {shapes}' if shapes else 'any shape'}"
            raise CheckpointError(
                f"tensor {self._checkpoint.described(name)} is missing in {self._checkpoint.path}; {place}"
            )
        header = self._checkpoint.header(name)
        if header.dtype not in stored.shapes:
            expected = _alternatives(stored.shapes)
            self._refuse(name, f"is {header.dtype}, expected {expected} for {weight_format.describe()}")
        allowed = stored.shapes[header.dtype]
        if allowed and header.shape not in allowed:
            shapes = _alternatives(allowed)
            self._refuse(name, f"has shape {list(header.shape)}, expected {shapes} for {weight_format.describe()}")

    def _refuse(self, name: str, fault: str, cause: Exception | None = None) -> NoReturn:
        described = self._checkpoint.described(name)
        raise CheckpointError(f"tensor {described} in {self._checkpoint.header(name).file} {fault}") from cause


def _alternatives(values: Iterable[str | TensorShape]) -> str:
    texts = (value if isinstance(value, str) else str(list(value)) for value in values)
    return " or ".join(dict.fromkeys(texts))
