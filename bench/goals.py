"""Compares a figure with its goal."""


def said(is_met: bool | None) -> str:
    """Return the word for a judgement: "met", "MISSED", or "-" for None, if the figure was not measured."""
    return {None: "-", True: "met", False: "MISSED"}[is_met]


def verdict(value: float, goal: float, *, at_least: bool) -> str:
    """Return a text with the goal of a figure, and whether the figure meets the goal."""
    is_met = value >= goal if at_least else value <= goal
    return f"(goal: at {'least' if at_least else 'most'} {goal:g}: {said(is_met)})"
