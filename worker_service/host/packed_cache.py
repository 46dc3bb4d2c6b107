"""Keeps a model's quantised weights in the user's cache, packed as products read them, from one start to the next.

A file holds them for a checkpoint, a quantisation and a build of the kernels, of which its name is a digest: where one
of them has changed, a new file is made, and what was kept for the same checkpoint before is removed. Behind a header in
JSON lie the panels of one module after the other. They are read, not mapped: each is compared with its checksum, and
what becomes of the file later does not touch a worker that runs.
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

# Rises with every change of what a file means, and of how weights are quantised.
_FORMAT = 1
_SUFFIX = ".packed"
_PART_SUFFIX = ".part"
_PART_SECONDS = 3600.0  # no writing takes longer
# Two files that agree in these hold the same in different states.
_LASTING = ("checkpoint", "quantization", "variant")
_LENGTH_BYTES = _CHECKSUM_BYTES = 8
_MAX_HEADER_BYTES = 1 << 26
_ALIGNMENT = 64
_DTYPE = "torch."


class PackedCache:
    """The file of one model, quantisation and build of the kernels, if there is one. It is read while a model loads;
    what is missing or broken is made anew, and the file with it."""

    def __init__(self, folder: Path, kernels: CpuKernels, computed: torch.dtype, identity: Mapping[str, str]) -> None:
        """
        Args:
            folder: of all files; it need not exist.
            computed: what models compute in.
            identity: of the model and its quantisation; "checkpoint" is the place it comes from.
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
        """Whether there is no file, or none of any use."""
        return not self._products

    def find(self, target: str) -> KeptProduct | None:
        """Read the product of a module, by its name in the model; None: it is not there, or broken."""
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
        """Write the products of a loaded model that are quantised, unless all of them have been read.

        A folder that cannot be written to is told in a warning.
        """
        packed = dict(chain.from_iterable(starmap(_packed, model.named_modules())))
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
        logger.info("kept the packed weights in %s, %s", self.path, describe_memory(self.path.stat().st_size))

    def _open(self) -> dict[str, dict[str, Any]]:
        """Return what the file says of each product."""
        try:
            header, self._start = _read_header(self.path)
            if header.pop("identity") != self._identity:
                raise ValueError("it is of another model")
            products: dict[str, dict[str, Any]] = header["products"]
            end = max((entry["start"] + entry["size"] for entry in products.values()), default=0)
            if self.path.stat().st_size != self._start + end:
                raise ValueError(f"it has {self.path.stat().st_size} bytes of {self._start + end}")
        except (FileNotFoundError, NotADirectoryError):
            return {}
        except (OSError, ValueError, TypeError, KeyError, AttributeError) as error:
            self._warn(str(error))
            return {}
        return products

    def _warn(self, why: str) -> None:
        logger.warning("the packed weights in %s cannot be used, and are made anew: %s", self.path, why)

    def _read(self, entry: Mapping[str, Any]) -> PackedLinear:
        """Raises OSError, ValueError, TypeError or KeyError if there is no sense in it."""
        panels = torch.empty(entry["size"], dtype=torch.uint8)
        buffer = _bytes(panels)
        with self.path.open("rb") as file:
            file.seek(self._start + entry["start"])
            if file.readinto(buffer) != len(buffer):
                raise ValueError("the file is cut off")
        if xxhash.xxh3_64_hexdigest(buffer) != entry["xxh3"]:
            raise ValueError("it is not what was written")
        form = PanelFormat(**{name: _parsed(value) for name, value in entry["format"].items()})
        return PackedLinear(panels, None, entry["in_size"], entry["out_size"], torch.int8, form)

    def _write(self, products: Mapping[str, PackedLinear]) -> None:
        """Write a file under another name first, so that it is whole whenever it is there."""
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
        """Remove what was kept for the same checkpoint, quantisation and kind of processor, and what others that were
        killed have left half written."""
        for path in self.path.parent.iterdir():
            if path.suffix == _PART_SUFFIX:
                is_useless = _age(path) > _PART_SECONDS
            else:
                is_useless = path.suffix == _SUFFIX and path != self.path and self._replaces(path)
            if is_useless:
                path.unlink(missing_ok=True)
                logger.info("removed %s, which is of no more use", path)

    def _replaces(self, path: Path) -> bool:
        try:
            identity = _read_header(path)[0]["identity"]
            return all(identity[name] == self._identity[name] for name in _LASTING)
        except (OSError, ValueError, TypeError, KeyError):
            return False


def _packed(name: str, module: nn.Module) -> Iterator[tuple[str, PackedLinear]]:
    """Go through the packed weights of a module's own product, by the names of those that they were loaded for."""
    if isinstance(module, Linear) and isinstance(module.product, CpuProduct):
        yield name, module.product.packed
    elif isinstance(module, ExpertLinear) and isinstance(module.product, CpuExpertProduct):
        for expert, linear in enumerate(module.product.packed.linears):
            yield f"{name}.{expert}", linear


def _read_header(path: Path) -> tuple[dict[str, Any], int]:
    """Return a file's header, and where its panels begin. Raises OSError or ValueError."""
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_LENGTH_BYTES), "little")
        checksum = file.read(_CHECKSUM_BYTES)
        text = file.read(min(length, _MAX_HEADER_BYTES))
        if xxhash.xxh3_64_digest(text) != checksum:
            raise ValueError("its header is not what was written")
        return json.loads(text), file.tell()


def _age(path: Path) -> float:
    """Seconds since a file was written to; 0 if it is gone."""
    try:
        return time.time() - path.stat().st_mtime
    except FileNotFoundError:
        return 0.0


def _bytes(panels: Tensor) -> memoryview:
    return panels.numpy().data


def _plain(value: Any) -> Any:
    """Make JSON of a field of `PanelFormat`; `_parsed` reads it."""
    return str(value) if isinstance(value, torch.dtype) else value


def _parsed(value: Any) -> Any:
    if isinstance(value, str) and value.startswith(_DTYPE):
        return getattr(torch, value.removeprefix(_DTYPE))
    return tuple(value) if isinstance(value, list) else value
