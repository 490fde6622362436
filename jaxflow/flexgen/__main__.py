"""Offline generation with a model that does not fit the device: FlexGen's runtime, after a policy.

  python -m search placement --model opt-30b --gpu_mem 16 --cpu_mem 100 --output policy.json
  python -m jaxflow.flexgen --model opt-30b --load_format dummy --policy policy.json --gpu_memory_limit 16
  --host_memory_limit 100

Prompts are the lines of --prompts (texts, or JSON objects with `prompt`: a text or token ids), or
--num_prompts random ones of --prompt_tokens tokens. Throughput is generated tokens / (prefill + decode time),
as in the paper. --output gets a JSON object a prompt, --output_json the report.
"""

import dataclasses
import json
import sys
from pathlib import Path

import msgspec
from absl import flags

from jaxflow.cli.engine_flags import define_engine_flags, engine_config_from_flags, parse
from jaxflow.cli.exit_status import exit_status
from jaxflow.cli.output_files import check_outputs
from jaxflow.config import ConfigError, EngineConfig
from jaxflow.flexgen.answers import check_request
from jaxflow.flexgen.config import ENGINE_FIELDS
from jaxflow.flexgen.flags import define_flags, offload_from_flags, random_prompts
from jaxflow.flexgen.link_speed import measure_link
from jaxflow.flexgen.policy import Policy, PolicyError
from jaxflow.flexgen.report import report, text
from jaxflow.flexgen.scratch_files import DiskError
from jaxflow.llm import LLM
from jaxflow.model.checkpoints.checkpoint import CheckpointError, open_checkpoint
from jaxflow.parallel.mesh import choose_platform
from jaxflow.prompt import Prompt, open_tokenizer, token_ids
from jaxflow.request import InvalidRequest, Request, SamplingParams


def read_prompts(path: str) -> dict[int, Prompt]:
    """The prompts of a file, a line each, by the line's number. Raises: ConfigError naming the line."""
    found: dict[int, Prompt] = {}
    if not Path(path).is_file():
        raise ConfigError("prompts", path, "a file that exists")
    for number, line in enumerate(Path(path).read_bytes().splitlines(), start=1):
        if not line.strip():
            continue
        try:
            written = line.decode("utf-8")
            prompt = json.loads(written)["prompt"] if written.startswith("{") else written
        except UnicodeDecodeError as error:
            raise ConfigError(
                "prompts",
                f"{path}, line {number}",
                f"text in UTF-8: {error.reason} at byte {error.start + 1}",
            ) from error
        except (ValueError, KeyError) as error:
            raise ConfigError(
                "prompts", f"{path}, line {number}", "a text, or a JSON object with `prompt`"
            ) from error
        if not (
            isinstance(prompt, str)
            or (isinstance(prompt, list) and all(type(token) is int for token in prompt))
        ):
            raise ConfigError(
                "prompts", f"{path}, line {number}", "a `prompt` that is a text or a list of token ids"
            )
        found[number] = prompt
    if not found:
        raise ConfigError("prompts", path, "a file with at least one prompt")
    return found


def servable_prompts(
    path: str, sampling: SamplingParams, config: EngineConfig, policy: Policy
) -> list[Prompt]:
    """The prompts of a file, where none is one that `LLM` would refuse once it has compiled and loaded.

    Raises: ConfigError naming the line; CheckpointError, TokenizerError.
    """
    prompts, checkpoint = read_prompts(path), open_checkpoint(config.model, load_format=config.load_format)
    tokenizer = (
        open_tokenizer(config, checkpoint)
        if any(isinstance(prompt, str) for prompt in prompts.values())
        else None
    )
    for number, prompt in prompts.items():
        try:
            check_request(
                policy,
                Request("", token_ids(prompt, tokenizer, checkpoint.model_config.vocab_size), sampling),
            )
        except InvalidRequest as error:
            raise ConfigError(
                "prompts", f"{path}, line {number}: {str(error.value)[:80]}", error.accepted
            ) from error
    return list(prompts.values())


def run() -> None:
    """The command: generates, and reports. Raises: ConfigError, PolicyError, CheckpointError, DiskError,
    InvalidRequest.
    """
    f = flags.FLAGS
    check_outputs("output", "output_json")
    config = engine_config_from_flags()
    offload = offload_from_flags(config.model)
    policy = offload.policy
    path: str | None = f.prompts
    if path is not None and f.num_prompts is not None:
        raise ConfigError("num_prompts", f.num_prompts, f"unset: the prompts are those of --prompts {path}")
    sampling = SamplingParams(
        temperature=f.temperature, max_tokens=policy.output_tokens, ignore_eos=path is None, seed=config.seed
    )
    given = None if path is None else servable_prompts(path, sampling, config, policy)
    with LLM(offload=offload, **dataclasses.asdict(config)) as llm:
        assert llm.runtime is not None
        prompts = given or random_prompts(
            f.num_prompts or policy.block_size, policy.prompt_tokens, llm.model_config.vocab_size, config.seed
        )
        outputs = llm.generate(prompts, sampling)
        result = report(llm.runtime, measure_link(llm.runtime.device, f.link_mb))
    if f.output:
        lines = [
            {"prompt": out.prompt, "text": out.outputs[0].text, "token_ids": out.outputs[0].token_ids}
            for out in outputs
        ]
        Path(f.output).write_text("".join(json.dumps(line) + "\n" for line in lines), "utf-8")
    if f.output_json:
        Path(f.output_json).write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    print(text(result))


def main(argv: list[str]) -> int:
    """Returns the exit status: 2 for a wrong command line, 1 for a run that could not be."""
    define_engine_flags()
    define_flags()
    flags.DEFINE_string("prompts", None, "A file with a prompt a line.")
    flags.DEFINE_integer(
        "num_prompts",
        None,
        "Random prompts, where there is no file; default: a block of them.",
        lower_bound=1,
    )
    flags.DEFINE_float("temperature", 0.0, "0: greedy.", lower_bound=0.0)
    flags.DEFINE_string("output", None, "File for what was generated, a JSON object a line.")
    flags.DEFINE_string("output_json", None, "File for the report.")
    flags.DEFINE_integer(
        "link_mb", 256, "Size of the transfers that the link is measured with.", lower_bound=1
    )
    if {"--help", "-h"} & set(argv[1:]):
        print(__doc__, _flag_help(), sep="\n")
        return 0
    try:
        parse(argv)
    except flags.Error as error:
        print(f"error: {error}\n`python -m jaxflow.flexgen --help` lists the flags", file=sys.stderr)
        return 2
    choose_platform()
    try:
        run()
    except BrokenPipeError:
        raise
    except (ConfigError, PolicyError, CheckpointError, DiskError, ValueError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 1
    return 0


def _flag_help() -> str:
    """Of every flag that is of effect here."""
    shown, f = flags.FlagValues(), flags.FLAGS
    ours = [
        flag.name
        for name in (__name__, "jaxflow.flexgen.flags")
        for flag in f.get_key_flags_for_module(sys.modules[name])
    ]
    for name in (*ours, *ENGINE_FIELDS):
        shown[name] = f[name]
    return shown.get_help(include_special_flags=False)


if __name__ == "__main__":
    sys.exit(exit_status(main, sys.argv))
