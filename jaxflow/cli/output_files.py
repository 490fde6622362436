"""The files that a command is to write: looked at before its work, whose results would be lost with them."""

import contextlib
import os

from absl import flags

from jaxflow.config import ConfigError

PICTURES = (".png", ".svg", ".pdf")


def check_outputs(*names: str, make_folders: bool = False) -> None:
    """Of flags that name files; those that are not set are passed over. make_folders: they need not be there.

    Raises: ConfigError for a file that could not be written, naming the flag.
    """
    for name in names:
        if path := flags.FLAGS[name].value:
            check_output(name, path, make_folders=make_folders)


def check_pictures(*names: str, make_folders: bool = False) -> None:
    """`check_outputs` of files that are drawn into, in the format that their names end on. Raises:
    ConfigError, also for another format.
    """
    for name in names:
        path = flags.FLAGS[name].value
        if path and os.path.splitext(path)[1].lower() not in PICTURES:
            raise ConfigError(name, path, f"a file of {', '.join(PICTURES)}")
    check_outputs(*names, make_folders=make_folders)


def check_output(name: str, path: str, *, make_folders: bool = False) -> None:
    """The same of one file. Raises: ConfigError, of the field `name`."""
    folder = os.path.dirname(path) or "."
    if make_folders:
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True)
    writable = os.path.isdir(folder) and os.access(path if os.path.exists(path) else folder, os.W_OK)
    if os.path.isdir(path) or not writable:
        raise ConfigError(
            name,
            path,
            "a file that can be written, in a folder that " + ("can be made" if make_folders else "exists"),
        )
