"""A cache of a model's quantised weights in the user's cache folder, packed as multiplications read them.

The cache avoids quantising the weights at each start. A file belongs to one checkpoint, one quantisation and one build
of the kernels. Its name is a digest of them. If one of them changes, a new file is written, and the older file of the
same checkpoint is removed. A file consists of a JSON header, followed by the packed panels of one module after the
other. Files are read into memory, not mapped: each module's panels are compared with a checksum, and later changes of a
file do not affect a running worker.
"""

import hashlib
import json
import logging
import os
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from itertools import chain, starmap
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch import Tensor, nn

from pagewire.common.process.memory_size import describe_memory
from pagewire.kernels.cpu import CpuKernels, PackedLinear, PanelFormat
from worker_service.host.cpu_operations import CpuExpertProduct, CpuProduct, floats
from worker_service.models.linear import ExpertLinear, KeptProduct, Linear

logger = logging.getLogger(__name__)

# Increase this with every change of the file format, and of the way in which weights are quantised.
_FORMAT = 2
_SUFFIX = ".packed"
_PART_SUFFIX = ".part"
_PART_SECONDS = 3600.0  # longer than any write takes
# A file replaces another file that has equal values of these fields.
_LASTING = ("checkpoint", "quantization", "variant")
_LENGTH_BYTES = _CHECKSUM_BYTES = 8
_MAX_HEADER_BYTES = 1 << 26
_ALIGNMENT = 64
_DTYPE = "torch."


class PackedCache:
    """A file in which a CPU worker keeps a model's quantised and packed weights, so that its next start is faster.

    The file belongs to one model, one quantisation and one build of the C kernels. It is read while the model loads.
    Missing or broken weights are quantised again, and the file is rewritten.
    """

    def __init__(self, folder: Path, kernels: CpuKernels, computed: torch.dtype, identity: Mapping[str, str]) -> None:
        """Open the cache file of quantised weights, if it exists and is valid.

        Args:
            folder: folder of all cache files; it need not exist.
            kernels: the C kernels for whose layout the weights are packed.
            computed: dtype in which models compute.
            identity: describes the model and its quantisation; "checkpoint" is the location of the checkpoint.
        """
        self._kernels = kernels
        self._computed = computed
        own = {"format": str(_FORMAT), "variant": kernels.variant, "kernels": kernels.digest}
        self._identity = {**identity, **own}
        digest = hashlib.sha256(json.dumps(self._identity, sort_keys=True).encode()).hexdigest()
        self.path = folder / f"{digest[:32]}{_SUFFIX}"
        self._start = 0
        self._products = self._open()
        self.num_read = 0

    @property
    def is_empty(self) -> bool:
        """Whether the cache has no quantised weights, for example because its file does not exist or is invalid."""
        return not self._products

    def find(self, target: str) -> KeptProduct | None:
        """Read the packed weight of one module of the model from the cache file. `target` is the module's name.

        Return a function that adds the bias to the weight. Return None if the weight is missing or broken.
        """
        entry = self._products.get(target)
        if entry is None:
            return None
        try:
            packed = self._read(entry)
        except (OSError, ValueError, TypeError, KeyError) as error:
            self._warn(f"{target} in it is broken: {error}")
            self._products.clear()
            return None
        self.num_read += 1
        return lambda bias: CpuProduct(self._kernels, replace(packed, bias=floats(bias)), self._computed)

    def keep(self, model: nn.Module) -> None:
        """Write the quantised weights of a loaded model to the cache file, unless all of them have been read from it.

        If the file cannot be written, log a warning.
        """
        packed = dict(chain.from_iterable(starmap(_packed_weights, model.named_modules())))
        quantized = {name: linear for name, linear in packed.items() if linear.format.element == torch.int8}
        if self.num_read == len(quantized):
            return
        try:
            self._write(quantized)
            self._remove_older()
        except OSError as error:
            logger.warning(
                "the packed weights cannot be kept in %s: %s; each start quantises them anew", self.path, error
            )
            return
        logger.info("stored the packed weights in %s, %s", self.path, describe_memory(self.path.stat().st_size))

    def _open(self) -> dict[str, dict[str, Any]]:
        """Read the header of the cache file. Return the entry of each packed weight by the name of its module.

        The result is empty if the file does not exist. It is also empty, with a warning, if the file is invalid.
        """
        try:
            header, self._start = _read_header(self.path)
            if header.pop("identity") != self._identity:
                raise ValueError("it belongs to another model")
            products: dict[str, dict[str, Any]] = header["products"]
            end = max((entry["start"] + entry["size"] for entry in products.values()), default=0)
            if self.path.stat().st_size != self._start + end:
                raise ValueError(f"it has {self.path.stat().st_size} bytes instead of {self._start + end}")
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            self._warn(str(error))
            return {}
        return products

    def _warn(self, why: str) -> None:
        logger.warning("the packed weights in %s cannot be used, and are made anew: %s", self.path, why)

    def _read(self, entry: Mapping[str, Any]) -> PackedLinear:
        """Read one packed weight from the cache file and check its checksum.

        Raises OSError, ValueError, TypeError or KeyError if the entry is invalid or the file cannot be read.
        """
        panels = torch.empty(entry["size"], dtype=torch.uint8)
        buffer = _bytes(panels)
        with self.path.open("rb") as file:
            file.seek(self._start + entry["start"])
            if file.readinto(buffer) != len(buffer):
                raise ValueError("the file is truncated")
        if xxhash.xxh3_64_hexdigest(buffer) != entry["xxh3"]:
            raise ValueError("its checksum is wrong")
        form = PanelFormat(**{name: _parsed(value) for name, value in entry["format"].items()})
        return PackedLinear(panels, None, entry["in_size"], entry["out_size"], torch.int8, form)

    def _write(self, products: Mapping[str, PackedLinear]) -> None:
        """Write the cache file under a temporary name, then rename it, so that it is always complete."""
        self.path.parent.mkdir(parents=True, exist_ok=True)
        entries: dict[str, dict[str, Any]] = {}
        start = 0
        for name, packed in products.items():
            size = packed.panels.nbytes
            entries[name] = {
                "start": start,
                "size": size,
                "xxh3": xxhash.xxh3_64_hexdigest(_bytes(packed.panels)),
                "in_size": packed.in_size,
                "out_size": packed.out_size,
                "format": {field: _plain(value) for field, value in asdict(packed.format).items()},
            }
            start += -(-size // _ALIGNMENT) * _ALIGNMENT
        header = json.dumps({"identity": self._identity, "products": entries}).encode()
        descriptor, temporary = tempfile.mkstemp(suffix=_PART_SUFFIX, dir=self.path.parent)
        try:
            with open(descriptor, "wb") as file:
                file.write(len(header).to_bytes(_LENGTH_BYTES, "little") + xxhash.xxh3_64_digest(header) + header)
                begin = file.tell()
                for name, packed in products.items():
                    file.seek(begin + entries[name]["start"])
                    file.write(_bytes(packed.panels))
            os.replace(temporary, self.path)
        except BaseException:
            os.unlink(temporary)
            raise

    def _remove_older(self) -> None:
        """Remove older cache files of the same checkpoint, quantisation and kernel variant.

        Also remove incomplete files that killed processes have left.
        """
        for path in self.path.parent.iterdir():
            if path.suffix == _PART_SUFFIX:
                is_useless = _seconds_since_write(path) > _PART_SECONDS
            else:
                is_useless = path.suffix == _SUFFIX and path != self.path and self._replaces(path)
            if is_useless:
                path.unlink(missing_ok=True)
                logger.info("removed %s, which is no longer needed", path)

    def _replaces(self, path: Path) -> bool:
        try:
            identity = _read_header(path)[0]["identity"]
            return all(identity[name] == self._identity[name] for name in _LASTING)
        except (OSError, ValueError, TypeError, KeyError):
            return False


def _packed_weights(name: str, module: nn.Module) -> Iterator[tuple[str, PackedLinear]]:
    """Yield the packed weights of a module of the model, each with the name that `PackedCache.find` expects."""
    if isinstance(module, Linear) and isinstance(module.product, CpuProduct):
        yield name, module.product.packed
    elif isinstance(module, ExpertLinear) and isinstance(module.product, CpuExpertProduct):
        for expert, linear in enumerate(module.product.packed.linears):
            yield f"{name}.{expert}", linear


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Read the JSON header of a cache file. Return the header and the offset at which the weights start.

    Raises OSError if the file cannot be read, and ValueError if the header is invalid.
    """
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        checksum = file.read(_CHECKSUM_BYTES)
        text = file.read(min(length, _MAX_HEADER_BYTES))
        if xxhash.xxh3_64_digest(text) != checksum:
            raise ValueError("the checksum of its header is wrong")
        return json.loads(text), file.tell()


def _seconds_since_write(path: Path) -> float:
    """Return the seconds since the last write to a file, or 0 if the file no longer exists."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _bytes(panels: Tensor) -> memoryview:
    return panels.numpy().data


def _plain(value: Any) -> Any:
    """Convert the value of a field of `PanelFormat` to a JSON value. `_parsed` is the inverse."""
    return str(value) if isinstance(value, torch.dtype) else value


def _parsed(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(_DTYPE):
        return getattr(torch, value.removeprefix(_DTYPE))
    return tuple(value) if isinstance(value, list) else value
