"""Decode-only steps run a program without chunks, and their answers equal the goldens."""

import dataclasses

import numpy as np
import pytest
import toy

from jaxflow.engine import stage_programs
from jaxflow.engine.layout import StepLayout
from jaxflow.engine.loop_start import make_loop
from jaxflow.engine.step_plans import make_layouts, one_alone, read_while_launched, uses_pdl
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.pipeline.handwritten import sequential_plan, two_nano_batch_plan
from jaxflow.request import Request
from pallas_kernels.gemm.api import HopperGemm, product_of
from pallas_kernels.gemm.tuned_table import Choice, Rule, Shape, Table
from pallas_kernels.kernel_set import REFERENCE

MODEL = "tiny-llama"


@pytest.fixture(scope="module")
def loop():
    with pytest.MonkeyPatch.context() as patch:  # as on a GPU
        patch.setattr(
            stage_programs,
            "make_layouts",
            lambda *args, **_: make_layouts(*args, decodes_alone=True, one=True),
        )
        config, made = toy._executor.__wrapped__(MODEL, 1, 16, 6, 96, "sequential", None, "auto", False, 1)
        made.warm_up()
    return make_loop(config, made.programs.context.config, made)


def test_buckets_that_decodes_may_need_have_a_program_for_them_alone(loop):
    config = loop.executor.programs.context.config
    settings = toy.EngineConfig(model=MODEL, max_num_seqs=6, block_size=16)
    plans = [two_nano_batch_plan(config, 32, 8), *(sequential_plan(config, tokens) for tokens in (4, 8, 16))]
    assert [layout.key for layout in make_layouts(settings, config, plans, decodes_alone=False)] == [
        (32, plans[0].name, False),
        *((tokens, "sequential", False) for tokens in (4, 8, 16)),
    ]
    *others, few, more = make_layouts(
        settings, config, plans, decodes_alone=True
    )  # 6 sequences never need 16
    assert [layout.key for layout in (few, more)] == [
        (4, "sequential", True),
        (8, "sequential", True),
    ] and len(others) == 4
    assert few.chunks == more.chunks == 0 and others[0].chunks == 7
    *_, one, few, _ = make_layouts(settings, config, plans, decodes_alone=True, one=True)
    assert (one.tokens, one.rows, one.plan, one.decodes) == (1, 1, "sequential", True) and few.tokens == 4


def test_one_decode_has_a_step_of_its_own_where_its_products_want_no_tensor_cores():
    shape = Shape(4096, 4096)
    tables = [
        Table("", (Rule(shape, (Choice(1, kernel), Choice(64, "flat"))),)) for kernel in ("fma", "flat")
    ]
    sets = [dataclasses.replace(REFERENCE, gemm=HopperGemm(table)) for table in tables]
    assert [one_alone([product_of(shape, 8)], kernels) for kernels in (*sets, REFERENCE)] == [
        True,
        False,
        False,
    ]
    assert not one_alone(
        [product_of(dataclasses.replace(shape, weights="float8_e4m3fn", scales="rows"), 8)], sets[0]
    )
    assert not one_alone([product_of(shape, 8, "float32")], sets[0])  # absent from every table


def test_few_decodes_alone_begin_their_kernels_early_where_kernels_can():
    hopper = dataclasses.replace(REFERENCE, gemm=HopperGemm(Table("")))
    alone = StepLayout(64, 64, 64, 64, decodes=True)
    assert uses_pdl(alone, hopper, 1, 436 * 10**6)  # Llama-3.1-8B in bfloat16
    assert not uses_pdl(alone, hopper, 1, 218 * 10**6)  # in fp8: the host would be what is waited for
    assert not uses_pdl(alone, REFERENCE, 1, 436 * 10**6)
    assert not uses_pdl(alone, hopper, 2, 436 * 10**6)
    assert not any(
        uses_pdl(layout, hopper, 1, 10**9)
        for layout in (dataclasses.replace(alone, decodes=False), dataclasses.replace(alone, tokens=128))
    )


def test_a_step_of_a_mixture_reads_the_experts_that_its_tokens_choose():
    mixture = open_checkpoint("qwen3-30b-a3b", load_format="dummy").model_config

    def read(tokens):
        layer = {"qkv": np.zeros((5, 2), np.int8), "expert_down": np.zeros((128, 70), np.int8)}
        return read_while_launched([layer, {"qkv": np.zeros((9999, 99), np.int8)}], mixture, tokens)

    assert read(1) == pytest.approx((10 + 8 * 70) * 8 / 14)
    assert read(10**4) == pytest.approx((10 + 128 * 70) * 8 / 14)
    assert read(1) < read(2) < read(64)


def test_steps_of_decodes_alone_run_them(loop, goldens):
    seen, single, run = [], [], loop.executor.run

    def watched(layout, buffer, *args, **kwargs):
        fields = layout.views(buffer)
        single.append(layout.tokens == 1)
        seen.append((layout.decodes, bool((fields["token_rows"] >= fields["num_decodes"]).any())))
        return run(layout, buffer, *args, **kwargs)

    loop.executor.run = watched
    golden = goldens(MODEL)
    prompts = toy.prompts(golden)
    results = toy.run(
        loop, [Request(str(i), prompt.tolist(), toy.GREEDY) for i, prompt in enumerate(prompts)]
    )
    for i, prompt in enumerate(golden["prompts"]):
        assert results[str(i)].tokens == prompt["greedy_ids"][:32]
    assert set(seen) == {
        (True, False),
        (False, True),
    }  # (a program without chunks, whether somebody prefills)
    single.clear()
    alone = toy.run(loop, [Request("alone", prompts[0].tolist(), toy.GREEDY)])["alone"]
    assert alone.tokens == golden["prompts"][0]["greedy_ids"][:32] and sum(single) == 31
    assert loop.executor.compilations == 0
