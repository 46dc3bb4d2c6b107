"""A map of the KV cache blocks for a terminal. A cell stands for one block, or for several in a large pool."""

import re
from collections import Counter
from collections.abc import Sequence
from string import ascii_letters

from pagewire.client.server_info import CACHED, FREE, HELD, MOVING, SHARED, BlockMap
from pagewire.hosting.printable import printable

PLAIN = "\033[0m"
# The mark and the colour of a cell that does not belong to a single request.
MARKS = {FREE: ".", CACHED: "+", MOVING: "~", SHARED: "#"}
NAMES = {FREE: "free", CACHED: "cached", SHARED: "shared", MOVING: "moving"}
COLOURS = {FREE: "\033[2m", CACHED: "\033[36m", MOVING: "\033[1;33m", SHARED: "\033[7m"}
# The colours of owners, assigned in turn: bright colours of the 256 that are distinguishable on black and on white.
OWNER_COLOURS = tuple(f"\033[1;38;5;{number}m" for number in (33, 160, 34, 133, 172, 37, 197, 69, 106, 202, 99, 30))
MAX_NAMED_OWNERS = 12
MIN_LINES = 4  # of the map without its legend
MARK_AND_COUNTS = 16  # columns of a legend's entry beside the name
GAP = "  "


class BlockView:
    """Draws maps of the KV cache blocks as text, one after another. From one map to the next, a request keeps its
    letter and colour as long as it has blocks."""

    def __init__(self, *, colour: bool) -> None:
        self._colour = colour
        self._places: dict[str, int] = {}  # by owner

    def draw(self, block_map: BlockMap, num_columns: int, num_lines: int, wanted: str = "") -> str:
        """Draw the blocks of the device pool and the host pool, the states of both, and a legend. Return text of at
        most `num_columns` columns.

        The pools share `num_lines` lines, less the lines of the legend and at least MIN_LINES, in proportion to
        their sizes. If `wanted` is not empty, the result has only the requests whose id contains this text.
        """
        self._place(block_map.owners)
        pools = {
            "device blocks": block_map.device_blocks,
            "host blocks (after the +)": block_map.host_blocks,
            "states (not counted below)": block_map.device_states,
            "host states (not counted below)": block_map.host_states,
        }
        pools = {name: uses for name, uses in pools.items() if uses}
        num_blocks = sum(map(len, pools.values()))
        if not num_blocks:
            return "no worker: there are no blocks"
        legend = self._legend(block_map, num_columns, wanted.casefold())
        if wanted:
            return "\n".join(legend)
        num_lines = max(MIN_LINES, num_lines - len(legend))
        num_blocks_per_cell = -(-num_blocks // (num_columns * max(1, num_lines - len(pools))))
        lines = []
        for name, uses in pools.items():
            scale = f", a cell is {num_blocks_per_cell} blocks" if num_blocks_per_cell > 1 else ""
            lines.append(f"{len(uses)} {name}{scale}")
            cells = [_summary(uses[i : i + num_blocks_per_cell]) for i in range(0, len(uses), num_blocks_per_cell)]
            starts = range(0, len(cells), num_columns)
            lines += [self._line(cells[start : start + num_columns], block_map.owners) for start in starts]
        return "\n".join([*lines, *legend])

    def _place(self, owners: Sequence[str]) -> None:
        self._places = {owner: place for owner, place in self._places.items() if owner in set(owners)}
        taken = set(self._places.values())
        free = (place for place in range(len(owners) + len(taken)) if place not in taken)
        for owner in owners:
            if owner not in self._places:
                self._places[owner] = next(free)

    def _line(self, cells: Sequence[int], owners: Sequence[str]) -> str:
        parts, last = [], None
        for use in cells:
            mark, colour = self._style(use, owners)
            if self._colour and colour != last:
                parts.append(PLAIN + colour)
                last = colour
            parts.append(mark)
        return "".join(parts) + (PLAIN if self._colour else "")

    def _style(self, use: int, owners: Sequence[str]) -> tuple[str, str]:
        """Return the character and the colour that show the use of a KV cache block in the map."""
        if use < HELD:
            return MARKS[use], COLOURS[use]
        place = self._places[owners[use - HELD]]
        return ascii_letters[place % len(ascii_letters)], OWNER_COLOURS[place % len(OWNER_COLOURS)]

    def _legend(self, block_map: BlockMap, num_columns: int, wanted: str) -> list[str]:
        """Return the lines of the map's legend, with the number of KV cache blocks for each use. If there are host
        blocks, their number follows the number of device blocks after a plus sign. If `wanted` is not empty, the lines
        have only requests whose id contains this text. Long ids are cut."""
        max_chars = max(1, num_columns - MARK_AND_COUNTS)
        device, host = Counter(block_map.device_blocks), Counter(block_map.host_blocks)
        held = sorted((use for use in device | host if use >= HELD), key=lambda use: (-device[use] - host[use], use))
        names = {use: printable(block_map.owners[use - HELD]) for use in held}
        named = [(use, f"{name:.{max_chars}}") for use, name in names.items() if wanted in name.casefold()]
        entries = [*([] if wanted else NAMES.items()), *named[:MAX_NAMED_OWNERS]]
        texts = []
        for use, name in entries:
            count = f"{device[use]}+{host[use]}" if block_map.host_blocks else f"{device[use]}"
            texts.append(f"{self._line([use], block_map.owners)} {name} {count}")
        if len(named) > MAX_NAMED_OWNERS:
            texts.append(f"and {len(named) - MAX_NAMED_OWNERS} more requests")
        return [*_flow(texts[: len(NAMES)], num_columns), *_flow(texts[len(NAMES) :], num_columns)]


def _flow(texts: Sequence[str], num_columns: int) -> list[str]:
    """Join the entries of the map's legend into lines of at most `num_columns` visible characters. Escape sequences for
    colours do not count."""
    lines: list[str] = []
    width = 0
    for text in texts:
        num_visible = len(re.sub("\033[^m]*m", "", text))
        if lines and width + len(GAP) + num_visible <= num_columns:
            lines[-1] += GAP + text
            width += len(GAP) + num_visible
        else:
            lines.append(text)
            width = num_visible
    return lines


def _summary(uses: Sequence[int]) -> int:
    """Return the use to show in a map cell that represents several KV cache blocks. `uses` has the use of each block,
    as a number. The result is the most frequent use. In a tie, it is the use with the highest number."""
    counts = Counter(uses)
    return max(counts, key=lambda use: (counts[use], use))
