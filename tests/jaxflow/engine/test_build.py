"""From settings to an engine: defaults, buckets, plans."""

import dataclasses
import types

import jax
import msgspec
import paths
import pytest
import toy
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.config import ConfigError, EngineConfig, ParallelConfig
from jaxflow.engine import page_count
from jaxflow.engine import settings as defaults
from jaxflow.engine import step_plans as engine_plans
from jaxflow.engine.dense_products import dense_products
from jaxflow.engine.page_count import memory_budget
from jaxflow.engine.program_compiler import ProgramCompiler
from jaxflow.engine.settings import resolve
from jaxflow.engine.start import prepare_process, start_engine
from jaxflow.engine.step_plans import choose_plans, step_sizes, token_buckets
from jaxflow.kv.tiers import host_machine
from jaxflow.kv.tiers.start import check_host
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.parallel.mesh import make_mesh
from jaxflow.pipeline import choice
from jaxflow.pipeline import plan as plans
from jaxflow.pipeline.handwritten import copied, sequential_plan, two_nano_batch_plan
from jaxflow.request import Request
from pallas_kernels.gemm.tuned_table import Shape

LLAMA = str(paths.MODELS / "tiny-llama")


@pytest.fixture(scope="module")
def checkpoint():
    return open_checkpoint(LLAMA)


@given(st.integers(1, 20_000), st.booleans())
def test_buckets(budget, few):
    sizes = token_buckets(budget, sparse=few)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == budget
    halfway = {3 * 2**i for i in range(7, 14)}
    assert all(
        size == budget or size in halfway or (size >= (1 if few else 8) and size & (size - 1) == 0)
        for size in sizes
    )
    if few:
        assert len(sizes) <= 4
    else:
        for tokens in range(8, min(budget, 3000) + 1):  # little padding
            bucket = next(size for size in sizes if size >= tokens)
            assert bucket - tokens < (tokens / 2 if tokens > 256 else tokens)


def test_all_sequences_decoding_are_not_padded_by_half():
    assert set(token_buckets(2048, sparse=False, seqs=640)) - set(token_buckets(2048, sparse=False)) == {640}
    assert token_buckets(2048, sparse=False, seqs=560)[-5:] == (576, 768, 1024, 1536, 2048)
    for seqs, few in ((512, False), (2048, False), (640, True)):
        assert token_buckets(2048, sparse=few, seqs=seqs) == token_buckets(2048, sparse=few)


def test_the_sizes_that_are_asked_for_and_the_budget_are_compiled(checkpoint):
    config = EngineConfig(
        LLAMA, max_num_batched_tokens=512, max_num_seqs=4, step_sizes="128,16,128", plan="sequential"
    )
    assert list(choose_plans(config, checkpoint.model_config)) == [16, 128, 512]
    assert step_sizes(dataclasses.replace(config, step_sizes=None)) == token_buckets(512, sparse=True)


@pytest.mark.parametrize("sizes", [(128, 16, 128), [16, 128]])
def test_step_sizes_may_be_numbers(sizes):
    as_text = EngineConfig(LLAMA, max_num_batched_tokens=512, step_sizes=",".join(map(str, sizes)))
    as_numbers = EngineConfig(LLAMA, max_num_batched_tokens=512, step_sizes=sizes)
    assert as_numbers == as_text
    assert step_sizes(as_numbers) == (16, 128, 512)


class TestResolve:
    def test_everything_left_open_is_decided(self, checkpoint):
        model = checkpoint.model_config
        config = resolve(EngineConfig(model=LLAMA), model)
        assert (config.dtype, config.kv_cache_dtype) == ("float32", "float32")
        assert config.max_model_len == model.max_position
        assert (config.max_num_seqs, config.max_num_batched_tokens, config.plan) == (64, 256, "sequential")

    def test_a_cpu_runs_fewer_sequences_where_memory_or_the_step_is_short(self, checkpoint, monkeypatch):
        model = checkpoint.model_config
        token = sum(defaults.page_bytes(defaults.page_groups(model, "float32", 1), 1, 1))

        def seqs(held, **settings):
            weights = defaults._shard_bytes(resolve(EngineConfig(model=LLAMA), model), model)
            bytes_free = int(held * defaults.TOKENS_OF_SEQ * token * 2 / 0.9) + weights + 4
            monkeypatch.setattr(defaults, "free_host_bytes", lambda: max(bytes_free, 1 << 20))
            return resolve(EngineConfig(model=LLAMA, **settings), model).max_num_seqs

        assert [seqs(held) for held in (1000, 64, 63, 16)] == [64, 64, 32, 16]
        assert seqs(1000, max_num_batched_tokens=48) == 48
        assert seqs(1000, max_num_batched_tokens=5) == 5
        assert seqs(16, max_num_seqs=24) == 24

    def test_everything_given_is_kept(self, checkpoint):
        given = EngineConfig(
            model=LLAMA,
            dtype="bfloat16",
            kv_cache_dtype="float32",
            max_model_len=33,
            max_num_seqs=3,
            max_num_batched_tokens=5,
            block_size=7,
            plan="sequential",
        )
        assert resolve(given, checkpoint.model_config) == given

    @pytest.mark.parametrize(
        ("field", "settings"),
        [
            ("max_model_len", {"max_model_len": 10**6}),
            ("max_num_batched_tokens", {"max_num_batched_tokens": 8, "max_num_seqs": 9}),
        ],
    )
    def test_what_cannot_be(self, checkpoint, field, settings):
        with pytest.raises(ConfigError, match=f"^{field}="):
            resolve(EngineConfig(model=LLAMA, **settings), checkpoint.model_config)

    def test_a_compilation_cache_that_is_set_stays(self):
        before = jax.config.jax_compilation_cache_dir
        assert before
        prepare_process(EngineConfig(model=LLAMA, compilation_cache_dir="/elsewhere"))
        assert jax.config.jax_compilation_cache_dir == before


class TestPlans:
    def settings(self, checkpoint, **more):
        return resolve(EngineConfig(model=LLAMA, max_num_batched_tokens=96, **more), checkpoint.model_config)

    def test_sequential_for_every_bucket(self, checkpoint):
        found = choose_plans(self.settings(checkpoint), checkpoint.model_config)
        assert list(found) == [1, 8, 64, 96]
        assert all(
            several == (sequential_plan(checkpoint.model_config, tokens),)
            for tokens, several in found.items()
        )

    def test_a_file_is_taken_at_the_tokens_it_is_for(self, checkpoint, tmp_path):
        overlapped = two_nano_batch_plan(checkpoint.model_config, 48, 20)
        plans.save(overlapped, tmp_path / "plan.json")
        found = choose_plans(
            self.settings(checkpoint, plan=str(tmp_path / "plan.json")), checkpoint.model_config
        )
        assert list(found) == [1, 8, 48, 64, 96]
        assert found[48] == (overlapped,)
        assert found[96] == (sequential_plan(checkpoint.model_config, 96),)

    @pytest.mark.parametrize(
        ("damage", "said"),
        [
            (lambda ops: (), "attn_norm: no nano-op runs this op"),
            (
                lambda ops: (*ops[:-1], msgspec.structs.replace(ops[-1], op="banana")),
                "op='banana' is not in this model's layers",
            ),
            (lambda ops: ops[::-1], "before it is made"),
            (lambda ops: ops * 2, "another nano-op has this id"),
            (
                lambda ops: tuple(msgspec.structs.replace(n, sms=4, waits=("lunch",)) for n in ops),
                "waits for 'lunch'",
            ),
        ],
        ids=["empty", "op", "order", "twice", "waits"],
    )
    def test_a_damaged_sequential_plan_is_refused_before_it_sets_the_budget(
        self, checkpoint, tmp_path, damage, said
    ):
        """A sequential plan in the folder would be replaced by the engine's own, and its tokens would become
        the largest step.
        """
        plan = sequential_plan(checkpoint.model_config, 10**9)
        plans.save(
            msgspec.structs.replace(plan, name="damaged", nano_ops=damage(plan.nano_ops)),
            tmp_path / "plan.json",
        )
        with pytest.raises(plans.PlanError, match=f"^damaged: .*{said}"):
            resolve(EngineConfig(model=LLAMA, plan=str(tmp_path / "plan.json")), checkpoint.model_config)
        with pytest.raises(plans.PlanError, match=f"^damaged: .*{said}"):
            choose_plans(self.settings(checkpoint, plan=str(tmp_path / "plan.json")), checkpoint.model_config)

    @pytest.mark.parametrize(
        ("changes", "said"),
        [
            ({"sms": 133}, "qkv: sms=133: the kernels take 1 to 132"),
            ({"stream": 2**31}, "qkv: stream=2147483648: 0 to 31"),
        ],
        ids=["sms", "stream"],
    )
    def test_what_no_gpu_could_run_is_refused_before_weights_are_read(
        self, checkpoint, tmp_path, changes, said
    ):
        plan = sequential_plan(checkpoint.model_config, 16)
        ops = tuple(msgspec.structs.replace(n, **changes) if n.op == "qkv" else n for n in plan.nano_ops)
        plans.save(msgspec.structs.replace(plan, name="large", nano_ops=ops), tmp_path / "plan.json")
        with pytest.raises(plans.PlanError, match=f"^large: {said}"):
            resolve(EngineConfig(model=LLAMA, plan=str(tmp_path / "plan.json")), checkpoint.model_config)

    def test_sums_that_so_many_devices_cannot_do_are_refused_before_weights_are_read(
        self, checkpoint, tmp_path
    ):
        plans.save(copied(two_nano_batch_plan(checkpoint.model_config, 16, 8)), tmp_path / "plan.json")
        with pytest.raises(
            plans.PlanError,
            match=r"^two nano-batches, 8 \+ 8, sums copied: sums='copies': accepted are all-reduces over two "
            r"devices",
        ):
            resolve(EngineConfig(model=LLAMA, plan=str(tmp_path / "plan.json")), checkpoint.model_config)

    def test_a_plan_over_the_budget(self, checkpoint, tmp_path):
        plans.save(two_nano_batch_plan(checkpoint.model_config, 128, 64), tmp_path / "plan.json")
        with pytest.raises(ConfigError, match=r"max_num_batched_tokens=96 .* at least 128"):
            choose_plans(self.settings(checkpoint, plan=str(tmp_path / "plan.json")), checkpoint.model_config)

    def test_no_plan_was_searched_for_this_machine(self, checkpoint):
        with pytest.raises(
            ConfigError,
            match=r"plan='searched' .*tiny-llama on 1 x cpu, float32 over a float32 cache is shipped",
        ):
            choose_plans(self.settings(checkpoint, plan="searched"), checkpoint.model_config)

    def test_an_overlapped_plan_serves_the_golden(self, checkpoint, tmp_path, goldens):
        path = tmp_path / "plan.json"
        plans.save(two_nano_batch_plan(checkpoint.model_config, 64, 24), path)
        golden = goldens("tiny-llama")
        requests = [Request(f"{i}", prompt, toy.GREEDY) for i, prompt in enumerate(toy.prompts(golden))]
        loop = toy.loop("tiny-llama", plan=str(path))
        results = toy.run(loop, requests)
        for i, prompt in enumerate(golden["prompts"]):
            assert results[f"{i}"].tokens == prompt["greedy_ids"][:32]
        assert [layout.borders for layout in loop.executor.layouts[64]] == [(24,)]

    def test_a_folder_is_a_portfolio_for_its_model(self, checkpoint, tmp_path):
        """One bucket holds several plans and the sequential plan. The plans set the step size by default."""
        target = plans.Target("tiny-llama", "cpu", ParallelConfig(), "float32", "float32", 30, 18, 100)
        predicted = plans.Predictions((0,), (1,), ((1.0,),), ((2.0,),))
        made = [
            msgspec.structs.replace(
                two_nano_batch_plan(checkpoint.model_config, 48, cut),
                name=f"{cut}",
                target=target,
                predictions=predicted,
            )
            for cut in (20, 30)
        ]
        other = msgspec.structs.replace(
            made[0], target=msgspec.structs.replace(target, parallel=ParallelConfig(2))
        )
        for name, plan in {"a": made[0], "b": made[1], "c": other}.items():
            plans.save(plan, tmp_path / f"{name}.json")
        config = resolve(EngineConfig(model=LLAMA, plan=str(tmp_path)), checkpoint.model_config)
        assert config.max_num_batched_tokens == 48
        found = choose_plans(config, checkpoint.model_config)
        alone = {tokens: (sequential_plan(checkpoint.model_config, tokens),) for tokens in (1, 8)}
        assert found == alone | {48: (sequential_plan(checkpoint.model_config, 48), *made)}
        with pytest.raises(ConfigError, match=r"no plan for .* on 2 x cpu, bfloat16 .* is in that folder"):
            resolve(
                EngineConfig(model=LLAMA, plan=str(tmp_path), tensor_parallel_size=2, dtype="bfloat16"),
                checkpoint.model_config,
            )


FP8_NUMBERS = {"quantization": "fp8", "kv_cache_dtype": "fp8"}
BY_DEFAULT = {  # by the shipped plans: the plans and the budget of an engine with default settings
    **{
        f"{name}-float8_e4m3fn": ("searched", 2048)
        for name in ("deepseek-67b-tp2", "llama-2-70b-tp2", "llama-3-70b-tp2", "qwen2-72b-tp2")
    },
    "llama-3-70b-tp4-bfloat16": ("searched", 2048),
    "llama-3-70b-tp4-float8_e4m3fn": ("searched", 4096),
    **dict.fromkeys(
        ("llama-3.1-8b-bfloat16", "llama-3.1-8b-float8_e4m3fn", "mixtral-8x7b-tp2-bfloat16"),
        ("sequential", 2048),
    ),
    **dict.fromkeys(
        ("llama-3-70b-tp2-bfloat16", "qwen2-72b-tp2-bfloat16"), ("sequential", 768)
    ),  # the best of its steps
}


class TestShipped:
    """Resolve the shipped plans of the H200 on a simulated H200."""

    @pytest.fixture(autouse=True)
    def h200(self, monkeypatch):
        monkeypatch.setattr(defaults, "on_gpu", lambda: True)
        monkeypatch.setattr(engine_plans, "on_gpu", lambda: True)
        monkeypatch.setattr(jax, "devices", lambda *_: [types.SimpleNamespace(device_kind="NVIDIA H200")])

    def resolved(self, name, model=None, **settings):
        config = EngineConfig(model=name, tensor_parallel_size=2, **FP8_NUMBERS, **settings)
        return resolve(config, model or open_checkpoint(name, load_format="dummy").model_config)

    def test_it_is_what_an_engine_runs_if_nothing_is_said(self, caplog):
        model = open_checkpoint("llama-3-70b", load_format="dummy").model_config
        config = self.resolved("llama-3-70b")
        assert (config.plan, config.max_num_batched_tokens) == ("searched", 2048)
        with caplog.at_level("INFO"):
            found = choose_plans(config, model)
        assert [len(several) for several in found.values()] == [1] * (len(found) - 1) + [2] and list(found)[
            -1
        ] == 2048
        assert (
            "steps of 2048 tokens run 'two nano-batches, 1024 + 1024, sums copied', where it is sure to gain"
            in caplog.text
        )
        assert self.resolved("llama-3-70b", plan="sequential").plan == "sequential"
        assert self.resolved("llama-3-70b", max_num_batched_tokens=1024).plan == "sequential", (
            "a plan that no step could run"
        )

    @pytest.mark.parametrize("name", BY_DEFAULT)
    def test_each_is_loaded_by_default_where_it_is_sure_to_gain(self, name):
        shipped = plans.load(plans.SHIPPED / f"h200-{name}.json")
        model = open_checkpoint(shipped.target.model, load_format="dummy").model_config
        numbers = FP8_NUMBERS if shipped.target.dtype == "float8_e4m3fn" else {}
        config = EngineConfig(
            shipped.target.model, tensor_parallel_size=shipped.target.parallel.tp, **numbers
        )
        resolved = resolve(config, model)
        assert (resolved.plan, resolved.max_num_batched_tokens) == BY_DEFAULT[name]
        runs = {
            plan
            for several in choose_plans(resolved, model).values()
            for plan in several
            if not choice.is_sequential(plan)
        }
        assert runs == ({shipped} if resolved.plan == "searched" else set())
        assert (
            resolve(dataclasses.replace(config, plan="searched"), model).max_num_batched_tokens
            == shipped.tokens
        )
        alone = resolve(dataclasses.replace(config, plan="sequential"), model)
        assert alone.max_num_batched_tokens == (768 if BY_DEFAULT[name][1] == 768 else 2048)

    def test_none_else_is_shipped(self):
        assert {path.stem for path in plans.SHIPPED.glob("*.json")} == {f"h200-{name}" for name in BY_DEFAULT}

    def test_a_smaller_step_is_the_default_where_all_sequences_fit_in(self):
        model = open_checkpoint("llama-3-70b", load_format="dummy").model_config
        for seqs, budget in ((768, 768), (769, 2048)):
            for plan in ("auto", "sequential", "searched"):
                config = EngineConfig("llama-3-70b", tensor_parallel_size=2, max_num_seqs=seqs, plan=plan)
                assert resolve(config, model).max_num_batched_tokens == budget
                assert (
                    resolve(
                        dataclasses.replace(config, max_num_batched_tokens=1024), model
                    ).max_num_batched_tokens
                    == 1024
                )

    def test_a_model_of_its_shapes_has_it_whatever_its_name(self):
        model = open_checkpoint("llama-3-70b", load_format="dummy").model_config
        assert self.resolved("somewhere/My-Finetune", model).plan == "searched"
        other = dataclasses.replace(model, vocab_size=model.vocab_size + 64)
        assert self.resolved("somewhere/My-Finetune", other).plan == "sequential"

    def test_a_plan_that_gains_nowhere_for_sure_is_none(self, caplog):
        """`searched` also loads a shipped sequential plan, where no other plan is faster, and logs this."""
        model = open_checkpoint("llama-3.1-8b", load_format="dummy").model_config
        for numbers, words in (
            ({}, "'92+40 1024/512' is sure to gain nowhere"),
            (FP8_NUMBERS, "none is faster than the sequential step"),
        ):
            assert resolve(EngineConfig(model="llama-3.1-8b", **numbers), model).plan == "sequential"
            config = resolve(
                EngineConfig(model="llama-3.1-8b", plan="searched", max_num_batched_tokens=2048, **numbers),
                model,
            )
            with caplog.at_level("INFO"):
                found = choose_plans(config, model)
            assert {plan.name for several in found.values() for plan in several} == {
                "sequential"
            } and words in caplog.text


def test_memory_is_shared_by_the_devices_of_one_host():
    config = EngineConfig(model=LLAMA, gpu_memory_utilization=0.5)
    one, four = memory_budget(make_mesh(1), config), memory_budget(make_mesh(4), config)
    assert 0 < four < one
    assert four == pytest.approx(one / 4, rel=0.2)


def test_memory_that_the_cache_of_files_holds_is_free(checkpoint, tmp_path, monkeypatch):
    """A laptop with 200 MB unused memory and 6 GB of file cache gives half of its free memory to pages."""
    (tmp_path / "meminfo").write_text(
        "MemTotal: 8000000 kB\nMemFree: 200000 kB\nMemAvailable: 6000000 kB\nCached: 6100000 kB\n"
    )
    monkeypatch.setattr(host_machine, "MEMINFO", tmp_path / "meminfo")
    monkeypatch.setattr(host_machine, "CGROUP", tmp_path / "none")
    assert (
        memory_budget(make_mesh(1), EngineConfig(model=LLAMA, gpu_memory_utilization=0.5))
        == 6_000_000 * 1024 // 4
    )
    config = resolve(EngineConfig(model=LLAMA, kv_offloading_size=5.0), checkpoint.model_config)
    check_host(config, checkpoint.model_config)
    with pytest.raises(
        ConfigError, match=r"kv_offloading_size=6.0 .* at most the 5.7 GiB of free host memory"
    ):
        check_host(dataclasses.replace(config, kv_offloading_size=6.0), checkpoint.model_config)
    (tmp_path / "meminfo").write_text(
        "MemTotal: 8000000 kB\n"
    )  # a kernel that does not say; macOS, which has not even the file
    assert 0 < host_machine.free_host_bytes() <= host_machine.host_memory_bytes()

    def unknown(name):
        if name == "SC_AVPHYS_PAGES":
            raise ValueError("unrecognized configuration name")
        return {"SC_PHYS_PAGES": 2000, "SC_PAGE_SIZE": 4096}[name]

    monkeypatch.setattr(host_machine, "MEMINFO", tmp_path / "none")
    monkeypatch.setattr(host_machine.os, "sysconf", unknown)
    assert host_machine.free_host_bytes() == 2000 * 4096


def test_pages_that_the_host_has_no_memory_for_are_refused(checkpoint, monkeypatch):
    monkeypatch.setattr(page_count, "free_host_bytes", lambda: 2**10)
    with pytest.raises(
        ConfigError,
        match=r"max_model_len=.* GiB of KV pages and .* GiB of host memory are free for them",
    ):
        start_engine(
            EngineConfig(model=checkpoint.name, max_num_batched_tokens=8, max_num_seqs=8),
            checkpoint,
            progress=False,
        )


def test_an_engine_with_nothing_said_about_pages(checkpoint, monkeypatch):
    """With plenty of memory the engine takes the pages that all sequences can use.

    A program that failed for lack of memory is compiled again by itself.
    """
    tried = []

    def crowded(compiler, lowered, options=None):
        tried.append(lowered)
        if len(tried) == 2:
            raise jax.errors.JaxRuntimeError(
                "RESOURCE_EXHAUSTED: Out of memory while trying to allocate 1018.00MiB"
            )
        return compiled(compiler, lowered, options)

    compiled = ProgramCompiler._compile
    monkeypatch.setattr(ProgramCompiler, "_compile", crowded)
    config = EngineConfig(
        model=LLAMA,
        max_num_seqs=2,
        max_num_batched_tokens=8,
        step_sizes="4",
        max_model_len=100,
        block_size=16,
    )
    engine = start_engine(config, checkpoint, progress=False)
    try:
        assert engine.executor.num_pages == (2 * 7 + 1,)
        assert engine.driver.stats().kv_pages_free == 15
        assert 0 < engine.warm_up_s < engine.start["total_s"]
        assert engine.start["lowering_s"] + engine.start["rehearsal_s"] < engine.warm_up_s
        assert [tried.count(one) for one in dict.fromkeys(tried)].count(2) == 1 and tried.count(tried[1]) == 2
        left_open = {"max_model_len": None, "dtype": "auto", "kv_cache_dtype": "auto", "plan": "auto"}
        assert dataclasses.replace(engine.config, **left_open) == dataclasses.replace(
            config, max_model_len=None
        )
    finally:
        engine.driver.close()


def test_the_products_of_a_model_are_told_as_one_device_holds_them(checkpoint):
    model = checkpoint.model_config
    products = dense_products(model, checkpoint.load("float32", make_mesh(2), progress=False))
    heads = (model.num_heads + 2 * model.num_kv_heads) * model.head_dim
    assert products["qkv"].shape == Shape(heads // 2, model.hidden_size, "float32")
    assert products["up_gate"].shape == Shape(
        model.intermediate_size, model.hidden_size, "float32", model.gate_block
    )
    assert list(products) == ["qkv", "out_proj", "up_gate", "down", "logits"]
