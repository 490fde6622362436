"""How near the bound measured steps are, by the constants of today: reports of `bench plans` have those of
their day.
"""

import functools
import json
import math

import paths

from jaxflow.bench.plans.steady import parse_workload
from jaxflow.bench.report import optimum
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.composition import Composition


def steps(file: str) -> list[dict]:
    """A report's steps of serving, not of decodes alone; each one's fraction of the bound, and what binds,
    computed again.
    """
    report = json.loads((paths.ROOT / "benchmarks" / file).read_text("utf-8"))
    return [row | again(report, row) for row in report["plans"] if row["prefill_tokens"]]


def again(report: dict, row: dict) -> dict:
    """Of a row, whose step is made as `bench plans` makes its workload's; in bf16 it must be what the report
    says.
    """
    prompt, prefill = parse_workload(row["workload"]).prompt_tokens, row["prefill_tokens"]
    pieces = math.ceil(prefill / prompt)
    sizes = [prefill // pieces + (i < prefill % pieces) for i in range(pieces)]
    chunks = tuple((size, (prompt - size) // 2) for size in sizes)
    step = Composition(row["decode_tokens"], row["mean_context_tokens"], chunks, row["decode_tokens"])
    found = optimum.of_step(
        config(report["model"]), report["engine_config"], report["device"], step, row["tokens_per_s"]
    )
    if report["engine_config"]["quantization"] is None:  # no later measurement has lowered its constants
        assert math.isclose(found["fraction_of_bound"], row["fraction_of_bound"], rel_tol=1e-6)
    return found


@functools.cache
def config(name: str):
    return open_checkpoint(name, load_format="dummy").model_config
