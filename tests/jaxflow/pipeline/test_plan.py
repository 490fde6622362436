"""Plans as data: files, borders, and every way of being wrong is found and named."""

import drawn
import msgspec
import paths
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxflow.config import ParallelConfig
from jaxflow.model.graph import model_graph
from jaxflow.pipeline.compiler import compile_plan, xla_options
from jaxflow.pipeline.handwritten import (
    four_qkv_plan,
    phased_plan,
    sequential_plan,
    two_nano_batch_plan,
    whole_experts_plan,
)
from jaxflow.pipeline.plan import (
    SCHEMA_VERSION,
    NanoOp,
    Plan,
    PlanError,
    Predictions,
    Target,
    borders,
    digest,
    fitting,
    from_json,
    load,
    save,
    to_json,
)
from jaxflow.pipeline.program import RECEIVED_ROWS, SENT_ROWS, check, program

CONFIGS = {name: drawn.config_of(name) for name in ("tiny-llama", "tiny-gemma2", "tiny-mixtral", "tiny-opt")}
LLAMA = CONFIGS["tiny-llama"]
TARGET = Target("llama-3.1-8b", "H200", ParallelConfig(), "bfloat16", "bfloat16", 1024, 1024, 800)


def edited(plan, nano_id, **changes):
    """Return the plan with one entry changed, or without the entry if no change is given."""
    entries = (
        msgspec.structs.replace(n, **changes) if n.id == nano_id else n
        for n in plan.nano_ops
        if changes or n.id != nano_id
    )
    return msgspec.structs.replace(plan, nano_ops=tuple(entries))


def swapped(plan, a, b):
    entries = list(plan.nano_ops)
    i, j = (next(k for k, n in enumerate(entries) if n.id == name) for name in (a, b))
    entries[i], entries[j] = entries[j], entries[i]
    return msgspec.structs.replace(plan, nano_ops=tuple(entries))


@pytest.mark.parametrize("tp", [1, 2])
@pytest.mark.parametrize("name", CONFIGS)
def test_handwritten_plans_are_accepted(name, tp):
    config = CONFIGS[name]
    for plan in (
        sequential_plan(config, 24, tp),
        two_nano_batch_plan(config, 24, 7, tp),
        phased_plan(config, 24, 16, tp),
        four_qkv_plan(config, 24, 9, tp, (48, 84)),
    ):
        graph = model_graph(config, tp)
        check(plan, graph)
        runs = program(plan, graph)
        assert len(runs) == sum(
            len([n for n in plan.nano_ops if n.op == op.name]) for ops in graph.layers for op in ops
        )
        assert from_json(to_json(plan)) == plan


@pytest.mark.parametrize("ranks", [2, 4])
def test_ops_on_rows_for_other_ranks_need_the_same_cuts(ranks):
    config = CONFIGS["tiny-mixtral"]
    plan, graph = two_nano_batch_plan(config, 24, 7, ranks=ranks), model_graph(config, ranks=ranks)
    check(plan, graph)
    check(sequential_plan(config, 24, ranks=ranks), graph)
    for op in (*SENT_ROWS[1:], *RECEIVED_ROWS):
        moved = edited(edited(plan, f"{op}.0", stop=8), f"{op}.1", start=8)
        with pytest.raises(PlanError, match=r"rows (for|of) other ranks need the same cuts"):
            check(moved, graph)


def test_experts_take_whole_gathers_and_no_parts_of_exchanges():
    config = CONFIGS["tiny-mixtral"]  # a token has two experts, so four ranks exchange rows
    for ranks, tp in ((2, 1), (2, 2), (4, 2)):
        check(whole_experts_plan(config, 24, 7, tp, ranks=ranks), model_graph(config, tp, ranks=ranks))
    with pytest.raises(PlanError, match="rows for other ranks need the same cuts"):
        check(whole_experts_plan(config, 24, 7, ranks=4), model_graph(config, ranks=4))
    moved = two_nano_batch_plan(config, 24, 7, ranks=2)
    for op in RECEIVED_ROWS:
        moved = edited(edited(moved, f"{op}.0", stop=8), f"{op}.1", start=8)
    with pytest.raises(PlanError, match="begins at 8, inside a range of expert_dispatch"):
        check(moved, model_graph(config, ranks=2))


@settings(max_examples=40)
@given(st.data())
def test_drawn_plans_are_accepted_and_survive_files(data):
    graph = model_graph(CONFIGS[data.draw(st.sampled_from(sorted(CONFIGS)))])
    plan = data.draw(drawn.plans(graph, 16, streams=True))
    check(plan, graph)
    assert from_json(to_json(plan)) == plan
    cuts = {t for n in plan.nano_ops if n.op == "chunk_attention" for t in (n.start, n.stop)}
    assert borders(plan) == tuple(sorted(cuts - {0, 16}))


def test_a_digest_depends_only_on_the_function_of_a_plan():
    plan = two_nano_batch_plan(LLAMA, 24, 7)
    same = [
        msgspec.structs.replace(plan, **changes)
        for changes in (
            {"name": "other"},
            {"target": TARGET},
            {"predictions": Predictions((0,), (0,), ((1.0,),), ((2.0,),))},
        )
    ]
    assert {digest(one) for one in (*same, from_json(to_json(plan)))} == {digest(plan)}
    first, second = plan.nano_ops[0].id, plan.nano_ops[1].id
    others = [
        two_nano_batch_plan(LLAMA, 24, 8),
        two_nano_batch_plan(LLAMA, 32, 7),
        msgspec.structs.replace(plan, tokens=32),
        msgspec.structs.replace(plan, sums="copies"),
        swapped(plan, first, second),
        *(
            edited(plan, second, **change)
            for change in ({"stream": 1}, {"sms": 40}, {"ahead": 1}, {"waits": (first,)}, {})
        ),
    ]
    assert len({digest(one) for one in (plan, *others)}) == 1 + len(others)


def test_committed_plans_that_differ_have_distinct_digests():
    plans = [load(path) for path in (paths.ROOT / "benchmarks" / "plans").rglob("*.json")]
    searched = [plan for plan in plans if plan.name == "searched llama-3.1-8b 2048 1024/512"]
    assert len({digest(plan) for plan in searched}) == len(searched) == 6
    for plan in plans:
        assert all((digest(plan) == digest(other)) == (does(plan) == does(other)) for other in plans)


def does(plan):
    return plan.nano_ops, plan.tokens, plan.sums


def test_plans_are_loaded_from_files_by_target(tmp_path):
    plan = msgspec.structs.replace(two_nano_batch_plan(LLAMA, 24, 7), target=TARGET)
    save(plan, tmp_path / "a.json")
    save(
        msgspec.structs.replace(
            plan, name="other", target=msgspec.structs.replace(TARGET, parallel=ParallelConfig(4))
        ),
        tmp_path / "b.json",
    )
    save(sequential_plan(LLAMA, 24), tmp_path / "c.json")
    assert load(tmp_path / "a.json") == plan and borders(plan) == (7,)
    assert fitting(tmp_path, "llama-3.1-8b", "NVIDIA H200", ParallelConfig(), "bfloat16", "bfloat16") == (
        plan,
    )
    assert [
        p.name
        for p in fitting(
            tmp_path, "some/llama-3.1-8b", "NVIDIA H200", ParallelConfig(4), "bfloat16", "bfloat16"
        )
    ] == ["other"]
    assert fitting(tmp_path, "llama-3.1-8b", "NVIDIA H200", ParallelConfig(), "float32", "bfloat16") == ()
    with pytest.raises(PlanError, match=r"nowhere\.json: No such file"):
        load(tmp_path / "nowhere.json")


AXIS = b'{"decode_tokens": [8, 4], "mean_context_tokens": [9], "step_s": [[1.0]], "sequential_s": [[1.0]]}'
TABLE = (
    b'{"decode_tokens": [4], "mean_context_tokens": [9, 10], "step_s": [[1.0]], "sequential_s": [[1.0, 1.0]]}'
)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"{", "x.json: "),
        (b"[]", "x.json: "),
        (b'{"schema_version": 3, "name": ' + b"[" * 100_000, "x.json: .*recursion"),
        (b'{"name": "a"}', "schema_version"),
        (b'{"schema_version": 3, "name": "\xff", "tokens": 8, "nano_ops": []}', "utf-8"),
        (b'{"schema_version": 1, "name": "a"}', "schema_version=1 is not supported: this release reads 3"),
        (
            b'{"schema_version": 3, "name": "a", "tokens": 8, "nano_ops": [], "predictions": %s}' % AXIS,
            "decode_tokens=.*rising",
        ),
        (
            b'{"schema_version": 3, "name": "a", "tokens": 8, "nano_ops": [], "predictions": %s}' % TABLE,
            "step_s: 1 rows of 2",
        ),
        (b'{"schema_version": 3, "name": "a", "tokens": 8}', "nano_ops"),
        (b'{"schema_version": 3, "name": "a", "tokens": "8", "nano_ops": []}', r"\$\.tokens"),
        (
            b'{"schema_version": 3, "name": "a", "tokens": 8, '
            b'"nano_ops": [{"id": "q", "op": "qkv", "start": 0}]}',
            r"nano_ops\[0\]",
        ),
        (b'{"schema_version": 3, "name": "a", "tokens": 8, "nano_ops": [], "speed": 9}', "speed"),
    ],
)
def test_invalid_files_are_refused_by_name(text, message):
    with pytest.raises(PlanError, match=message) as refused:
        from_json(text, "x.json")
    assert refused.value.entry == "x.json"


TWO = two_nano_batch_plan(LLAMA, 16, 6)
WRONG = [
    (edited(TWO, "qkv.1"), "qkv.0", r"qkv of tokens \[6, 16\) runs nowhere"),
    (edited(TWO, "qkv.1", start=8), "qkv.1", r"qkv of tokens \[6, 8\) runs nowhere"),
    (edited(TWO, "qkv.1", start=4), "qkv.1", r"qkv of tokens \[4, 6\) runs more than once"),
    (edited(TWO, "down.1", stop=17), "down.1", r"tokens \[6, 17\) are not within \[0, 16\)"),
    (edited(TWO, "down.1", stop=6), "down.1", r"tokens \[6, 6\)"),
    (edited(TWO, "down.0", op="rest"), "down.0", "op='rest' is not in this model's layers: attn_norm, qkv"),
    (edited(TWO, "down.0", op="router"), "down.0", "op='router' is not in"),
    (edited(TWO, "down.0", id="down.1"), "down.1", "another nano-op has this id"),
    (edited(TWO, "down.0", stream=-1), "down.0", "stream=-1: 0 to 31"),
    (edited(TWO, "down.0", stream=2**31), "down.0", "stream=2147483648: 0 to 31"),
    (edited(TWO, "down.0", sms=0), "down.0", "sms=0"),
    (edited(TWO, "down.0", ahead=10**9), "down.0", "ahead=1000000000: -2 to 2, the model's layers"),
    (edited(TWO, "rope_append.0", stream=1), "rope_append.0", "runs on the main stream"),
    (edited(TWO, "down.0", waits=("lunch",)), "down.0", "waits for 'lunch'"),
    (edited(TWO, "down.0", waits=("down.0",)), "down.0", "waits for 'down.0'"),
    (
        swapped(TWO, "up_gate.0", "down.0"),
        "down.0",
        r"reads a of tokens \[0, 6\) of layer 0 before it is made",
    ),
    (edited(TWO, "down.0", ahead=1), "down.0", r"reads a of tokens \[0, 6\) of layer 0 before it is made"),
    (edited(TWO, "attn_norm.1", ahead=1), "attn_norm.1", r"reads x2 of tokens \[6, 16\) of layer 0 before"),
    (msgspec.structs.replace(TWO, tokens=20), "attn_norm.1", r"attn_norm of tokens \[16, 20\) runs nowhere"),
    (Plan("empty", 16, ()), "attn_norm", "no nano-op runs this op"),
]


@pytest.mark.parametrize(
    ("plan", "entry", "message"), WRONG, ids=[f"{entry}-{i}" for i, (_, entry, _) in enumerate(WRONG)]
)
def test_wrong_plans_are_refused_by_entry(plan, entry, message):
    with pytest.raises(PlanError, match=message) as refused:
        check(plan, model_graph(LLAMA))
    assert refused.value.entry == entry


def test_attention_needs_the_appends_of_all_tokens_before_it():
    """The later half of a prefill chunk reads the KV of the earlier half.

    Data dependences would allow this order.
    """
    order = [
        "attn_norm.0",
        "attn_norm.1",
        "qkv.0",
        "qkv.1",
        "rope_append.1",
        "chunk_attention.1",
        "decode_attention.1",
        "rope_append.0",
    ]
    rest = [n.id for n in TWO.nano_ops if n.id not in order]
    by_id = {n.id: n for n in TWO.nano_ops}
    plan = msgspec.structs.replace(TWO, nano_ops=tuple(by_id[name] for name in order + rest))
    with pytest.raises(
        PlanError, match=r"chunk_attention.1: reads keys before rope_append of tokens \[0, 6\)"
    ):
        check(plan, model_graph(LLAMA))


@pytest.mark.parametrize(
    ("changes", "named"),
    [
        ({"margin": -0.1}, "margin=-0.1"),
        ({"decode_tokens": (9, 9)}, r"decode_tokens=\(9, 9\)"),
        ({"mean_context_tokens": ()}, r"mean_context_tokens=\(\)"),
        ({"step_s": ((0.0,),)}, "step_s: 1 rows of 1 seconds above 0"),
        ({"sequential_s": ((1.0,), (1.0,))}, "sequential_s: 1 rows"),
    ],
)
def test_invalid_predictions_are_refused(changes, named):
    """Predictions made by a search raise PlanError, as predictions read from a file do."""
    valid = {
        "decode_tokens": (8,),
        "mean_context_tokens": (64,),
        "step_s": ((1.0,),),
        "sequential_s": ((2.0,),),
    }
    with pytest.raises(PlanError, match=f"predictions: {named}"):
        Predictions(**(valid | changes))
    fields = msgspec.to_builtins(TWO) | {"schema_version": SCHEMA_VERSION, "predictions": valid | changes}
    with pytest.raises(PlanError, match=named):
        from_json(msgspec.json.encode(fields))


def test_plans_that_cannot_be_compiled_are_refused():
    mixtral = CONFIGS["tiny-mixtral"]
    apart = edited(sequential_plan(mixtral, 16), "router", stream=1)
    with pytest.raises(PlanError, match="router: from here to router, stream 1 leaves no single array"):
        compile_plan(apart, mixtral)
    with pytest.raises(PlanError, match=r"down.0: sms=133: the kernels take 1 to 132"):
        compile_plan(edited(TWO, "down.0", sms=133), LLAMA)
    with pytest.raises(PlanError, match=r"split: 16 does not cut \[0, 16\) in two"):
        two_nano_batch_plan(LLAMA, 16, 16)


def test_xla_flags_follow_from_the_plan():
    phased, two = phased_plan(LLAMA, 16, 6), two_nano_batch_plan(LLAMA, 16, 6, 2)
    assert xla_options(sequential_plan(LLAMA, 16)) == xla_options(sequential_plan(LLAMA, 16, 2), 2) == {}
    assert (
        xla_options(TWO)
        == xla_options(TWO, graphs="whole")
        == xla_options(sequential_plan(LLAMA, 16), graphs="whole")
        != {}
    )
    assert xla_options(two, 2).keys() - xla_options(TWO).keys() == {
        "xla_gpu_experimental_use_collective_kernels"
    }
    sequential = sequential_plan(LLAMA, 16, 2)
    assert (
        xla_options(sequential, 2, hidden_bytes=8192) == xla_options(sequential, 1, hidden_bytes=8193) == {}
    )
    assert xla_options(sequential, 2, hidden_bytes=8193) == {
        "xla_gpu_experimental_use_collective_kernels": ""
    }
    assert xla_options(phased)["xla_gpu_command_buffer_scheduling_mode"] == "CONCURRENT"
    assert xla_options(phased, graphs="streams")["xla_gpu_enable_command_buffer"] == ""
    assert not xla_options(phased_plan(LLAMA, 16, 6, 2), 2)["xla_gpu_enable_latency_hiding_scheduler"]


def test_default_fields_of_nano_ops_are_left_out_of_files():
    assert b'"stream"' not in to_json(TWO) and NanoOp("a", "qkv", 0, 1) == msgspec.json.decode(
        b'{"id":"a","op":"qkv","start":0,"stop":1}', type=NanoOp
    )
