"""Names of models, checked before JAX is imported: a folder, a file, a hub id or a shipped config."""

import re
from pathlib import Path

from jaxflow.model.checkpoints.source import CheckpointError

CONFIGS = Path(__file__).parents[1] / "architectures" / "configs"
_HUB_ID = re.compile(r"[\w][\w.-]*/[\w][\w.-]*")


def shipped_configs() -> list[str]:
    """Return the names of the configs that the package contains."""
    return sorted(path.stem for path in CONFIGS.glob("*.json"))


def check_name(model: str, *, dummy: bool) -> None:
    """Check that a name may be a model's. No file is read.

    Args:
      dummy: the model gets random weights, so the name of a shipped config suffices.

    Raises:
      CheckpointError: the name is no folder, no file, no hub id and no shipped config, or is a shipped
        config where weights are read.
    """
    path = Path(model).expanduser()
    if path.is_file() or path.is_dir():
        return
    if model in shipped_configs():
        if not dummy:
            raise CheckpointError(
                f"{model}: a shipped config has no weights; load_format=dummy makes random weights"
            )
    elif not _HUB_ID.fullmatch(model):
        raise CheckpointError(
            f"{model}: not a folder, a file, a hub id (owner/name), or one of {', '.join(shipped_configs())}"
        )
