"""Leases of line ranges, so that several writers of one journal answer different lines.

A lease is a lock on one byte of a file. The kernel, or the file server of a shared folder, ends the lock with
its process, however the process ends. So no lease of a dead writer stays, and no lease
expires while its writer works.
"""

import errno
import fcntl
import os
import struct
from pathlib import Path


class Leases:
    """The leases that this writer holds. Two objects exclude each other, also in one process.

    Args:
      path: the file of the locks. It is created if it is missing, and stays empty.

    Raises:
      OSError: the file cannot be created, or its file system has no locks.
    """

    def __init__(self, path: Path):
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        self._held: set[int] = set()

    def take(self, index: int) -> bool:
        """Take the lease of a range, and return True; False if another writer holds the lease."""
        if index not in self._held:
            try:
                self._lock(index, fcntl.F_WRLCK)
            except OSError as error:
                if error.errno in (errno.EAGAIN, errno.EACCES):
                    return False
                raise
            self._held.add(index)
        return True

    def holds(self, index: int) -> bool:
        """Return True if this writer has the lease of a range."""
        return index in self._held

    def close(self) -> None:
        """Give all leases back."""
        os.close(self._file)
        self._held.clear()

    def _lock(self, index: int, kind: int) -> None:
        # struct flock of Linux. A lock of an open file, unlike one of a process, survives the closing of
        # other descriptors of the same file.
        fcntl.fcntl(self._file, fcntl.F_OFD_SETLK, struct.pack("hhqqi", kind, os.SEEK_SET, index, 1, 0))
