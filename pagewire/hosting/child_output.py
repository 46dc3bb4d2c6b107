"""What a child process writes, as lines of bounded length: no line of a child can end the reading of its output."""

import codecs

READ_BYTES = 65_536  # at a time
# Of a longer line, the rest is left out.
MAX_LINE_CHARS = 8192


class ChildOutput:
    """Makes lines of the pieces in which output comes."""

    def __init__(self) -> None:
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._line = ""  # what has come of the line that has not ended, and is told of it
        self._num_left_out = 0  # of its characters

    def add(self, data: bytes) -> list[str]:
        """Returns the lines that end with this piece."""
        first, *others = self._decoder.decode(data).split("\n")
        self._extend(first)
        lines = []
        for text in others:
            lines.append(self._take())
            self._extend(text)
        return lines

    def end(self) -> list[str]:
        """Returns the line that has no end, if there is one, when no more will come."""
        return [self._take()] if self._line else []

    def _extend(self, text: str) -> None:
        room = MAX_LINE_CHARS - len(self._line)
        self._line += text[:room]
        self._num_left_out += len(text[room:])

    def _take(self) -> str:
        notice = f" [{self._num_left_out} more characters]" if self._num_left_out else ""
        line, self._line, self._num_left_out = self._line + notice, "", 0
        return line
