"""The command as a process of its own: what `pagewire` and `python -m pagewire` run."""

import os
import sys

# `python -m` looks for modules in the working directory first, where a file may have the name of any of them. Only a
# source tree that is run where it lies is found there: it comes last, and children find it too.
if __name__ == "__main__" and not sys.flags.safe_path and os.path.isdir(sys.path[0]):
    _folder = sys.path.pop(0)
    if os.path.samefile(_folder, os.path.join(os.path.dirname(__file__), os.pardir)):
        sys.path.append(_folder)
        os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, (os.environ.get("PYTHONPATH"), _folder)))

# What is opened next would have the number of a standard stream that is closed, and be read or written in its place.
# Reading and writing such a stream is an error; what would go to standard error is lost.
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

# While modules load, Ctrl-C ends the process without a word: an exception might come out of any line of theirs, and
# some would swallow it. Verbs choose for themselves what it does (`pagewire.cli.command`).
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

# As the first process of a container, one without a handler loses the signal that ends it. Until a service has taken it
# over it ends at once, as elsewhere. Images block the signal before Python starts (`deploy/Dockerfile.worker`).
if os.getpid() == 1 and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
    signal.signal(signal.SIGTERM, lambda number, frame: os._exit(128 + number))
if hasattr(signal, "pthread_sigmask"):
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})


def main() -> int:
    try:
        from pagewire import cli

        return cli.main()
    except Exception:
        if not (files := _hiding()):
            raise
        remedy = "rename it, or take its folder off PYTHONPATH"
        print(f"pagewire: error: {files} hides a module of Python's own: {remedy}", file=sys.stderr)
        return 1


def _hiding() -> str:
    """Return the files of PYTHONPATH that were loaded in place of modules of Python's own."""
    folders = set(os.environ.get("PYTHONPATH", "").split(os.pathsep)) - {"", os.path.dirname(os.__file__)}
    names = [f"{name}{end}" for name in sys.stdlib_module_names for end in (".py", f"{os.sep}__init__.py")]
    places = {os.path.join(os.path.abspath(folder), name) for folder in folders for name in names}
    loaded = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    return ", ".join(sorted(places & loaded))


if __name__ == "__main__":
    sys.exit(main())
