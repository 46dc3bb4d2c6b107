"""Makes a platform wheel from a pure wheel: it adds the CPU kernels of all variants, so that machines without a
compiler can use them.

    python -m deploy.platform_wheel dist/pagewire-*.whl

The new wheel is written to the folder of the given wheel, which is kept.
"""

import argparse
import platform
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from pagewire.kernels.cpu import BuildError
from pagewire.kernels.cpu.library import AARCH64_FLAGS, VARIANTS, build_library, flags_of
from worker_service.startup.cpu_kernels import environment_build

PLACE = Path("pagewire/kernels/cpu/built")


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument("wheel", type=Path, help="a pure wheel built from this source")
    arguments = parser.parse_args()
    try:
        print(platform_wheel(arguments.wheel))
    except (BuildError, OSError, subprocess.CalledProcessError) as error:
        sys.exit(f"the wheel could not be built: {error}")


def platform_wheel(wheel: Path) -> Path:
    """Build a platform wheel from a pure wheel and return its path. Raises BuildError, OSError or
    CalledProcessError."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        _wheel("unpack", "--dest", name, str(wheel))
        (unpacked,) = folder.iterdir()
        built = unpacked / PLACE
        built.mkdir(parents=True)
        for variant in variants_of(platform.machine()):
            shutil.copyfile(build_library(environment_build(), flags_of(variant)), built / f"{variant}.so")
        packed = folder / "packed"
        packed.mkdir()
        _wheel("pack", "--dest-dir", str(packed), str(unpacked))
        (pure,) = packed.iterdir()
        tag = f"linux_{platform.machine()}"
        _wheel("tags", "--remove", "--platform-tag", tag, str(pure))
        (made,) = packed.iterdir()
        return Path(shutil.move(made, wheel.parent / made.name))


def variants_of(machine: str) -> list[str]:
    """Return the variants that processors of an architecture may run. `machine` is named as by `platform.machine`."""
    if machine == "aarch64":
        return list(AARCH64_FLAGS)
    return [name for name in VARIANTS if name == "portable" or (machine == "x86_64" and name not in AARCH64_FLAGS)]


def _wheel(*arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "wheel", *arguments], check=True, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    main()
