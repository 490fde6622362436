"""Plugins that run in the processes of vLLM, without an installation."""

import sys
from pathlib import Path
from types import ModuleType

GROUP = "vllm.general_plugins"


def announce(folder: Path, plugin: ModuleType) -> None:
    """Write the entry point of a plugin to a folder, and let this process and its children find it there.

    plugin: a module with the plugin's `NAME` and its function `register`.
    """
    metadata = folder / f"{plugin.NAME.replace('-', '_')}-1.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {plugin.NAME}\nVersion: 1\n")
    (metadata / "entry_points.txt").write_text(f"[{GROUP}]\n{plugin.NAME} = {plugin.__name__}:register\n")
    if str(folder) not in sys.path:  # vLLM hands this list to its processes
        sys.path.append(str(folder))
