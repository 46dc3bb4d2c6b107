"""Selection of a few cases of a test, in which each value of each parameter occurs."""

from collections import Counter
from collections.abc import Hashable, Sequence


def covering(cases: Sequence[Sequence[Hashable]]) -> list[int]:
    """Return the indexes of the chosen cases, in ascending order.

    `cases`: the parameter values of each case; all cases have the same number of parameters. Every value of a parameter
    that occurs in any case occurs in a chosen case. Each step chooses the case with the most values not chosen yet.
    Among equal cases, the step chooses the case whose values were chosen least often, so a parameter with few values
    uses them in turn.
    """
    chosen: list[int] = []
    uses: Counter[tuple[int, Hashable]] = Counter()
    keys = [list(enumerate(case)) for case in cases]
    missing = {key for case in keys for key in case}
    while missing:
        best = min(
            range(len(keys)),
            key=lambda index: (
                -sum(key in missing for key in keys[index]),
                sum(uses[key] for key in keys[index]),
                index,
            ),
        )
        chosen.append(best)
        uses.update(keys[best])
        missing.difference_update(keys[best])
    return sorted(chosen)
