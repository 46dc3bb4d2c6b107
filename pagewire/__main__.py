"""The command as a process of its own: what `pagewire` and `python -m pagewire` run."""

import signal
import sys

# While modules load, Ctrl-C ends the process without a word: an exception might come out of any line of theirs, and
# some would swallow it. Verbs choose for themselves what it does (`pagewire.cli.command`).
if signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from pagewire import cli


def main() -> int:
    return cli.main()


if __name__ == "__main__":
    sys.exit(main())
