"""Says whether a figure meets its goal."""


def said(is_met: bool | None) -> str:
    """Returns the word for it: None where it was not measured."""
    return {None: "-", True: "met", False: "MISSED"}[is_met]


def verdict(value: float, goal: float, *, at_least: bool) -> str:
    """Returns the goal beside a figure, and whether it is met."""
    is_met = value >= goal if at_least else value <= goal
    return f"(goal: at {'least' if at_least else 'most'} {goal:g}: {said(is_met)})"
