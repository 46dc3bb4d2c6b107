"""Creates the virtual environment of a clone and prints progress: `python3 deploy/environment.py .venv`.

The environment is marked as ready only when it is complete. The next run repairs an interrupted one, and a second
concurrent run waits for the first.
"""

import contextlib
import fcntl
import re
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
SECONDS_BETWEEN_LINES = 4.0
SIZE = "2 GB, or 5 GB where torch comes with CUDA"
NOT_FOUND = re.compile(r"requirement (.*) \(from versions: none\)")
NAME = re.compile(r"(?:Collecting|Processing|Requirement already satisfied:|Downloading) (\S+)")


def main() -> int:
    """Create or update the environment. Make runs this script if the environment is older than its inputs.

    Packages that are already installed are kept.
    """
    folder = Path(sys.argv[1])
    found = installed_at(folder)
    with open(f"{folder}.lock", "w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another make, which installs into {folder}", flush=True)
            fcntl.flock(lock, fcntl.LOCK_EX)
        except OSError:
            pass  # the file system has no locks, so that runs do not wait for each other
        if installed_at(folder) != found:
            return 0  # the run that this one waited for has finished the installation
        remove_partial_installs(folder)
        if not has_pip(folder):
            print(f"making {folder} with Python {sys.version.split()[0]}", flush=True)
            with contextlib.suppress(OSError):  # if the folder cannot be created, `venv` reports the reason
                folder.mkdir(exist_ok=True)
                log_of(folder).touch()
            # If the environment is incomplete, use the Python that started its creation.
            python = getattr(sys, "_base_executable", sys.executable)
            code, said = make(str(python), folder, lock.fileno())
            if code:
                print(f"pagewire: error: {python} cannot create an environment: {why_not(code, said)}", file=sys.stderr)
                return 1
        return install(folder, lock.fileno())


def installed_at(folder: Path) -> int:
    """Return the time of the last complete install into the environment, in nanoseconds, or 0."""
    ready = folder / ".ready"
    return ready.stat().st_mtime_ns if ready.exists() else 0


def log_of(folder: Path) -> Path:
    """Return the path of pip's log. The file exists as soon as a run has started to install packages."""
    return folder / "pip.log"


def has_pip(folder: Path) -> bool:
    """Return whether the environment is complete, that is, its Python has its own pip with a RECORD file.

    The RECORD file is written after all other files of pip. A pip for another version of Python does not count.
    """
    command = [folder / "bin" / "python", "-m", "pip", "--version"]
    try:
        asked = subprocess.run(command, capture_output=True, text=True, check=False)
    except OSError:
        return False  # there is no Python, or it does not run on this machine
    version = re.search(r"\(python (\S+)\)", asked.stdout)
    return version is not None and any(folder.glob(f"lib/python{version[1]}/site-packages/pip-*.dist-info/RECORD"))


def remove_partial_installs(folder: Path) -> None:
    """Remove partly installed packages and dangling links to Python.

    pip considers a package complete if its dist-info folder exists, but writes the RECORD file last. Packages are
    removed only if this script has installed packages here before, because other installers may write no RECORD. `venv`
    does not replace a link to a Python that no longer exists.
    """
    for link in folder.glob("bin/python*"):
        if not link.exists():
            link.unlink()
    for about in folder.glob("lib/python3*/site-packages/*.dist-info"):
        is_whole = (about / "RECORD").exists() or about.is_symlink() or not about.is_dir()
        if log_of(folder).exists() and not is_whole:
            shutil.rmtree(about)


def make(python: str, folder: Path, lock: int) -> "tuple[int, str]":
    """Create the environment with `venv`. Return the exit code and the output of `venv`."""
    with tempfile.TemporaryFile("w+", errors="replace") as written:
        command = [python, "-m", "venv", str(folder)]
        making = subprocess.Popen(command, stdout=written, stderr=subprocess.STDOUT, pass_fds=[lock])
        try:
            watch(making, lambda: "putting pip into it")
        finally:
            making.kill()
            making.wait()
        written.seek(0)
        return making.returncode, written.read()


def why_not(code: int, said: str) -> str:
    """Return the reason, in one line, why `venv` or pip ended with this exit code and output."""
    missing = NOT_FOUND.search(said)
    if missing is not None:
        return (
            f"no package index was reached that has {missing[1]}; with a proxy, set HTTPS_PROXY, with an index of "
            "your own PIP_INDEX_URL"
        )
    if "ensurepip" in said:
        version = f"{sys.version_info[0]}.{sys.version_info[1]}"
        return f"on Debian and Ubuntu apt install python{version}-venv, or name another, make PYTHON=/path/to/python3"
    lines = [line.strip() for line in said.splitlines() if line.strip()]
    errors = [line.removeprefix("ERROR: ") for line in lines if line.startswith("ERROR:")]
    return (errors or lines or [f"exit code {code}"])[-1]


def install(folder: Path, lock: int) -> int:
    """Install the packages with pip, and print a progress line every few seconds. Return the exit code, 0 or 1.

    pip's output goes to the log file. pip inherits the lock, because it keeps running if this script is killed.
    """
    constraints = (ROOT / "constraints.txt").read_text().splitlines()
    num_packages = sum("==" in line for line in constraints)
    log = log_of(folder)
    print(f"installing about {num_packages} packages into {folder} ({SIZE}); {log} has the details", flush=True)
    command = [str(folder / "bin" / "python"), "-m", "pip", "install", "--no-color", "--progress-bar", "off"]
    command += ["-c", "constraints.txt", "-e", ".[dev]"]
    with log.open("w") as written:
        pip = subprocess.Popen(command, cwd=ROOT, stdout=written, stderr=subprocess.STDOUT, pass_fds=[lock])
        try:
            watch(pip, lambda: how_far(folder, log.read_text(errors="replace"), num_packages))
        finally:
            pip.kill()
            pip.wait()
    if pip.returncode:
        said = log.read_text(errors="replace")
        print(f"pagewire: error: {why_not(pip.returncode, said)} ({log} has the full output of pip)", file=sys.stderr)
        return 1
    (folder / ".ready").touch()
    return 0


def watch(process: "subprocess.Popen[Any]", tell: Callable[[], str]) -> None:
    """Print the activity of a process every few seconds until the process ends."""
    started, told = time.monotonic(), ""
    while True:
        try:
            process.wait(SECONDS_BETWEEN_LINES)
        except subprocess.TimeoutExpired:
            line = tell()
            seconds = f" ({time.monotonic() - started:.0f} s)"
            print(f"  {line}{seconds if line == told else ''}", flush=True)
            told = line
        else:
            return


def how_far(folder: Path, said: str, num_packages: int) -> str:
    """Return the current activity of pip in one line."""
    if "Installing collected packages" in said:
        num_installed = len(list(folder.glob("lib/python3*/site-packages/*.dist-info")))
        return f"installed {num_installed} packages of about {num_packages}"
    found = re.findall(r"^(?:Collecting|Processing|Requirement already satisfied:) \S+", said, re.MULTILINE)
    last = said.rstrip().rpartition("\n")[2].strip()
    if "Retrying" in last:
        return "no answer from the package index, trying again"
    name = NAME.match(last)
    doing = last if last.startswith("Downloading") else Path(name[1]).name if name else "looking for versions"
    return f"found {len(found)} packages of about {num_packages}: {doing}"


if __name__ == "__main__":
    try:
        sys.exit(main())
    except KeyboardInterrupt:
        sys.exit(130)
