"""The entry point of the command, for both `pagewire` and `python -m pagewire`."""

import os
import sys

# `python -m` searches the working directory first, where a file may have the name of any module. Remove that directory
# from the search path. If the working directory is the source tree itself, append it at the end instead, and pass it to
# child processes.
if __name__ == "__main__" and not sys.flags.safe_path and os.path.isdir(sys.path[0]):
    _folder = sys.path.pop(0)
    if os.path.samefile(_folder, os.path.join(os.path.dirname(__file__), os.pardir)):
        sys.path.append(_folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), _folder)))

# If a standard stream is closed, the next opened file would get its number, and would be read or written in its place.
# Open the null device under that number instead, in a mode in which reading standard input and writing standard output
# are errors. Writes to standard error are discarded.
if None in (sys.stdin, sys.stdout, sys.stderr):
    for _number, _name, _mode, _access in (
        (0, "stdin", "r", os.O_WRONLY),
        (1, "stdout", "w", os.O_RDONLY),
        (2, "stderr", "w", os.O_RDWR),
    ):
        if getattr(sys, _name) is None:
            os.set_inheritable(os.open(os.devnull, _access), True)
            setattr(sys, _name, open(_number, _mode, errors="backslashreplace", closefd=False))  # noqa: SIM115

import signal

# While modules load, Ctrl-C ends the process without a message. KeyboardInterrupt could be raised in any line of any
# module, and some modules would swallow it. Each verb later installs its own handling of Ctrl-C
# (`pagewire.cli.command`).
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# The first process of a container ignores a SIGTERM for which it has no handler. Until a service installs its own
# handler, SIGTERM ends the process at once, as elsewhere. Container images block the signal before Python starts
# (`deploy/Dockerfile.worker`).
if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
if hasattr(signal, "pthread_sigmask"):
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def main() -> int:
    try:
        from pagewire import cli

        return cli.main()
    except Exception:
        if not (files := _shadowing_files()):
            raise
        remedy = "rename it, or take its folder off PYTHONPATH"
        print(f"pagewire: error: {files} hides a module of Python's own: {remedy}", file=sys.stderr)
        return 1


def _shadowing_files() -> str:
    """Return the paths of user files that Python loaded instead of standard library modules, joined by ", ". This
    happens if a folder on PYTHONPATH has a file with the name of a standard module."""
    folders = set(os.environ.get("PYTHONPATH", "").split(os.pathsep)) - {"", os.path.dirname(os.__file__)}
    names = [f"{name}{end}" for name in sys.stdlib_module_names for end in (".py", f"{os.sep}__init__.py")]
    places = {os.path.join(os.path.abspath(folder), name) for folder in folders for name in names}
    loaded = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return ", ".join(sorted(places & loaded))


if __name__ == "__main__":
    sys.exit(main())
