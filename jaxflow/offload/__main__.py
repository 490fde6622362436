"""Offline generation with a model that does not fit the device: FlexGen's runtime, after a policy.

  python -m search placement --model opt-30b --gpu_mem 16 --cpu_mem 100 --output policy.json
  python -m jaxflow.offload --model opt-30b --load_format dummy --policy policy.json --gpu_memory_limit 16 --host_memory_limit 100

Prompts are the lines of --prompts (texts, or JSON objects with `prompt`: a text or token ids), or --num_prompts random ones of
--prompt_tokens tokens.
Throughput is generated tokens / (prefill + decode time), as in the paper. --output gets a JSON object a prompt, --output_json the
report.
"""

import dataclasses
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from absl import flags

from jaxflow.config import ConfigError
from jaxflow.engine.request import SamplingParams
from jaxflow.flags import define_engine_flags, engine_config_from_flags
from jaxflow.llm import LLM, Prompt
from jaxflow.mesh import choose_platform
from jaxflow.model.checkpoint import CheckpointError, open_checkpoint
from jaxflow.offload.disk_tier import DiskError
from jaxflow.offload.policy import Policy, PolicyError, Shares, load_policy
from jaxflow.offload.schedule import SCHEDULES
from jaxflow.offload.settings import OffloadConfig

KINDS = ("weights", "kv", "activations")


def define_flags() -> None:
    """Flags of the settings that `OffloadConfig` has, and of what overrides a policy."""
    flags.DEFINE_string("policy", None, "The policy: a file that `python -m search placement` wrote.")
    for kind in KINDS:
        flags.DEFINE_list(f"{kind}_percent", None, f"Overrides the policy: percentages of {kind} on device, host and disk, as 20,80,0.")
    for name in ("prompt_tokens", "output_tokens", "gpu_batch_size", "num_gpu_batches"):
        flags.DEFINE_integer(name, None, "Overrides the policy.", lower_bound=1)
    for name in ("weight_bits", "kv_bits"):
        flags.DEFINE_enum(name, None, ["16", "4"], "Overrides the policy.")
    flags.DEFINE_bool("host_attention", None, "Overrides the policy: whether decodes attend on the host to what KV is not on the device.")
    flags.DEFINE_float("gpu_memory_limit", None, "GB of the device that may be used.")
    flags.DEFINE_float("host_memory_limit", None, "GB of the host that may be used.")
    flags.DEFINE_float("disk_limit", None, "GB of disk that may be used.")
    flags.DEFINE_string("disk_path", None, "A folder for what the policy keeps on disk.")
    flags.DEFINE_enum("schedule", "zigzag", list(SCHEDULES), "row: batch by batch, which fetches the weights for each.")
    flags.DEFINE_bool("overlap", True, "False: each transfer ends before the next step begins.")


def policy_from_flags(model: str) -> Policy:
    """The policy file with what overrides it. Raises: ConfigError, PolicyError."""
    f = flags.FLAGS
    if f.policy is None:
        name = open_checkpoint(model, load_format="dummy").name
        raise ConfigError("policy", None, f"a policy's file: `python -m search placement --model {name} --output policy.json` writes one")
    changes: dict[str, Any] = {}
    for kind in KINDS:
        given = f[f"{kind}_percent"].value
        if given is not None:
            changes[kind] = _shares(f"{kind}_percent", given)
    for name in ("prompt_tokens", "output_tokens", "gpu_batch_size", "num_gpu_batches", "weight_bits", "kv_bits", "host_attention"):
        if f[name].value is not None:
            changes[name] = int(str(f[name].value)) if name.endswith("bits") else f[name].value
    return msgspec.structs.replace(load_policy(f.policy), **changes)


def _shares(flag: str, given: Sequence[str]) -> Shares:
    try:
        device, host, disk = map(float, given)
    except ValueError:
        raise ConfigError(flag, ",".join(given), "three percentages: device, host, disk") from None
    return Shares(device, host, disk)


def offload_from_flags(model: str) -> OffloadConfig:
    """Raises: ConfigError, PolicyError."""
    names = [field.name for field in dataclasses.fields(OffloadConfig) if field.name != "policy"]
    given: dict[str, Any] = {name: flags.FLAGS[name].value for name in names}
    return OffloadConfig(policy_from_flags(model), **given)


def read_prompts(path: str) -> list[Prompt]:
    """The prompts of a file, a line each. Raises: ConfigError naming the line."""
    found: list[Prompt] = []
    for number, line in enumerate(Path(path).read_text("utf-8").splitlines(), start=1):
        if line.startswith("{"):
            try:
                found.append(json.loads(line)["prompt"])
            except (ValueError, KeyError) as error:
                raise ConfigError("prompts", f"{path}, line {number}", "a text, or a JSON object with `prompt`") from error
        elif line.strip():
            found.append(line)
    return found


def random_prompts(number: int, tokens: int, vocabulary: int, seed: int) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    return [rng.integers(0, vocabulary, tokens).tolist() for _ in range(number)]


def run() -> dict[str, Any]:
    """The command: generates, and returns the report. Raises: ConfigError, PolicyError, CheckpointError, DiskError, InvalidRequest."""
    from jaxflow.offload.link import measure_link
    from jaxflow.offload.report import report, text

    f = flags.FLAGS
    config = engine_config_from_flags()
    offload = offload_from_flags(config.model)
    policy = offload.policy
    given = read_prompts(f.prompts) if f.prompts else None
    with LLM(offload=offload, **dataclasses.asdict(config)) as llm:
        assert llm.runtime is not None
        prompts = given or random_prompts(
            f.num_prompts or policy.block_size, policy.prompt_tokens, llm.model_config.vocab_size, config.seed
        )
        sampling = SamplingParams(temperature=f.temperature, max_tokens=policy.output_tokens, ignore_eos=given is None, seed=config.seed)
        outputs = llm.generate(prompts, sampling)
        result = report(llm.runtime, measure_link(llm.runtime.device, f.link_mb))
    if f.output:
        lines = [{"prompt": out.prompt, "text": out.outputs[0].text, "token_ids": out.outputs[0].token_ids} for out in outputs]
        Path(f.output).write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    print(text(result))
    return result


def main(argv: list[str]) -> int:
    """Returns the exit status: 2 for a wrong command line, 1 for a run that could not be."""
    define_engine_flags()
    define_flags()
    flags.DEFINE_string("prompts", None, "A file with a prompt a line.")
    flags.DEFINE_integer("num_prompts", None, "Random prompts, where there is no file; default: a block of them.", lower_bound=1)
    flags.DEFINE_float("temperature", 0.0, "0: greedy.", lower_bound=0.0)
    flags.DEFINE_string("output", None, "File for what was generated, a JSON object a line.")
    flags.DEFINE_string("output_json", None, "File for the report.")
    flags.DEFINE_integer("link_mb", 256, "Size of the transfers that the link is measured with.", lower_bound=1)
    if {"--help", "-h"} & set(argv[1:]):
        modules = [flags.FLAGS.module_help(sys.modules[name]) for name in (__name__, "jaxflow.flags")]
        print(__doc__, *modules, sep="\n")
        return 0
    try:
        rest = flags.FLAGS(argv)[1:]
        if rest:
            raise flags.Error(f"unexpected arguments: {' '.join(rest)}")
    except flags.Error as error:
        print(f"error: {error}\n`python -m jaxflow.offload --help` lists the flags", file=sys.stderr)
        return 2
    choose_platform()
    try:
        result = run()
    except (ConfigError, PolicyError, CheckpointError, DiskError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    if flags.FLAGS.output_json:
        Path(flags.FLAGS.output_json).write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv))
