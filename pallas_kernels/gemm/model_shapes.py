"""The GEMM shapes of known models, from tables/shapes.json.

The file holds, for each model and tensor parallelism, the [K, N] of each op and the block of its gates.
Entries under the name of a dtype replace these values for weights of that dtype.
"""

import json
from typing import Any

from pallas_kernels.gemm.tuned_table import FOLDER


def known_shapes(weights: str) -> dict[str, dict[str, list[int]]]:
    """Return model -> op -> [K, N] or [K, N, gate block] for weights of a dtype."""
    kinds: dict[str, dict[str, Any]] = json.loads((FOLDER / "shapes.json").read_text("utf-8"))
    return {
        name: {op: dims for op, dims in (ops | ops.get(weights, {})).items() if isinstance(dims, list)}
        for name, ops in kinds.items()
    }


def layer_shapes() -> dict[str, dict[str, tuple[int, int]]]:
    """Return model -> op -> [N, K] of the bfloat16 GEMMs in a decoder layer of the two models that checks
    use.
    """
    known = known_shapes("bfloat16")
    names = {"8B": "llama-3.1-8b tp 1", "70B/tp4": "llama-3.1-70b tp 4"}
    return {
        short: {op: (n, k) for op, (k, n, *_) in known[name].items() if op != "logits"}
        for short, name in names.items()
    }


SHAPES = layer_shapes()
