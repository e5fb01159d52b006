"""A reader of KV events, as a router is one: it knows what a replica caches from the events alone."""

from __future__ import annotations

from scheduler_svc.core.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KvEvent


class BlockReader:
    """A router's view: parent and tokens of every block that it was told of."""

    def __init__(self) -> None:
        self.blocks: dict[int, tuple[int | None, tuple[int, ...]]] = {}
        self.seq = 0

    def take(self, events: list[KvEvent]) -> None:
        for event in events:
            assert event.seq == self.seq + 1, "a gap"
            self.seq = event.seq
            self.apply(event)

    def apply(self, event: KvEvent) -> None:
        if isinstance(event, AllBlocksCleared):
            self.blocks.clear()
        elif isinstance(event, BlocksRemoved):
            for block_hash in event.block_hashes:
                del self.blocks[block_hash]
        else:
            self.store(event)

    def store(self, event: BlocksStored) -> None:
        parent, size = event.parent_block_hash, event.block_size
        assert parent is None or parent in self.blocks, "a parent that nobody stored"
        assert len(event.token_ids) == size * len(event.block_hashes)
        for index, block_hash in enumerate(event.block_hashes):
            assert block_hash not in self.blocks, "stored twice"
            self.blocks[block_hash] = (parent, tuple(event.token_ids[index * size : (index + 1) * size]))
            parent = block_hash

    def sequences(self) -> set[tuple[int, ...]]:
        """All cached prefixes, back from the chains."""
        return {self.sequence(block_hash) for block_hash in self.blocks}

    def sequence(self, block_hash: int) -> tuple[int, ...]:
        parent, tokens = self.blocks[block_hash]
        return (self.sequence(parent) if parent is not None else ()) + tokens
