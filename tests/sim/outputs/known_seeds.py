"""Seeds whose histories once led to a fault, with the fault."""

KNOWN_SEEDS: dict[int, str] = {
    11: "what a client has kept is told of another stream",
    37: "what waits in the list of a call that is lost is freed by a collection alone",
    351: "a front end takes no failure of a request whose first sample has ended",
}
