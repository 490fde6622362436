"""Machine code that another process made: the same program, or the engine compiles as before."""

import dataclasses
import logging
from unittest import mock

import h200
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src import compilation_cache
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxflow.engine.ahead_of_time import (
    NotLoaded,
    Target,
    compile_for,
    is_timed,
    load,
    machine_code,
    target_meshes,
    target_of,
    untimed,
)
from jaxflow.engine.lowered_cache import Kept, LoweredPrograms, compile_program, write_signed
from jaxflow.engine.start_times import StartTimes
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.parallel.mesh import make_mesh
from jaxflow.pipeline.handwritten import copied, sequential_plan, two_nano_batch_plan

TARGET = Target("a device", ("jaxlib 1",), "")
SHAPE = jax.ShapeDtypeStruct(
    (8,), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(jax.devices("cpu")[0])
)


def steps(x, y):
    return x * 3 + y, y - 1


def other(x, y):
    return x * 5 + y, y - 2


def code_of(fn, arguments=2) -> bytes:
    return fresh_code(jax.jit(fn, donate_argnums=(0,)).lower(*(SHAPE,) * arguments), 1)


def fresh_code(lowered: jax.stages.Lowered, devices: int) -> bytes:
    """Return the machine code of a program that XLA compiles now. On a CPU, code of a cache lacks parts."""
    missing = mock.patch.object(compilation_cache, "get_executable_and_time", return_value=(None, None))
    with h200.unkept(), missing:
        return machine_code(lowered.compile(), devices)


def kept(folder, target=TARGET) -> Kept:
    programs = LoweredPrograms(folder, "settings", target=target)
    lowered = programs.lower("step", jax.jit(steps, donate_argnums=(0,)), (0,), SHAPE, SHAPE)
    assert isinstance(lowered, Kept)
    return lowered


def result(compiled) -> np.ndarray:
    x = jnp.arange(8, dtype=jnp.float32) + 0
    where = x.unsafe_buffer_pointer()
    out, _ = compiled(x, jnp.ones(8))
    assert x.is_deleted() and out.unsafe_buffer_pointer() == where  # the donated argument stays in place
    return np.asarray(out)


OURS = np.arange(8) * 3 + 1


def test_machine_code_of_the_folder_runs_in_place_of_a_compilation(tmp_path):
    """`other` stands for `steps`, so that its results show which one ran."""
    lowered, times = kept(tmp_path), StartTimes()
    assert not lowered.programs.code_path(lowered.digest, {}).exists()
    write_signed(lowered.programs.code_path(lowered.digest, {}), code_of(other))
    less = {"xla_backend_optimization_level": 0}
    np.testing.assert_array_equal(result(compile_program(kept(tmp_path), less)), OURS)
    compiled = compile_program(lowered)
    np.testing.assert_array_equal(result(compiled), np.arange(8) * 5 + 1)
    assert compiled.memory_analysis().alias_size_in_bytes == 32
    assert times.summary()["loaded"] == 1


def test_the_next_program_of_the_thread_is_compiled(tmp_path):
    lowered = kept(tmp_path)
    write_signed(lowered.programs.code_path(lowered.digest, {}), code_of(other))
    compile_program(lowered)
    np.testing.assert_array_equal(result(compile_program(kept(tmp_path / "another"))), OURS)


@pytest.mark.parametrize(
    "fault", ["damaged", "no machine code", "another program's", "another file's", "no cache", "missing"]
)
def test_code_that_does_not_fit_is_compiled_again(fault, tmp_path, caplog):
    lowered = kept(tmp_path)
    path = lowered.programs.code_path(lowered.digest, {})
    if fault == "damaged":
        write_signed(path, code_of(other))
        path.write_bytes(path.read_bytes()[:-1])
    elif fault == "no machine code":
        write_signed(path, b"no machine code")
    elif fault == "another program's":
        write_signed(path, code_of(lambda x: x + 1, 1))
    elif fault == "another file's":
        write_signed(path.with_name("other.code"), code_of(other))
        path.with_name("other.code").rename(path)
    elif fault == "no cache":
        write_signed(path, code_of(other))
        jax.config.update("jax_enable_compilation_cache", False)
    try:
        with caplog.at_level(logging.WARNING):
            np.testing.assert_array_equal(result(compile_program(lowered)), OURS)
    finally:
        jax.config.update("jax_enable_compilation_cache", True)
    assert len(caplog.records) == (fault not in ("no cache", "missing"))


@pytest.mark.parametrize(
    "change",
    [{"device": "another device"}, {"versions": ("jaxlib 2",)}, {"flags": "--xla_gpu_autotune_level=0"}],
)
def test_the_file_of_machine_code_has_the_name_of_all_it_depends_on(change, tmp_path):
    lowered = kept(tmp_path)
    target = Target(**{name: getattr(TARGET, name) for name in TARGET.__struct_fields__} | change)
    programs = dataclasses.replace(lowered.programs, target=target)
    assert programs.code_path(lowered.digest, {}) != lowered.programs.code_path(lowered.digest, {})


def test_on_an_h200_products_are_those_of_cublas_and_donated_arguments_stay_in_place():
    there = h200.h200_mesh()
    target = target_of(there)
    assert target is not None
    (mesh,) = target_meshes(target, [there])
    assert mesh.devices.flat[0].device_kind == there.devices.flat[0].device_kind

    def step(x, w):
        return jnp.tanh(x @ w), x[0]

    args = (jax.ShapeDtypeStruct((512, 512), jnp.bfloat16),) * 2
    here = h200.abstract(make_mesh(1), args)  # on this process's CPU, as a process has its arguments
    compiled = compile_for(mesh, jax.jit(step, donate_argnums=(0,)), here, untimed(None, "9.0"))
    text, memory = compiled.as_text(), compiled.memory_analysis()
    assert text is not None and "__cublas" in text and "triton" not in text
    assert memory is not None and memory.alias_size_in_bytes == 512 * 512 * 2
    assert b"\x7fELF" in machine_code(compiled, 1)


@pytest.mark.parametrize(
    ("quantization", "capability", "given"),
    [
        (None, "9.0", True),
        ("fp8", "9.0", True),
        ("int4", "9.0", False),
        (None, "8.0", False),
        (None, "", False),
    ],
)
def test_programs_without_timed_products(quantization, capability, given):
    assert bool(untimed(quantization, capability)) == given


@pytest.mark.parametrize("tp", [1, 2])
def test_overlapped_plans_over_several_gpus_time_their_products(tp):
    model = open_checkpoint("llama-3.1-8b", load_format="dummy").model_config
    plain, cut = sequential_plan(model, 64, tp), two_nano_batch_plan(model, 64, 32, tp=tp)
    assert not is_timed(plain, tp)
    for plan in (cut, copied(plain)):
        assert is_timed(plan, tp) == (tp > 1)


def summed(*ids: int) -> tuple[jax.stages.Lowered, NamedSharding]:
    """Return a program with a sum over devices and a donated argument, and the placement of its arguments."""
    mesh = Mesh(np.array([jax.devices()[at] for at in ids]), ("tp",))
    parts = NamedSharding(mesh, PartitionSpec("tp"))

    def run(x, y):
        total = jax.shard_map(
            lambda a, b: jax.lax.psum(a * b, "tp"), mesh=mesh, in_specs=parts.spec, out_specs=PartitionSpec()
        )(x, y)
        return x + 1, total

    shape = jax.ShapeDtypeStruct((12,), jnp.float32, sharding=parts)
    return jax.jit(run, donate_argnums=(0,)).lower(shape, shape), parts


@pytest.mark.parametrize("ids", [(0, 1), (2, 3), (3, 2)])
def test_machine_code_of_several_devices_runs_on_those_of_the_program(ids):
    """As the code of a pipeline stage does: all kinds of devices have one description."""
    lowered, parts = summed(*ids)
    compiled = load(lowered, fresh_code(summed(0, 1)[0], 2), {})
    x, y = (jax.device_put(np.arange(12, dtype=np.float32), parts) for _ in range(2))
    more, total = compiled(x, y)
    assert x.is_deleted() and more.sharding.is_equivalent_to(parts, 1)
    assert [part.device.id for part in more.addressable_shards] == list(ids)
    np.testing.assert_array_equal(more, np.arange(12) + 1)
    np.testing.assert_array_equal(total, np.square(np.arange(12)).reshape(2, 6).sum(0))


@pytest.mark.parametrize(("code_on", "on"), [((0,), (0, 1)), ((0, 1), (0,)), ((0, 1), (0, 1, 2))])
def test_machine_code_for_another_number_of_devices_is_not_loaded(code_on, on):
    """XLA loads the code of one device for two, and ends the process for the code of two on one."""
    code, (lowered, _) = fresh_code(summed(*code_on)[0], len(code_on)), summed(*on)
    with pytest.raises(NotLoaded, match="devices"):
        load(lowered, code, {})


def test_each_stage_is_compiled_for_its_own_devices():
    there = h200.h200_mesh((4,))
    target = target_of(there)
    assert target is not None
    parts = [Mesh(there.devices[i : i + 2], ("tp",)) for i in (0, 2)]
    assert [[d.id for d in mesh.devices.flat] for mesh in target_meshes(target, parts)] == [[0, 1], [2, 3]]


def test_a_compiler_of_other_versions_is_refused():
    with pytest.raises(ValueError, match="versions"):
        target_meshes(TARGET, [make_mesh(1)])


def test_devices_that_xla_does_not_describe_have_no_target():
    assert target_of(make_mesh(1)) is None
