"""SARATHI's facts, from the engine's scheduler and the op costs."""

import dataclasses

import numpy as np
import pytest

from jaxflow.bench.engine import sarathi
from jaxflow.bench.engine.sarathi import SarathiSetting, SimulatedPolicy, tile_chunk
from jaxflow.bench.workload.lengths import Item, constant
from jaxflow.model.composition import Composition

SETTING = SarathiSetting(requests=54)


@pytest.fixture(scope="module")
def curves():
    return sarathi.gain_curves(SETTING, (128, 256, 512), (4, 7, 14, 28, 56))


@pytest.mark.parametrize("chunk_size", [128, 256, 512])
def test_the_gain_peaks_where_every_decode_runs_with_a_chunk(curves, chunk_size):
    """P : D = C / (B - 1), with C prompt tokens and B - 1 decodes: 6.5, 14 and 29 here (§5.1.3)."""
    expected = tile_chunk(chunk_size, SETTING.slots) / (SETTING.slots - 1)
    assert curves["expected_peak_by_chunk_size"][str(chunk_size)] == expected
    gains = curves["gain_by_chunk_size"][str(chunk_size)]
    ratios = np.array(curves["ratios"])
    nearest = int(np.argmin(abs(np.log(ratios / expected))))
    assert int(np.argmax(gains)) == nearest
    assert all(np.diff(gains[: nearest + 1]) > 0) and all(np.diff(gains[nearest:]) < 0)


def test_256_gains_most_and_128_loses_at_high_ratios(curves):
    """Small chunks carry more decodes but leave the compute units waiting for weights (§5.1.3)."""
    best = {size: max(gains) for size, gains in curves["gain_by_chunk_size"].items()}
    assert best["256"] > best["512"] > best["128"] > 1
    assert curves["gain_by_chunk_size"]["128"][-1] < 1 < curves["gain_by_chunk_size"]["512"][-1]


def test_chunks_as_long_as_prompts_are_orcas_best_case():
    """§5.2: with C at least the prompt length, one full prompt together with the decodes."""
    step_s = SETTING.step_s()
    items = constant(24, 200, 20)
    orca = sarathi.simulate(items, SimulatedPolicy("orca-best", 300), 6, step_s)
    hybrid = sarathi.simulate(items, SimulatedPolicy("hybrid", 300, 200), 6, step_s)
    assert orca.duration_s == pytest.approx(hybrid.duration_s)


def test_policies_rank_as_in_the_paper():
    rows = sarathi.policy_table(SETTING)["rows"]
    assert [(row["length"], row["slots"]) for row in rows] == [(1024, 18), (2048, 10), (3072, 6)]
    for row in rows:
        found = row["token_throughput"]
        assert found["orca-worst"] == pytest.approx(
            found["request-level"]
        )  # requests that start and end together
        assert found["request-level"] < found["orca-best"] < found["hybrid"]
        assert found["decode-maximal"] == pytest.approx(found["hybrid"], rel=0.05)


def test_a_token_past_a_full_tile_costs_another_tile():
    """Fig. 7: a step jumps just past each multiple of 128 tokens, by a share that falls with its length."""
    curve = sarathi.tile_curve(SETTING, range(128, 1025, 128))
    jumps = curve["one_token_more"]
    assert jumps["128"] < jumps["256"]  # at 128 weights still take longer than products
    assert jumps["256"] == pytest.approx(1.4, abs=0.1) and jumps["1024"] == pytest.approx(1.1, abs=0.05)
    flat = sarathi.tile_curve(dataclasses.replace(SETTING, tile_rows=None), range(256, 1025, 128))
    assert all(jump < 1.01 for jump in flat["one_token_more"].values())


def test_a_chunk_that_fills_tiles_with_its_decodes_is_faster():
    """§4.4: 256 - (B - 1) prompt tokens with B - 1 decodes, rather than 256."""
    step_s = SETTING.step_s()
    assert tile_chunk(256, 18) == 239
    fitting, over = Composition(17, 900.0, ((239, 0),)), Composition(17, 900.0, ((256, 0),))
    assert step_s(over) / over.tokens > 1.2 * step_s(fitting) / fitting.tokens


def test_a_decode_in_a_chunks_batch_is_cheaper():
    """Table 2: the marginal time of a decode in a prefill chunk's batch, by an order of magnitude."""
    step_s = SETTING.step_s()
    alone = step_s(Composition(4, 1024.0)) / 4
    riding = (step_s(Composition(3, 1024.0, ((1021, 0),))) - step_s(Composition(0, 0.0, ((1021, 0),)))) / 3
    assert 5 < alone / riding < 40


def test_the_simulation_computes_every_token_once_and_keeps_time():
    items = [Item(37, 5, 0.0), Item(300, 3, 0.0), Item(10, 40, 0.05), Item(64, 1, 9.0)]
    run = sarathi.simulate(items, SimulatedPolicy("decode-maximal", 96), 3, lambda step: 0.01)
    assert [r.output_tokens for r in run.records] == [5, 3, 40, 1]
    assert sum(step.tokens for step in run.steps) == sum(i.prompt_tokens + i.output_tokens - 1 for i in items)
    assert sum(step.count("chunk_pairs") for step in run.steps) == sum(
        i.prompt_tokens * (i.prompt_tokens + 1) // 2 for i in items
    )
    decode_keys = sum(sum(range(i.prompt_tokens + 1, i.prompt_tokens + i.output_tokens)) for i in items)
    assert sum(step.count("decode_keys") for step in run.steps) == pytest.approx(decode_keys)
    for item, record in zip(items, run.records, strict=True):
        assert record.completed and record.deliveries[0][0] >= item.arrival_s + 0.01
    assert run.records[3].finished_s == pytest.approx(9.01)  # the engine was idle at its arrival
    assert run.duration_s == run.records[3].finished_s


def test_padded_rows_of_ended_requests_cost_time():
    items = [Item(16, 2), Item(16, 50)]
    sizes = {}
    for policy in ("request-level", "orca-worst"):
        run = sarathi.simulate(items, SimulatedPolicy(policy, 64), 2, lambda step: 1e-3)
        sizes[policy] = [step.decode_tokens for step in run.steps if not step.chunks]
    assert sizes["request-level"] == [2] * 49
    assert sizes["orca-worst"] == [2] + [1] * 48
