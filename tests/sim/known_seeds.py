"""Seeds whose histories pass through a state that once broke the core, with the bug that they found.

The seeds are valid only while scenarios are drawn in the same way. After a change of the drawing, `mutants.py` reports
the bugs that are no longer found. Search for a new seed for such a bug with more `--seeds`.
"""

KNOWN_SEEDS: dict[int, str] = {
    209: "a group of which nothing is swapped any more is swapped in",
    240: "prompt log-probabilities outlive the end of their request",
    2969: "prompt log-probabilities outlive the end of their request",
    5690: "what a row matched in the last epoch is taken for bad with what is bad in this one",
    21253: "what a row matched in the last epoch is taken for bad with what is bad in this one",
    23592: "a sample shares what its late relative writes again",
    32102: "groups that lack room for their samples wait for each other",
    35844: "a preempted beam's bad blocks stay published",
    40464: "a sample publishes on top of a block that is not held",
    512960: "a row is preempted for blocks that its results will free",
}
