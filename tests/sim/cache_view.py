"""A comparison of the cache as a KV event subscriber sees it with the actual cache."""

import xxhash

from scheduler_service.core.request import BlockRemoved, BlockStored, CacheCleared, KvEvent, Tier


class CacheView:
    def __init__(self) -> None:
        self._stored: dict[tuple[int, Tier], BlockStored] = {}

    def take(self, event: KvEvent) -> None:
        if isinstance(event, CacheCleared):
            self._stored.clear()
            return
        key = (event.block_hash, event.tier)
        if isinstance(event, BlockRemoved):
            assert self._stored.pop(key, None) is not None, f"removed, but never stored: {event}"
            return
        assert key not in self._stored, f"stored twice: {event}"
        self._stored[key] = event
        tokens = b"".join(token_id.to_bytes(4, "little") for token_id in event.token_ids)
        expected = xxhash.xxh3_64_intdigest(event.parent_hash.to_bytes(8, "little") + tokens)
        assert event.block_hash == expected, f"not the chained hash: {event}"

    def check(self, snapshot: list[BlockStored]) -> None:
        assert len(snapshot) == len(self._stored), "the snapshot has another size than the events tell"
        for entry in snapshot:
            assert self._stored.get((entry.block_hash, entry.tier)) == entry, f"{entry} is cached, but no event told"
