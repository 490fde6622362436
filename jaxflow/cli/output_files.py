"""Checks that a command can write its output files, before it starts work."""

import contextlib
import os

from absl import flags

from jaxflow.config import ConfigError

PICTURES = (".png", ".svg", ".pdf")


def check_outputs(*names: str, make_folders: bool = False) -> None:
    """Check the files that the flags `names` name. A flag that is not set is skipped.

    Args:
      make_folders: create the folder of each file.

    Raises:
      ConfigError: a file cannot be written. The error names the flag.
    """
    for name in names:
        if path := flags.FLAGS[name].value:
            check_output(name, path, make_folders=make_folders)


def check_pictures(*names: str, make_folders: bool = False) -> None:
    """Check the image files that the flags `names` name, as `check_outputs` does.

    Raises:
      ConfigError: a file cannot be written, or its suffix is not in `PICTURES`.
    """
    for name in names:
        path = flags.FLAGS[name].value
        if path and os.path.splitext(path)[1].lower() not in PICTURES:
            raise ConfigError(name, path, f"a file of {', '.join(PICTURES)}")
    check_outputs(*names, make_folders=make_folders)


def check_output(name: str, path: str, *, make_folders: bool = False) -> None:
    """Check one file. Raises: ConfigError for the field `name`, if `path` cannot be written."""
    folder = os.path.dirname(path) or "."
    if make_folders:
        with contextlib.suppress(OSError):
            os.makedirs(folder, exist_ok=True)
    writable = os.path.isdir(folder) and os.access(path if os.path.exists(path) else folder, os.W_OK)
    if os.path.isdir(path) or not writable:
        raise ConfigError(
            name,
            path,
            "a file that can be written, in a folder that "
            + ("can be created" if make_folders else "exists"),
        )
