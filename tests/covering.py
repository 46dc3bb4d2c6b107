"""A small choice of a test's cases in which each value of each parameter occurs."""

from collections import Counter
from collections.abc import Hashable, Sequence


def covering(cases: Sequence[Sequence[Hashable]]) -> list[int]:
    """Return the indexes of the chosen cases, in order.

    `cases`: the values of the parameters, of as many parameters in each case. Every value of a parameter that occurs in
    a case occurs in a chosen one. Each step chooses the case with the most values that were not chosen yet, and of
    equal ones the case whose values were chosen the least: a parameter with few values takes them in turn.
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
