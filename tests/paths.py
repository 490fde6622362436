"""Where the tests' data lies."""

import json
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
DATA = Path(__file__).resolve().parent / "data"
MODELS = DATA / "models"
GOLDENS = DATA / "goldens"
TRACES = DATA / "traces"
PPL = DATA / "ppl"

# Whole traces, where a checkout has them beside it; no test needs them.
SHARED = ROOT.parent / "shared" / "data"

TINY_MODELS = tuple(sorted(path.name for path in MODELS.iterdir() if path.name.startswith("tiny-")))


def golden(name: str) -> dict[str, Any]:
    """The golden of the model `name`; its `format` key says what the fields are."""
    return json.loads((GOLDENS / f"{name}.json").read_text())
