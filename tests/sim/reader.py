"""A client with many requests on one call: their tokens wait in a ready list until it reads, as in `GenerateMany`."""

from __future__ import annotations

from random import Random
from typing import TYPE_CHECKING

from scheduler_service.serving.output import ReadyList
from tests.sim.client import Client
from tests.sim.scenario import Arrival

if TYPE_CHECKING:
    from tests.sim.simulation import Simulation


class Reader:
    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._rng = Random(f"reader {simulation.scenario.seed}")
        self._ready_list = ReadyList(self._on_news)
        self._clients: dict[int, Client] = {}  # by label
        self._seconds = simulation.scenario.read_seconds

    def client(self, arrival: Arrival) -> Client:
        """Return a client for one more request on the call."""
        simulation, label = self._simulation, len(self._clients)
        client = Client(arrival, simulation.loop, simulation.has_everything, self._ready_list, label)
        self._clients.update((label + index, client) for index in range(arrival.request.n))
        return client

    def _on_news(self) -> None:
        self._simulation.after(self._rng.random() * self._seconds, self._read)

    def _read(self) -> None:
        records = self._ready_list.take()
        assert len(set(map(id, records))) == len(records), "S6: an output waits twice for its reader"
        num_read = self._rng.randint(1, len(records)) if records else 0
        if num_read < len(records):
            self._ready_list.put_back(records[num_read:])
            self._on_news()
        for record in records[:num_read]:
            client = self._clients[record.label]
            token_ids = record.pop_plain_tokens()
            if token_ids is None:
                client.active.process_output(record)
            else:
                client.outputs[record.index].add_tokens(token_ids)
