"""Checks every slot of the KV cache that a plan reads or writes.

A slot is the memory of one token's keys and values. Here it holds a hash of that token and all before it, on which they
depend. So a block that was allocated too early, shared by two writers, copied wrongly or freed too soon is found
at the next read or write.
"""

from collections.abc import Mapping, Sequence

from penstock.messages import BlockCopy, Capacity
from tests.plan_checks.tokens import SimulatedSequence

SPOILT = -1  # the content that a failed sequence stores


class PlanError(RuntimeError):
    """A plan breaks the contract between scheduler and executor."""


class KVSlots:
    """The slots of all KV groups. `sequences` is the executor's own mapping, so it is always up to date."""

    def __init__(self, capacity: Capacity, sequences: Mapping[int, SimulatedSequence]) -> None:
        self._block_size = capacity.block_size
        self._groups = capacity.groups
        self._sequences = sequences
        self._pages: list[dict[int, list[int | None]]] = [{} for _ in capacity.groups]
        # For each outstanding plan: (group, block) -> the sequences that use the block in that plan.
        self._plans: list[dict[tuple[int, int], set[int]]] = []

    def submitted(self) -> None:
        """Count the blocks that are used from now on as used by a new plan."""
        self._plans.append({})

    def taken(self) -> None:
        """Forget the blocks of the oldest plan, whose result was taken."""
        del self._plans[0]

    def forget(self) -> None:
        """Forget all outstanding plans."""
        self._plans.clear()

    def copy(self, copies: Sequence[BlockCopy]) -> None:
        """Copy pages. Raises PlanError if the result depends on the order."""
        targets = {(copy.group, copy.target) for copy in copies}
        sources = {(copy.group, copy.source) for copy in copies}
        if len(targets) < len(copies) or targets & sources:
            raise PlanError(f"copies of one plan depend on their order: {copies}")
        for copy in copies:
            holders = [each.seq for each in self._sequences.values() if copy.source in each.tables[copy.group]]
            self._plans[-1].setdefault((copy.group, copy.source), set()).update(holders)
            pages = self._pages[copy.group]
            if copy.source not in pages:
                raise PlanError(f"nothing was written to block {copy.source}, which is copied")
            pages[copy.target] = list(pages[copy.source])

    def compute(self, sequence: SimulatedSequence, hashes: Sequence[int], count: int) -> None:
        """Store the sequence's next `count` tokens, and read the tokens that each attends to. `hashes` has the hash of
        each prefix, drafts included. Raises PlanError if the sequence may not write a slot, or reads other content."""
        for position in range(sequence.position, sequence.position + count):
            self._write(sequence, position, hashes[position])
            self._read(sequence, position, hashes)

    def spoil(self, sequence: SimulatedSequence, count: int) -> None:
        """Store garbage for the next `count` tokens of a sequence that has failed."""
        for position in range(sequence.position, sequence.position + count):
            self._write(sequence, position, SPOILT)

    def _write(self, sequence: SimulatedSequence, position: int, content: int) -> None:
        size = self._block_size
        index, slot = divmod(position, size)
        for group, table in enumerate(sequence.tables):
            block = table[index]
            if wrong := self._why_not(sequence, group, block):
                raise PlanError(
                    f"sequence {sequence.seq} stores token {position} in block {block} of group {group}, which {wrong}"
                )
            self._use(group, block, sequence.seq)
            self._pages[group].setdefault(block, [None] * size)[slot] = content

    def _why_not(self, sequence: SimulatedSequence, group: int, block: int) -> str:
        """Return why the sequence may not write into a block; empty if it may."""
        if not 0 < block < self._groups[group].num_blocks:
            return "does not exist"
        for other in self._sequences.values():
            if other is sequence or other.failed:
                continue
            if block in other.tables[group][other.position // self._block_size :]:
                return f"sequence {other.seq} also writes"
        for users in self._plans[:-1]:
            if sequence.seq not in users.get((group, block), {sequence.seq}):
                return "an outstanding plan may still use"
        return ""

    def _read(self, sequence: SimulatedSequence, position: int, hashes: Sequence[int]) -> None:
        size = self._block_size
        for group, spec in enumerate(self._groups):
            tokens = spec.window.tokens or position + 1
            first = position - position % tokens if spec.window.chunked else max(0, position - tokens + 1)
            table, pages = sequence.tables[group], self._pages[group]
            for seen in range(first, position + 1):
                block = table[seen // size]
                self._use(group, block, sequence.seq)
                page = pages.get(block)
                if page is None or page[seen % size] != hashes[seen]:
                    raise PlanError(f"block {block} of group {group} has not token {seen} of sequence {sequence.seq}")

    def _use(self, group: int, block: int, seq: int) -> None:
        self._plans[-1].setdefault((group, block), set()).add(seq)
