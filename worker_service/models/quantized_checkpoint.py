"""A checkpoint whose linear weights are quantised: each is made of several tensors."""

import time
from collections.abc import Iterable, Mapping
from typing import NoReturn

import torch

from pagewire.common.network.checkpoint_files import CONFIG_FILE, FLOAT_BYTES, CheckpointError
from pagewire.common.network.quantization import SECTION, Quantization, QuantizationRule, WeightFormat, unserved
from pagewire.kernels.quantized import MXFP4
from pagewire.kernels.weight import FLOAT8, HeldFormat, HeldWeight, unit_size
from worker_service.models.checkpoint import Checkpoint, Piece, Tensors
from worker_service.models.packing import (
    FaultyTensorError,
    StoredTensor,
    TensorShape,
    copy_floats,
    decode,
    stored_tensors,
    working_bytes,
)

_SUFFIX = ".weight"
# Of CPU time: one pattern and one module take microseconds, and all of the largest models a second or two.
_MAX_MATCH_S = 0.2
_MAX_MATCHING_S = 60.0


def formats_of(quantization: Quantization, modules: Iterable[str]) -> dict[str, WeightFormat]:
    """Return the formats of those linear modules of a checkpoint that are quantised. Raises CheckpointError for
    patterns that take too long."""
    end, found = time.thread_time() + _MAX_MATCHING_S, {}
    for module in modules:
        for rule in quantization.rules:
            left = end - time.thread_time()
            if left <= 0:
                expected = f"patterns that are compared with the model's modules in {_MAX_MATCHING_S} s"
                raise unserved(SECTION, f"{len(quantization.rules)} rules", expected)
            if is_found(rule, module, min(left, _MAX_MATCH_S)):
                if rule.format is not None:
                    found[module] = rule.format
                break
    return found


def is_found(rule: QuantizationRule, module: str, timeout_s: float) -> bool:
    """Return whether a rule speaks of a module. Raises CheckpointError for a regular expression that has no end, for
    which Python's own has no limit."""
    if not rule.source[0]:
        return rule.pattern.search(module) is not None
    import regex  # which only these need

    try:
        return regex.search(rule.pattern.pattern, module, timeout=timeout_s) is not None
    except (TimeoutError, regex.error, RecursionError) as error:
        expected = f"a pattern that is compared with {module} in less than {_MAX_MATCH_S} s"
        raise unserved(*rule.source, expected) from error


class QuantizedCheckpoint(Tensors):
    """The weights of a checkpoint by name, where quantised ones are decoded as they are read. See `Tensors`.

    A linear module whose weight lies there as floats, with nothing of its format beside it, is taken as it is.
    """

    def __init__(self, checkpoint: Checkpoint, formats: Mapping[str, WeightFormat]) -> None:
        """
        Args:
            formats: of modules, by their names in the checkpoint.

        Raises:
            CheckpointError: a file cannot be read.
        """
        self._checkpoint = checkpoint
        self._formats = {
            module: weight_format for module, weight_format in formats.items() if self._is_stored(module, weight_format)
        }
        self.formats = tuple(sorted({weight_format.describe() for weight_format in self._formats.values()}))
        unneeded = {f"{module}.bias" for module, kept in self._formats.items() if kept.layout.startswith("gptq")}
        # Without biases of 0 that some GPTQ checkpoints hold for models without any.
        self.names = frozenset(name for name in checkpoint.names if name not in unneeded or checkpoint.read(name).any())

    def quantized_format(self, name: str, in_size: int) -> HeldFormat | None:
        """See `Tensors.quantized_format`. There is none of groups that have no panels, and of columns whose groups are
        not neighbours."""
        kept = self._format_of(name)
        if kept is None or kept.has_ordered_columns:
            return None
        group_size, is_float = kept.columns or in_size, kept.layout in ("fp8", "float-quantized")
        element = FLOAT8 if is_float else torch.int8
        if not unit_size(element, group_size, in_size):
            return None
        if kept.layout == "mxfp4":
            return MXFP4
        if is_float:
            return HeldFormat(element, group_size, rounds_inputs=kept.rounds_inputs)
        has_half_scales, has_zeros = not self._has_wide_scales(name), not kept.is_symmetric
        return HeldFormat(
            element, group_size, kept.bits, has_half_scales, has_zeros=has_zeros, rounds_inputs=kept.rounds_inputs
        )

    def stored_names(self, name: str) -> frozenset[str]:
        """See `Tensors.stored_names`."""
        module = name.removesuffix(_SUFFIX)
        if self._format_of(name) is None:
            return self._checkpoint.stored_names(name)
        return frozenset(f"{module}.{kind}" for kind in self._kinds(module, self._formats[module]))

    def dtype(self, name: str) -> torch.dtype | None:
        """See `Tensors.dtype`."""
        return self._checkpoint.dtype(name) if self._format_of(name) is None else None

    def working_bytes(self, name: str, num_elements: int) -> int:
        """See `Tensors.working_bytes`."""
        weight_format = self._format_of(name)
        if weight_format is None:
            return self._checkpoint.working_bytes(name, num_elements)
        return working_bytes(weight_format, num_elements)

    def check(self, name: str, piece: Piece) -> None:
        """See `Tensors.check`. Raises ValueError if a rank's part cuts a group."""
        weight_format = self._format_of(name)
        if weight_format is None:
            self._checkpoint.check(name, piece)
            return
        module, (out_size, in_size) = name.removesuffix(_SUFFIX), _whole_shape(piece)
        for kind, stored in self._stored(module, weight_format, out_size, in_size).items():
            self._check_header(f"{module}.{kind}", stored, weight_format)
        columns = _columns(piece)
        group_size = weight_format.columns
        if columns != slice(None) and group_size and (columns.start % group_size or columns.stop % group_size):
            raise ValueError(
                f"--tensor-parallel-size cuts the groups of {group_size} inputs of {name}: a rank would have inputs "
                f"{columns.start} to {columns.stop - 1}; lower it"
            )

    def copy(self, name: str, piece: Piece) -> None:
        """See `Tensors.copy`: the weight is dequantised into the target's dtype."""
        if self._format_of(name) is None:
            self._checkpoint.copy(name, piece)
            return
        copy_floats(piece.target, self.quantized(name, piece))

    def quantized(self, name: str, piece: Piece) -> HeldWeight:
        """See `Tensors.quantized`. Raises CheckpointError if a tensor cannot be read, or holds what it cannot."""
        module, weight_format = name.removesuffix(_SUFFIX), self._formats[name.removesuffix(_SUFFIX)]
        out_size, in_size = _whole_shape(piece)
        kinds = self._stored(module, weight_format, out_size, in_size)
        present = [kind for kind in kinds if f"{module}.{kind}" in self._checkpoint.names]
        tensors = {kind: self._checkpoint.read(f"{module}.{kind}") for kind in present}
        try:
            whole = decode(weight_format, tensors, out_size, in_size)
        except FaultyTensorError as error:
            self._refuse(f"{module}.{error.kind}", str(error), error)
        return whole[piece.index[0] if piece.index else slice(None)].cut(_columns(piece))

    def _has_wide_scales(self, name: str) -> bool:
        module = name.removesuffix(_SUFFIX)
        scales = {f"{module}.weight_scale", f"{module}.scales"} & self._checkpoint.names
        return any(self._checkpoint.header(scale).dtype == "F32" for scale in scales)

    def _format_of(self, name: str) -> WeightFormat | None:
        """The format of a parameter; None: it is stored as it is."""
        return self._formats.get(name.removesuffix(_SUFFIX)) if name.endswith(_SUFFIX) else None

    def _is_stored(self, module: str, weight_format: WeightFormat) -> bool:
        names = self._checkpoint.names
        weight = f"{module}{_SUFFIX}"
        has_others = any(f"{module}.{kind}" in names for kind in self._kinds(module, weight_format) if kind != "weight")
        return has_others or weight not in names or self._checkpoint.header(weight).dtype not in FLOAT_BYTES

    def _kinds(self, module: str, weight_format: WeightFormat) -> list[str]:
        """The ends of the names of a weight's tensors. They do not depend on its size."""
        size = 32 * (weight_format.columns or 1)
        return list(self._stored(module, weight_format, 32, size))

    def _stored(self, module: str, weight_format: WeightFormat, out_size: int, in_size: int) -> dict[str, StoredTensor]:
        """Raises CheckpointError if a weight of these sizes cannot be in this format."""
        try:
            stored = stored_tensors(weight_format, out_size, in_size)
        except ValueError as error:
            raise CheckpointError(
                f"{CONFIG_FILE}: quantization_config does not fit {module}{_SUFFIX}: {error}"
            ) from error
        # Scales of FP8 that belong to a whole tensor have the name that says what they are.
        if "weight_scale_inv" in stored and f"{module}.weight_scale" in self._checkpoint.names:
            stored["weight_scale"] = stored.pop("weight_scale_inv")
        return stored

    def _check_header(self, name: str, stored: StoredTensor, weight_format: WeightFormat) -> None:
        if name not in self._checkpoint.names:
            if stored.is_optional:
                return
            shapes = _alternatives(shape for shapes in stored.shapes.values() for shape in shapes)
            place = f"{weight_format.describe()} has it in shape {shapes}"
            described = self._checkpoint.described(name)
            raise CheckpointError(f"tensor {described} is missing in {self._checkpoint.path}; {place}")
        header = self._checkpoint.header(name)
        if header.dtype not in stored.shapes:
            expected = _alternatives(stored.shapes)
            self._refuse(name, f"is {header.dtype}, expected {expected} for {weight_format.describe()}")
        if header.shape not in stored.shapes[header.dtype]:
            shapes = _alternatives(stored.shapes[header.dtype])
            self._refuse(name, f"has shape {list(header.shape)}, expected {shapes} for {weight_format.describe()}")

    def _refuse(self, name: str, fault: str, cause: Exception | None = None) -> NoReturn:
        described = self._checkpoint.described(name)
        raise CheckpointError(f"tensor {described} in {self._checkpoint.header(name).file} {fault}") from cause


def _alternatives(values: Iterable[str | TensorShape]) -> str:
    texts = (value if isinstance(value, str) else str(list(value)) for value in values)
    return " or ".join(dict.fromkeys(texts))


def _whole_shape(piece: Piece) -> tuple[int, ...]:
    return piece.shape or tuple(piece.target.shape)


def _columns(piece: Piece) -> slice:
    return piece.index[1] if len(piece.index) > 1 else slice(None)
