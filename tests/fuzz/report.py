"""The findings of rounds, and counts of the tried cases."""

from dataclasses import dataclass, field, fields


@dataclass(slots=True)
class Report:
    """The findings of rounds, and counts of the tried cases."""

    seed: int
    num_rounds: int = 0
    num_requests: int = 0
    num_over_http: int = 0
    num_interrupted: int = 0
    num_refused: int = 0
    num_tokens: int = 0
    num_preemptions: int = 0
    num_swaps: int = 0
    num_moved_blocks: int = 0
    num_cached_tokens: int = 0
    num_kills: int = 0
    num_spelled: int = 0
    faults: list[str] = field(default_factory=list)

    def __iadd__(self, other: "Report") -> "Report":
        for each in fields(Report):
            if each.name != "seed":
                setattr(self, each.name, getattr(self, each.name) + getattr(other, each.name))
        return self

    def unused(self) -> list[str]:
        """Return which consequences of a small cache have never happened."""
        counts = {"preemption": self.num_preemptions, "swap": self.num_swaps}
        return [name for name, count in counts.items() if not count]

    def __str__(self) -> str:
        return (
            f"{self.num_requests} requests, {self.num_over_http} of them over HTTP, {self.num_interrupted} interrupted "
            f"and {self.num_refused} refused, {self.num_tokens} tokens, {self.num_preemptions} preemptions, "
            f"{self.num_swaps} of them swaps, {self.num_moved_blocks} blocks moved, {self.num_kills} kills, "
            f"{self.num_cached_tokens} tokens of prompts from the cache; {self.num_spelled} texts spelled; "
            f"{len(self.faults)} faults"
        )
