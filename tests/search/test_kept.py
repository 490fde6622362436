"""What products and the ops beside them kept of their speed on H200s (NanoFlow §4.1.1, Table 3): the page's
table, from profiles' pairs.
"""

import statistics

import paths
import pytest

from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.graph import FP8, Widths, model_graph
from search.nanobatch.shares import Shares, product_shapes
from search.profile.op_times import Pair, Profile, load_profile

FIRST, LATER, TWO = "llama-3.1-8b", "llama-3.1-8b-joules", "llama-3-70b-tp2-fp8"
BESIDE = (
    (LATER, "decode_attention"),
    (LATER, "chunk_attention"),
    (TWO, "decode_attention"),
    (TWO, "chunk_attention"),
)
SUMS = ((TWO, "attn_reduce"), (TWO, "exchange"))
PAGE = (paths.ROOT / "docs" / "overlap.md").read_text("utf-8")


def profile(name: str) -> Profile:
    return load_profile(paths.ROOT / "search" / "profiles" / f"h200-{name}.json")


def kept(pairs: list[Pair]) -> str:
    """R of the products and P of what was beside them, in the mean."""
    both = [(pair.first_performance, pair.second_performance) for pair in pairs]
    return ", ".join(f"{statistics.mean(each):.2f}" for each in zip(*both, strict=True))


def table() -> list[str]:
    """The page's rows: by the SMs of both, those of attention first."""
    lines = []
    for sms in ((84, 48), (92, 40), (100, 32), (108, 24), (132, 24), (132, 0)):
        cells = []
        for name, op in (*BESIDE, *SUMS):
            pairs = [
                pair
                for pair in profile(name).pairs
                if pair.second == op and (pair.first_sms, pair.second_sms) == sms
            ]
            cells.append(kept(pairs) if pairs else "")
        lines.append(f"| {sms[0]} + {sms[1]} | {' | '.join(cells)} |")
    return lines


def test_the_page_has_what_is_kept():
    assert PAGE.partition("<!-- kept -->\n")[2].partition("\n<!-- /kept -->")[0].splitlines()[2:] == table()
    assert sum(len(profile(name).pairs) for name in (LATER, TWO)) == 24 + 30
    one, two = (
        max(sum(map(float, row.split(" | ")[column].split(", "))) for row in table()[:4]) for column in (1, 3)
    )
    assert (
        f"the most that a sum comes to beside decode attention is {one:.2f} of 8B and {two:.2f} of 70B:"
        in PAGE.replace("\n", " ")
    )


@pytest.mark.parametrize(
    ("name", "said"),
    [(FIRST, "13 % by the first profile's"), (LATER, ", 22 and "), (TWO, " and 9 % by those of the later")],
)
def test_the_page_says_what_sharing_costs(name, said):
    found = profile(name)
    tp, model = found.tensor_parallel_size, open_checkpoint(found.model, load_format="dummy").model_config
    graph = model_graph(model, tp, FP8 if found.dtype == "float8_e4m3fn" else Widths())
    lost = Shares(found, graph, product_shapes(model, tp)).beside - 1
    sentence = PAGE.partition("what ops lose beside others: ")[2].partition(".")[0]
    assert said in f", {sentence}" and f"{100 * lost:.0f}" in said
