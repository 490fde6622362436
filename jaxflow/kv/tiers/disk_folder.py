"""The folder of a disk tier: made, guarded against a second server, and listed."""

import fcntl
import os
from pathlib import Path

from jaxflow.config import ConfigError
from jaxflow.kv.tiers import disk_file
from jaxflow.kv.tiers.disk_file import TEMPORARY

FOLDER = "jaxflow-kv"  # made inside the given one, which may hold other things


class Lock:
    """Holds a file locked until it is closed, or the process ends, however it does. Raises: BlockingIOError
    if another holds it.
    """

    def __init__(self, path: Path):
        self._fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BaseException:
            os.close(self._fd)
            raise

    def close(self) -> None:
        os.close(self._fd)


def open_folder(parent: Path) -> tuple[Path, Lock, list[tuple[bytes, int]]]:
    """The tier's own folder inside `parent`, of mode 0700, the lock that keeps other servers out, and the
    pages there.

    Raises: ConfigError.
    """

    def refused(accepted: str) -> ConfigError:
        return ConfigError("kv_disk_path", str(parent), accepted)

    if not parent.is_dir():
        raise refused("a folder that exists")
    folder = parent / FOLDER
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.is_symlink() or folder.lstat().st_uid != os.geteuid():
            raise refused(f"a folder whose {FOLDER} is a folder of this user")
        folder.chmod(0o700)
        lock = Lock(folder / "lock")
        try:
            return folder, lock, find_pages(folder)
        except BaseException:
            lock.close()
            raise
    except BlockingIOError:
        raise refused("a folder that no other server uses meanwhile") from None
    except OSError as error:
        raise refused(f"a folder that can be listed and written to ({error.strerror})") from None


def find_pages(folder: Path) -> list[tuple[bytes, int]]:
    """(key, bytes of its file) of the pages there, the least recently used first; no file is opened.

    Files that a killed process left under a temporary name are removed; what has no page's name is left
    alone.

    Raises: OSError.
    """
    found = []
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.endswith(TEMPORARY):
                disk_file.remove(Path(entry.path))
                continue
            key = disk_file.key_of(entry.name)
            if key is not None and entry.is_file(follow_symlinks=False):
                status = entry.stat(follow_symlinks=False)
                found.append((status.st_mtime_ns, key, status.st_size))
    return [(key, size) for _, key, size in sorted(found)]
