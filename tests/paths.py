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

# Complete traces, in checkouts that have them. No test requires them.
SHARED = ROOT.parent / "shared" / "data"

TINY_MODELS = tuple(sorted(path.name for path in MODELS.iterdir() if path.name.startswith("tiny-")))


def golden(name: str) -> dict[str, Any]:
    """Return the golden of the model `name`. Its `format` key describes its fields."""
    return json.loads((GOLDENS / f"{name}.json").read_text())
