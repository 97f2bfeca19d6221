"""Who owns which block of the KV cache: ids, reference counts, and free blocks in the order they will be reused."""

from collections import Counter
from collections.abc import Callable, Iterable, Sequence

from headrace.core.errors import AuditFailed


class BlockPool:
    """``num_blocks`` blocks. A block is owned (one or more references) or free.

    Free blocks whose content is still worth something (``keep``) are reused last, the longest free one first; until
    then :meth:`share` can bring them back.
    """

    def __init__(self, num_blocks: int, on_reuse: Callable[[int], None]) -> None:
        """``on_reuse(block)`` is told just before a kept block's content is given up."""
        self.num_blocks = num_blocks
        self._on_reuse = on_reuse
        self._refs = [0] * num_blocks
        self._blank = list(range(num_blocks - 1, -1, -1))
        self._kept: dict[int, None] = {}
        """Free blocks with content, longest free first (a dict keeps its order)."""

    @property
    def num_free(self) -> int:
        return len(self._blank) + len(self._kept)

    def is_free(self, block: int) -> bool:
        return self._refs[block] == 0

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks with one reference each; the caller owns them and gives them back to :meth:`release`.

        Raises:
            ValueError: fewer are free. Nothing was taken.
        """
        if count > self.num_free:
            raise ValueError(f"{count} blocks wanted, {self.num_free} free")
        taken = []
        for _ in range(count):
            if self._blank:
                block = self._blank.pop()
            else:
                block = next(iter(self._kept))
                del self._kept[block]
                self._on_reuse(block)
            self._refs[block] = 1
            taken.append(block)
        return taken

    def share(self, blocks: Iterable[int]) -> None:
        """One more reference to each block; the caller becomes an owner."""
        for block in blocks:
            if self._refs[block] == 0:
                # Only a block with content is ever shared, so a free one is among the kept.
                del self._kept[block]
            self._refs[block] += 1

    def release(self, blocks: Sequence[int], keep: Callable[[int], bool]) -> None:
        """Give up one reference to each; a block without owners becomes free, its content kept if ``keep(block)``.

        The last block is freed first: of a chain of contents the end is worth least without its beginning.

        Raises:
            AuditFailed: a block has no owner.
        """
        for block in reversed(blocks):
            if self._refs[block] == 0:
                raise AuditFailed(f"block {block} was released without an owner")
            self._refs[block] -= 1
            if self._refs[block] == 0:
                if keep(block):
                    self._kept[block] = None
                else:
                    self._blank.append(block)

    def audit(self, owners: Iterable[Sequence[int]]) -> None:
        """Check that references are exactly the blocks that ``owners`` hold, and that every other block is free once.

        Raises:
            AuditFailed: naming the first few blocks that do not add up.
        """
        expected = Counter(block for blocks in owners for block in blocks)
        wrong = [
            f"block {block} has {refs} references, {expected[block]} owners"
            for block, refs in enumerate(self._refs)
            if refs != expected[block]
        ]
        free = Counter([*self._blank, *self._kept])
        wrong += [
            f"block {block} with {refs} references is {free[block]} times free"
            for block, refs in enumerate(self._refs)
            if free[block] != (refs == 0)
        ]
        if wrong:
            raise AuditFailed("; ".join(wrong[:5]))
