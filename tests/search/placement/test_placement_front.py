"""The front of latency and throughput, and alternatives to a found policy."""

import itertools

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from search.placement.cost_model import BlockChoice, memory_bytes, split
from search.placement.front import Front, front, pareto, save_front
from search.placement.machine_curves import load_machine
from search.placement.rivals import rivals
from search.placement.solver import GIGA, BlockCandidate, PlacementOptions, TierMemory, candidates, search
from search.placement.workload import workload

MACHINE = load_machine("h200")
OPT = workload("opt-30b", open_checkpoint("opt-30b", load_format="dummy").model_config, 512, 32)
MEMORY = TierMemory(16 * GIGA, 100 * GIGA, 500 * GIGA)
FEW = PlacementOptions(gpu_batch_sizes=(1, 8, 16, 48), num_gpu_batches=(1, 2, 4))

drawn = st.lists(
    st.builds(BlockCandidate, st.just(BlockChoice(1, 1)), st.floats(0.1, 100), st.integers(1, 1000)),
    max_size=20,
)


@given(drawn)
def test_the_front_is_what_none_beats(found):
    kept = pareto(found)
    for a, b in itertools.pairwise(kept):
        assert a.latency_s <= b.latency_s and a.tokens_per_s < b.tokens_per_s
    for one in found:
        assert any(best.latency_s <= one.latency_s and best.tokens_per_s >= one.tokens_per_s for best in kept)


def test_larger_blocks_trade_latency_for_throughput(tmp_path):
    found = candidates(OPT, MACHINE, MEMORY, FEW)
    best = pareto(found)
    assert len(best) > 2 and best[0].choice.block_size < best[-1].choice.block_size
    path = tmp_path / "front.json"
    save_front(front("opt-30b", "h200", found), path)
    read = msgspec.json.decode(path.read_bytes(), type=Front)
    assert len(read.points) == len(found) and sum(point.best for point in read.points) == len(best)
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")


def test_no_rival_is_faster_and_all_of_them_fit():
    policy = search(OPT, MACHINE, MEMORY, FEW)
    rows = {row.name: row for row in rivals(OPT, MACHINE, MEMORY, FEW, policy)}
    best = rows["all optimisations"].prediction
    assert best is not None
    for row in rows.values():
        if row.policy is None or row.prediction is None:
            continue
        assert row.prediction.tokens_per_s <= best.tokens_per_s * (1 + 1e-5), row.name
        assert all(
            used <= capacity * (1 + 1e-6)
            for used, capacity in zip(memory_bytes(OPT, *split(row.policy)), MEMORY, strict=True)
        )
    assert rows["all on the device"].policy is None
    assert rows["row by row"].policy is not None and rows["row by row"].policy.num_gpu_batches == 1
