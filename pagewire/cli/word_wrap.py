"""Word wrap for text that is streamed to a terminal."""

import os
import re
import unicodedata

FENCES = ("```", "~~~")
# A line that begins with two spaces and is no list item.
_INDENTED = re.compile(r" {2,}[^ *+•\-0-9]")
# The model must not control the terminal.
_CONTROLS = re.compile(r"[\x00-\x09\x0b-\x1f\x7f-\x9f]")
_ZERO_WIDTH = ("Mn", "Me", "Cf")  # combining marks, joiners, variation selectors, direction marks


def width_of(char: str) -> int:
    """Return the number of columns that a terminal uses for a character: 0, 1 or 2."""
    if unicodedata.category(char) in _ZERO_WIDTH or "\u1160" <= char <= "\u11ff":  # vowels and finals of Hangul
        return 0
    return 2 if unicodedata.east_asian_width(char) in "WF" else 1


class WordWrap:
    """Wraps streamed text at words, at the current width of a terminal. The text begins in the first column.

    A word is shown as it arrives. If it reaches the right margin, it moves to the next row. The terminal itself breaks
    words that are longer than a row, text of wide characters, and code, so that copying these restores the text. Code
    is text inside Markdown fences, and lines that begin with two spaces or a tab, except list items.
    """

    def __init__(self, file_descriptor: int) -> None:
        self._file_descriptor = file_descriptor
        self._line = ""
        self._is_fenced = False
        # The text of the current row of the terminal, with a space for each wide character, and its width.
        self._row, self._column = "", 0

    def wrap(self, text: str) -> str:
        """Return the next part of the text with line breaks, and with the escape sequences that move a word. A tab
        becomes four spaces."""
        width = os.get_terminal_size(self._file_descriptor).columns or 80
        if self._column > width:  # the window is narrower now, and the terminal has broken the row
            self._row, self._column = "", self._column % width
        text = _CONTROLS.sub("\ufffd", text.replace("\r", "").replace("\t", " " * 4))
        return "".join(self._place(char, width) for char in text)

    def _place(self, char: str, width: int) -> str:
        if char == "\n":
            self._is_fenced ^= self._line.lstrip().startswith(FENCES)
            self._line, self._row, self._column = "", "", 0
            return char
        num_columns = width_of(char)
        self._line += char
        self._row += " " if num_columns == 2 else char
        self._column += num_columns
        if self._column <= width:
            return char
        _, can_break, word = self._row.rpartition(" ")
        if num_columns == 2 or not can_break or self._is_fenced or _INDENTED.match(self._line):
            self._row, self._column = self._row[-1], num_columns
            return char
        if char == " ":  # no space begins a row
            self._column = width
            return ""
        self._row, start = word, self._column - sum(map(width_of, word))
        self._column -= start
        return f"\n{word}" if word == char else f"\x1b[{start + 1}G\x1b[K\n{word}"
