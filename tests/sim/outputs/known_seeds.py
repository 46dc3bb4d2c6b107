"""Seeds whose histories once led to a fault, and what it was."""

KNOWN_SEEDS: dict[int, str] = {
    241: "a front end takes no failure of a request whose first sample has ended",
}
