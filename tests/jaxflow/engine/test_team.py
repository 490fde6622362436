"""What the processes of an engine must have in common, and which meshes they can fill."""

import dataclasses

import msgspec
import paths
import pytest

from jaxflow.config import ConfigError, EngineConfig
from jaxflow.engine.team import OWN_FIELDS, check_mesh, common_values
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.pipeline.handwritten import sequential_plan


@pytest.mark.parametrize(
    ("tp", "pp", "dp", "owners", "ok"),
    [
        (4, 1, 1, [0, 0, 1, 1], True),
        (2, 2, 1, [0, 0, 1, 1], True),
        (1, 4, 1, [0, 0, 1, 1], True),
        (2, 1, 1, [0, 0, 1, 1], False),  # process 1 would have nothing
        (8, 1, 1, [0, 0, 1, 1], False),
        (2, 2, 1, [0, 1, 2, 3], False),  # a stage over two processes
        (4, 1, 1, [0, 1, 2, 3], True),
        (2, 1, 2, [0, 0, 1, 1], True),
        (1, 1, 4, [0, 1, 2, 3], True),
        (4, 1, 2, [0, 1, 2, 3], False),
        (1, 1, 2, [0, 0, 1, 1], False),
    ],
)
def test_meshes(tp, pp, dp, owners, ok):
    sizes = {"tensor_parallel_size": tp, "pipeline_parallel_size": pp, "data_parallel_size": dp}
    config = EngineConfig("a-model", **sizes, enable_expert_parallel=dp > 1)
    if ok:
        check_mesh(config, owners)
    else:
        with pytest.raises(ConfigError) as refused:
            check_mesh(config, owners)
        assert refused.value.field == "tensor_parallel_size"


def test_every_setting_is_compared_but_those_of_a_process():
    checkpoint = open_checkpoint(str(paths.MODELS / "tiny-llama"))
    config = EngineConfig(str(paths.MODELS / "tiny-llama"), seed=3)
    values = common_values(config, config, checkpoint, {})
    fields = {field.name for field in dataclasses.fields(EngineConfig)}
    assert fields - set(values) == set(OWN_FIELDS)
    changed = dataclasses.replace(config, max_waiting=7, process_id=1)
    others = common_values(changed, config, checkpoint, {})
    assert {name for name in values if values[name] != others[name]} == {"max_waiting"}


def test_plans_and_the_table_of_maxima_are_compared(tmp_path):
    config = EngineConfig(str(paths.MODELS / "tiny-llama"))
    checkpoint = open_checkpoint(config.model)
    plan = sequential_plan(checkpoint.model_config, 16)
    table = tmp_path / "maxima.json"

    def differing(config: EngineConfig, plans: dict) -> set[str]:
        values, others = (common_values(config, config, checkpoint, each) for each in ({16: [plan]}, plans))
        return {name for name in values if values[name] != others[name]}

    assert differing(config, {16: [plan]}) == set()
    assert differing(config, {16: [msgspec.structs.replace(plan, name="another")]}) == {"plans"}
    calibrated = dataclasses.replace(config, calibration=str(table))
    before = common_values(calibrated, calibrated, checkpoint, {})
    table.write_text("{}")
    after = common_values(calibrated, calibrated, checkpoint, {})
    assert {name for name in after if before[name] != after[name]} == {"calibration_file"}


def test_a_copy_of_the_checkpoint_has_the_same_digest_and_a_changed_one_another(tmp_path):
    config = EngineConfig(str(paths.MODELS / "tiny-llama"))
    for name in ("config.json", "model.safetensors"):
        (tmp_path / name).write_bytes((paths.MODELS / "tiny-llama" / name).read_bytes())
    ours = common_values(config, config, open_checkpoint(config.model), {})["weights"]
    copy = open_checkpoint(str(tmp_path))
    assert common_values(config, config, copy, {})["weights"] == ours
    damaged = bytearray((tmp_path / "model.safetensors").read_bytes())
    damaged[-1] ^= 1
    (tmp_path / "model.safetensors").write_bytes(damaged)
    assert common_values(config, config, copy, {})["weights"] != ours
