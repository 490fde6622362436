"""The runner of vLLM, with a small stand-in for vLLM."""

import importlib.metadata
import json
import sys
import types
from pathlib import Path

import paths
import pytest
from absl import flags

from benchmarks import offline_rival, vllm_bench, vllm_loading, vllm_plugin
from benchmarks.in_turns import figures
from jaxflow.bench.engine import throughput
from jaxflow.bench.workload import lengths
from jaxflow.bench.workload.flags import items_from_flags
from jaxflow.cli.engine_flags import engine_config_from_flags

SETTINGS = sorted((paths.ROOT / "benchmarks/settings").glob("vllm-*.json"))


@pytest.fixture
def vllm(monkeypatch, tmp_path):
    """Put a stand-in in the place of vLLM, and return its engines. An answer has `lost` tokens too few."""
    made = types.SimpleNamespace(engines=[], lost=0, before=10.0)

    class Loader:
        def load_weights(self, model):
            self.counter_before_loading_weights, self.counter_after_loading_weights = made.before, 12.5
            return model

    class LLM:
        def __init__(self, model, **given):
            self.model, self.given, self.sent = model, given, []
            self.config = json.loads(Path(model, "config.json").read_text())
            made.engines.append(self)
            if given["load_format"] == "auto":
                vllm_loading.register()
                assert Loader().load_weights(model) == model

        def generate(self, prompts, params, use_tqdm):
            assert not use_tqdm and all(one["ignore_eos"] and one["temperature"] == 0 for one in params)
            self.sent.append([prompt["prompt_token_ids"] for prompt in prompts])
            counts = [one["max_tokens"] - made.lost for one in params]
            answers = [types.SimpleNamespace(token_ids=[1] * count) for count in counts]
            return [types.SimpleNamespace(outputs=[answer]) for answer in answers]

    monkeypatch.setitem(sys.modules, "vllm", types.SimpleNamespace(LLM=LLM, SamplingParams=dict))
    loaders = types.SimpleNamespace(DefaultModelLoader=Loader)
    monkeypatch.setitem(sys.modules, "vllm.model_executor.model_loader.default_loader", loaders)
    monkeypatch.setattr(offline_rival.importlib.metadata, "version", lambda name: "1")
    monkeypatch.setattr(vllm_bench, "FOLDER", tmp_path / "models")
    monkeypatch.setattr(sys, "path", list(sys.path))
    for name in vllm_bench.ENVIRONMENT:
        monkeypatch.setenv(name, "1")
    return made


def run(tmp_path, *more):
    sizes = ("--input_len", "16", "--output_len", "4", "--num_requests", "6", "--max_num_seqs", "8")
    return vllm_bench.main([*sizes, *more, "--output_json", f"{tmp_path}/r.json"])


@pytest.mark.parametrize(
    ("model", "precision", "quantization", "own"),
    [
        ("qwen3-30b-a3b", "bf16", None, False),
        ("qwen3-30b-a3b", "fp8", "fp8", False),
        ("gpt-oss-20b", "mxfp4", None, True),
        ("gpt-oss-20b", "bf16", None, False),
    ],
)
def test_the_report_has_the_figures_that_are_compared(vllm, tmp_path, model, precision, quantization, own):
    assert run(tmp_path, "--model", model, "--precision", precision, "--kv_cache_dtype", "fp8") == 0
    [engine] = vllm.engines
    wanted = {"max_num_seqs": 8, "max_num_batched_tokens": 8192, "kv_cache_dtype": "fp8"}
    assert engine.given.items() >= (wanted | {"quantization": quantization, "load_format": "dummy"}).items()
    assert engine.given["enable_prefix_caching"] is False
    assert ("quantization_config" in engine.config) == own
    drawn = lengths.prompts(lengths.constant(6, 16, 4), engine.config["vocab_size"], 0)
    assert engine.sent[-1] == [prompt.tolist() for prompt in drawn]
    assert len(engine.sent) == 1 + len(offline_rival.WARM_UP)
    found = json.loads((tmp_path / "r.json").read_text())
    assert found["total_token_throughput"] * found["duration"] == pytest.approx(6 * (16 + 4))
    assert found["versions"] == {"vllm": "1", "torch": "1"} and "device" not in found
    for name in ("total_token_throughput", "joules_per_token"):
        values = figures([{"side": "vLLM", "report": found}], name).get("vLLM", {}).get("values", [])
        assert values == [found[name]] * (found[name] is not None)


@pytest.mark.parametrize("path", SETTINGS, ids=lambda path: path.stem)
def test_both_sides_of_a_comparison_have_equal_requests_and_limits(no_flags, monkeypatch, path):
    monkeypatch.chdir(paths.ROOT)
    theirs, ours = (side["command"] for side in json.loads(path.read_text())["sides"])
    given = vllm_bench.flag_parser().parse_args([*theirs[2:], "--output_json", "r.json"])
    throughput.define_flags()
    flags.FLAGS(ours[2:])
    engine = engine_config_from_flags()
    drawn, described = items_from_flags(engine.max_model_len)
    assert offline_rival.items_of(given) == drawn and given.seed == flags.FLAGS.workload_seed
    assert not described["left_out"]
    assert (given.model, given.max_model_len) == (engine.model, engine.max_model_len)
    assert given.gpu_memory_utilization == engine.gpu_memory_utilization
    assert (given.kv_cache_dtype, given.precision == "fp8") == (
        "auto" if engine.kv_cache_dtype == "auto" else "fp8",
        engine.quantization == "fp8",
    )


def test_several_runs_have_other_tokens_and_all_count(vllm, tmp_path):
    run(tmp_path, "--model", "qwen3-30b-a3b", "--repeats", "3")
    [engine] = vllm.engines
    sent = engine.sent[-3:]
    assert len({tuple(map(tuple, one)) for one in sent}) == 3
    found = json.loads((tmp_path / "r.json").read_text())
    rates = [one["total_token_throughput"] for one in found["runs"]]
    assert found["repeats"] == len(rates) == 3 and found["total_token_throughput"] == sorted(rates)[1]
    compared = figures([{"side": "vLLM", "report": found}], "total_token_throughput")
    assert compared["vLLM"]["values"] == rates


def test_the_graphs_hold_all_sequences(vllm, tmp_path):
    for sequences, graphs in ((8, 512), (640, 640)):
        run(tmp_path, "--model", "qwen3-30b-a3b", "--max_num_seqs", str(sequences))
        assert vllm.engines[-1].given["compilation_config"] == {"max_cudagraph_capture_size": graphs}


def test_the_next_run_has_the_same_folder_and_another_precision_another_one(vllm, tmp_path):
    """The folder's name decides whether vLLM finds its compiled programs."""
    for precision in ("bf16", "bf16", "fp8"):
        run(tmp_path, "--model", "qwen3-30b-a3b", "--precision", precision)
    first, second, other = (engine.model for engine in vllm.engines)
    assert first == second != other


def test_answers_of_another_length_end_the_command(vllm, tmp_path):
    vllm.lost = 1
    with pytest.raises(RuntimeError, match="another number of tokens"):
        run(tmp_path, "--model", "qwen3-30b-a3b")
    assert not (tmp_path / "r.json").exists()


def test_a_precision_that_the_config_lacks_is_refused(vllm, tmp_path, capsys):
    with pytest.raises(SystemExit):
        run(tmp_path, "--model", "qwen3-30b-a3b", "--precision", "mxfp4")
    assert "mxfp4" in capsys.readouterr().err and not vllm.engines


def test_the_environment_of_the_caller_comes_first(vllm, tmp_path, monkeypatch):
    first, *others = vllm_bench.ENVIRONMENT
    monkeypatch.setenv(first, "own")
    for name in others:
        monkeypatch.delenv(name)
    run(tmp_path, "--model", "qwen3-30b-a3b")
    assert vllm_bench.os.environ[first] == "own"
    assert {name: vllm_bench.os.environ[name] for name in others} == {
        name: vllm_bench.ENVIRONMENT[name] for name in others
    }


@pytest.fixture
def checkpoint(tmp_path):
    """A folder with a config and 5 MB of weights in two files."""
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({"vocab_size": 100}))
    for name, size in (("model-1", 2), ("model-2", 3)):
        (folder / f"{name}.safetensors").write_bytes(bytes(size * 10**6))
    return folder


def test_a_checkpoint_is_read_and_its_rate_is_that_of_the_loading(vllm, tmp_path, checkpoint):
    assert run(tmp_path, "--checkpoint", str(checkpoint)) == 0
    [engine] = vllm.engines
    assert (engine.model, engine.given["load_format"]) == (str(checkpoint), "auto")
    points = importlib.metadata.entry_points(group=vllm_plugin.GROUP)
    assert vllm_loading.register in [one.load() for one in points]
    found = json.loads((tmp_path / "r.json").read_text())
    assert (found["weights_gb"], found["weights_s"]) == (0.005, 2.5)
    assert found["weights_gb_per_s"] == pytest.approx(0.002) and found["start_s"] > 0


def test_a_loader_without_times_leaves_the_start_alone(vllm, tmp_path, checkpoint):
    vllm.before = 0.0
    assert run(tmp_path, "--checkpoint", str(checkpoint)) == 0
    found = json.loads((tmp_path / "r.json").read_text())
    assert "weights_s" not in found and found["weights_gb"] == 0.005 and found["start_s"] > 0


@pytest.mark.parametrize(
    ("config", "precision", "words"),
    [
        (None, "bf16", "config.json"),
        ({"vocab_size": 100, "quantization_config": {"quant_method": "gptq"}}, "fp8", "format"),
        ({"vocab_size": 100}, "mxfp4", "mxfp4"),
    ],
)
def test_a_checkpoint_of_another_format_is_refused(
    vllm, tmp_path, capsys, checkpoint, config, precision, words
):
    (checkpoint / "config.json").unlink()
    if config:
        (checkpoint / "config.json").write_text(json.dumps(config))
    with pytest.raises(SystemExit):
        run(tmp_path, "--checkpoint", str(checkpoint), "--precision", precision)
    assert words in capsys.readouterr().err and not vllm.engines


def test_random_weights_have_no_loading_time(vllm, tmp_path):
    run(tmp_path, "--model", "qwen3-30b-a3b")
    assert not any("weights" in key for key in json.loads((tmp_path / "r.json").read_text()))
