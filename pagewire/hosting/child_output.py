"""The output of a child process, split into lines of bounded length, so that no line can stop the reader."""

import codecs

READ_BYTES = 65_536  # at a time
# The rest of a longer line is dropped.
MAX_LINE_CHARS = 8192


class ChildOutput:
    """Splits the output of a child process, which is read in chunks of bytes, into lines of text. Overlong lines are
    truncated."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._line = ""  # the kept part of the unfinished line
        self._num_left_out = 0  # dropped characters of the unfinished line

    def add(self, data: bytes) -> list[str]:
        """Add a chunk of the child process's output, and return the lines that the chunk completes."""
        first, *others = self._decoder.decode(data).split("\n")
        self._extend(first)
        lines = []
        for text in others:
            lines.append(self._take())
            self._extend(text)
        return lines

    def end(self) -> list[str]:
        """Return the rest of the output after the child process has closed it. This is a list with the last line if the
        line has no line end, otherwise an empty list."""
        return [self._take()] if self._line else []

    def _extend(self, text: str) -> None:
        room = MAX_LINE_CHARS - len(self._line)
        self._line += text[:room]
        self._num_left_out += len(text[room:])

    def _take(self) -> str:
        notice = f" [{self._num_left_out} more characters]" if self._num_left_out else ""
        line, self._line, self._num_left_out = self._line + notice, "", 0
        return line
