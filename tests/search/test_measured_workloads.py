"""The page's table of how near to what no engine can beat steps are: those of the reports, by today's bound."""

import json

import paths
from reached import steps

FRACTIONS = {
    "8B bf16": "h200-plans-llama-3.1-8b-variants.json",
    "8B bf16, traces": "h200-plans-llama-3.1-8b-traces.json",
    "8B bf16, fourth start": "h200-plans-llama-3.1-8b-fourth.json",
    "8B bf16, sizes": "h200-plans-llama-3.1-8b-sizes.json",
    "8B fp8": "h200-plans-llama-3.1-8b-lean-fp8.json",
    "8B fp8, LMSYS's": "h200-plans-llama-3.1-8b-lean-fp8-lmsys.json",
    "70B bf16, 2 GPUs": "h200-plans-llama-3-70b-tp2.json",
    "70B bf16, 2 GPUs, sizes": "h200-plans-llama-3-70b-tp2-sizes.json",
    "70B fp8, 2 GPUs": "h200-plans-llama-3-70b-tp2-fp8.json",
    "70B bf16, 4 GPUs": "h200-plans-llama-3-70b-tp4.json",
    "70B fp8, 4 GPUs": "h200-plans-llama-3-70b-tp4-fp8.json",
}


def fractions() -> list[str]:
    """Steps beside what no engine can beat: the sequential one of the size with most tokens/s, and the best
    plan where that has more.
    """
    lines = []
    for name, file in FRACTIONS.items():
        full = [row for row in steps(file) if row["graphs"] is None]
        for workload in dict.fromkeys(row["workload"] for row in full):
            here = [row for row in full if row["workload"] == workload]
            best = max(here, key=lambda row: row["tokens_per_s"])
            alone = max((row for row in here if row["sequential"]), key=lambda row: row["tokens_per_s"])
            assert alone["against_best_sequential"] == 1.0
            for row in (alone, *([] if best["sequential"] else [best])):
                tokens = f"{row['decode_tokens'] + row['prefill_tokens']} of {row['tokens']}"
                shares = (
                    f"{row['fraction_of_optimal']:.0%} | {row['fraction_of_bound']:.0%} | {row['binding']}"
                )
                plan = row["plan"].rpartition(", ")[0]
                lines.append(
                    f"| {name} | {workload} | {plan} | {tokens} | {row['tokens_per_s']:,.0f} | {shares} |"
                )
    return lines


def test_the_page_has_the_fractions():
    text = (paths.ROOT / "docs" / "overlap.md").read_text("utf-8")
    assert (
        text.partition("<!-- fractions -->\n")[2].partition("\n<!-- /fractions -->")[0].splitlines()[2:]
        == fractions()
    )


def test_the_page_has_the_smaller_steps_of_two_devices_in_bf16():
    """By which no plan of 1,024 rows is shipped there."""
    rows = json.loads(
        (paths.ROOT / "benchmarks" / "h200-plans-llama-3-70b-tp2-sizes.json").read_text("utf-8")
    )["plans"]
    assert [(row["tokens"], row["sequential"]) for row in rows] == [
        (768, True),
        (896, True),
        (1024, True),
        (1024, False),
    ]
    made, plan = [f"{row['tokens_per_s']:,.0f}" for row in rows], rows[-1]
    said = "that of 768 rows makes {} tokens/s, of 896 {}, of 1,024 {}, and the halves of 512 {}: ".format(
        *made
    )
    said += (
        f"{plan['against_sequential_of_its_size']:.3f} times the step of its size, "
        f"{plan['against_best_sequential']:.3f} of the best."
    )
    assert said in " ".join((paths.ROOT / "docs" / "overlap.md").read_text("utf-8").split())


def test_the_page_has_the_sequential_steps_of_the_first_reports():
    bf16, fp8 = (steps(f"h200-plans-llama-3.1-8b{kind}.json")[0] for kind in ("", "-fp8"))
    assert all(
        row["sequential"] and row["workload"] == "1024/512" and row["binding"] == "energy"
        for row in (bf16, fp8)
    )
    said = (
        f"they reach {bf16['fraction_of_bound']:.2f} of the bound's rate in bf16 and "
        f"{fp8['fraction_of_bound']:.2f} in fp8"
    )
    assert said in (paths.ROOT / "docs" / "cost-model.md").read_text("utf-8").replace("\n", " ")
