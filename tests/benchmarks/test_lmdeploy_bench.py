"""The runner of LMDeploy, with small stand-ins for LMDeploy and PyTorch."""

import json
import sys
import types
from typing import ClassVar

import paths
import pytest
from absl import flags

from benchmarks import lmdeploy_bench, offline_rival
from benchmarks.in_turns import figures
from jaxflow.bench.engine import throughput
from jaxflow.bench.workload.flags import items_from_flags
from jaxflow.cli.engine_flags import engine_config_from_flags
from jaxflow.model.checkpoints.checkpoint import open_checkpoint

SETTINGS = sorted((paths.ROOT / "benchmarks/settings").glob("lmdeploy-*.json"))


class Engine:
    """A stand-in for TurboMind: it reads the checkpoint at once, and answers with `lost` tokens too few."""

    made: ClassVar[list["Engine"]] = []
    lost = 0
    loader = types.SimpleNamespace(create_checkpoint=None)

    def __init__(self, folder, engine_config):
        self.config = engine_config
        self.sent = []
        with open(f"{folder}/config.json") as file:
            self.model = json.load(file)
        checkpoint = self.loader.create_checkpoint(folder)
        names = list(checkpoint.keys())
        self.shapes = {key: checkpoint.get(key) for key in names}
        Engine.made.append(self)

    @classmethod
    def from_pretrained(cls, folder, engine_config):
        return cls(folder, engine_config)

    def create_instance(self):
        return self

    async def async_stream_infer(self, number, input_ids, gen_config, stream_output):
        assert gen_config["ignore_eos"] and gen_config["top_k"] == 1 and not stream_output
        self.sent.append(len(input_ids))
        yield types.SimpleNamespace(token_ids=[1] * (gen_config["max_new_tokens"] - self.lost))


@pytest.fixture
def lmdeploy(monkeypatch):
    """Put the stand-ins in the place of the packages. A tensor is its shape and its number of bytes."""

    class Tensor:
        def __init__(self, shape, dtype, **_):
            self.shape, self.size = shape, dtype

        def to(self, dtype):
            return Tensor(self.shape, dtype)

        def __mul__(self, factor):
            return self

    modules = {
        "torch": types.SimpleNamespace(
            bfloat16=2,
            float32=4,
            float8_e4m3fn=1,
            manual_seed=lambda seed: None,
            ones=Tensor,
            randn=Tensor,
            zeros=lambda shape, device: Tensor((shape,), 4),
            full=lambda shape, value, dtype, device: Tensor(shape, dtype),
        ),
        "lmdeploy": types.SimpleNamespace(),
        "lmdeploy.messages": types.SimpleNamespace(TurbomindEngineConfig=dict, GenerationConfig=dict),
        "lmdeploy.turbomind": types.SimpleNamespace(),
        "lmdeploy.turbomind.model_loader": Engine.loader,
        "lmdeploy.turbomind.turbomind": types.SimpleNamespace(TurboMind=Engine, Tokenizer=None),
        "lmdeploy.turbomind.checkpoint": types.SimpleNamespace(Checkpoint=object),
    }
    for name, module in modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(Engine, "made", [])
    monkeypatch.setattr(offline_rival.importlib.metadata, "version", lambda name: "1")
    return Engine


def run(tmp_path, *more):
    sizes = ("--input_len", "16", "--output_len", "4", "--num_requests", "6", "--max_num_seqs", "8")
    return lmdeploy_bench.main([*sizes, *more, "--output_json", f"{tmp_path}/r.json"])


@pytest.mark.parametrize("precision", ["bf16", "fp8"])
def test_the_report_has_the_figure_that_is_compared(lmdeploy, tmp_path, precision):
    assert run(tmp_path, "--precision", precision, "--kv_cache_dtype", "int8") == 0
    [engine] = lmdeploy.made
    assert engine.sent[-6:] == [16] * 6
    assert engine.config["max_batch_size"] == 8 and engine.config["quant_policy"] == 8
    assert ("quantization_config" in engine.model) == (precision == "fp8")
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["total_token_throughput"] * found["duration"] == pytest.approx(6 * (16 + 4))
    [rate] = figures([{"side": "LMDeploy", "report": found}], "total_token_throughput")["LMDeploy"]["values"]
    assert rate == found["total_token_throughput"]


@pytest.mark.parametrize(("precision", "size"), [("bf16", 2), ("fp8", 1)])
def test_the_checkpoint_has_the_parameters_of_the_model(lmdeploy, tmp_path, precision, size):
    """Products, norms, embedding and head have the parameters that the model's own count has."""
    run(tmp_path, "--precision", precision)
    [engine] = lmdeploy.made
    weights = {key: one for key, one in engine.shapes.items() if key.endswith(".weight")}
    model = open_checkpoint("llama-3.1-8b", load_format="dummy").model_config
    count = sum(one.shape[0] * (one.shape[1] if len(one.shape) > 1 else 1) for one in weights.values())
    assert count == 8_030_261_248  # as published for Llama-3.1-8B
    assert {one.size for key, one in weights.items() if "proj" in key} == {size}
    scales = sum(key.endswith("_scale_inv") for key in engine.shapes)
    assert scales == (7 * model.num_layers if precision == "fp8" else 0)


def test_lognormal_lengths_are_those_of_bench_throughput(lmdeploy, tmp_path):
    run(tmp_path, "--lengths", "lognormal", "--num_requests", "20")
    want = offline_rival.lengths.lognormal(20, 16, 4, seed=0)
    assert lmdeploy.made[0].sent[-20:] == [item.prompt_tokens for item in want]


@pytest.mark.parametrize("path", SETTINGS, ids=lambda path: path.stem)
def test_both_sides_of_a_comparison_have_equal_requests(no_flags, monkeypatch, path):
    monkeypatch.chdir(paths.ROOT)
    theirs, ours = (side["command"] for side in json.loads(path.read_text())["sides"])
    given = lmdeploy_bench.flag_parser().parse_args([*theirs[2:], "--output_json", "r.json"])
    throughput.define_flags()
    flags.FLAGS(ours[2:])
    drawn, described = items_from_flags(engine_config_from_flags().max_model_len)
    assert offline_rival.items_of(given) == drawn
    assert given.seed == flags.FLAGS.workload_seed and not described["left_out"]
    most = max(item.prompt_tokens + item.output_tokens for item in drawn)
    assert most <= min(given.max_model_len, lmdeploy_bench.SESSION_TOKENS)


def test_answers_of_another_length_end_the_command(lmdeploy, tmp_path, monkeypatch):
    monkeypatch.setattr(Engine, "lost", 1)
    with pytest.raises(RuntimeError, match="another number of tokens"):
        run(tmp_path)
    assert not (tmp_path / "r.json").exists()


def test_a_model_of_another_architecture_is_refused(lmdeploy, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(tmp_path, "--model", "qwen3-30b-a3b")
    assert "Llama" in capsys.readouterr().err and not lmdeploy.made
