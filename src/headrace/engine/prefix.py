"""Which full blocks hold which tokens, so that sequences that begin alike share them.

A block is named by the chain of everything before it: ``hash(parent, tokens)``, and the first parent is the hash of the
cache salt. Equal names therefore mean equal salts and equal tokens from the very start, and a tenant with a salt of its
own can neither hit nor probe another's blocks. BLAKE3 because tenants choose the tokens: a name must not be forgeable.
"""

from array import array
from collections.abc import Sequence

from blake3 import blake3

_NAME_BYTES = 16


def extend_chain(hashes: list[bytes], tokens: Sequence[int], salt: str, block_size: int) -> None:
    """Append to ``hashes`` the names of all full blocks of ``tokens`` that it does not hold yet."""
    num_full = len(tokens) // block_size
    if len(hashes) >= num_full:
        return
    parent = hashes[-1] if hashes else blake3(salt.encode()).digest(length=_NAME_BYTES)
    for index in range(len(hashes), num_full):
        content = array("i", tokens[index * block_size : (index + 1) * block_size]).tobytes()
        parent = blake3(parent + content).digest(length=_NAME_BYTES)
        hashes.append(parent)


class PrefixCache:
    """A two-way map between names and the blocks that hold their content. It owns no blocks."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._name_of: dict[int, bytes] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def holds(self, block: int) -> bool:
        """Whether the block's content can be found by name."""
        return block in self._name_of

    def lookup(self, hashes: Sequence[bytes]) -> list[int]:
        """The blocks of the longest known beginning of the chain."""
        found = []
        for name in hashes:
            block = self._block_of.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def register(self, name: bytes, block: int) -> None:
        """Make a computed block findable. If the same content is known in another block, that one stays the answer."""
        if name not in self._block_of:
            self._block_of[name] = block
            self._name_of[block] = name

    def forget(self, block: int) -> None:
        """The block's content is about to be overwritten."""
        name = self._name_of.pop(block, None)
        if name is not None:
            del self._block_of[name]
