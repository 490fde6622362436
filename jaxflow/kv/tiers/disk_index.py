"""Which pages the disk has and how long their files are, in the order of use. Not thread-safe: its owner has
a lock.
"""

from collections import OrderedDict
from collections.abc import Iterable, Iterator


class DiskIndex:
    """Files by key. `pages`: (key, bytes of its file), the least recently used first.

    Attributes:
      bytes: of all files.
    """

    def __init__(self, pages: Iterable[tuple[bytes, int]]):
        self._files = OrderedDict(pages)
        self.bytes = sum(self._files.values())

    def __len__(self) -> int:
        return len(self._files)

    def __iter__(self) -> Iterator[bytes]:
        """The least recently used first."""
        return iter(self._files)

    def __contains__(self, key: bytes) -> bool:
        return key in self._files

    def add(self, key: bytes, size: int) -> None:
        """A file that was not there, and is used now."""
        self._files[key] = size
        self.bytes += size

    def forget(self, key: bytes) -> None:
        """A file that is not there any more, if it was."""
        self.bytes -= self._files.pop(key, 0)

    def use(self, keys: Iterable[bytes]) -> None:
        """Those that are there are used now, the last of them most recently."""
        for key in keys:
            if key in self._files:
                self._files.move_to_end(key)

    def make_room(self, size: int, capacity: int) -> list[bytes]:
        """Forgets the least recently used until `size` bytes more fit in `capacity`; returns their keys."""
        victims = []
        while self._files and self.bytes + size > capacity:
            victim, freed = self._files.popitem(last=False)
            self.bytes -= freed
            victims.append(victim)
        return victims
