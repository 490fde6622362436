"""Command: offline generation with a model that does not fit the device, by FlexGen's runtime and a policy.

  python -m search placement --model opt-30b --gpu_mem 15 --cpu_mem 100 --output policy.json
  python -m jaxflow.flexgen --model opt-30b --load_format dummy --policy policy.json --gpu_memory_limit 16
  --host_memory_limit 100

The prompts are the lines of --prompts (texts, or JSON objects with `prompt`: a text or token ids), or
--num_prompts random prompts of --prompt_tokens tokens. Throughput is generated tokens / (prefill + decode
time), as in the paper. --output takes a JSON object for each prompt, --output_json the report.
"""

import itertools
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec
from absl import flags

from jaxflow.cli.engine_flags import define_engine_flags, engine_config_from_flags, parse
from jaxflow.cli.exit_status import exit_status
from jaxflow.cli.flag_errors import flag_error
from jaxflow.cli.output_files import check_outputs
from jaxflow.config import ConfigError, EngineConfig
from jaxflow.flexgen.config import (
    ENGINE_FIELDS,
    OffloadConfig,
    check_engine,
    define_flags,
    offload_from_flags,
    random_prompts,
)
from jaxflow.flexgen.policy import Policy, PolicyError
from jaxflow.flexgen.report import measure_links, report, text
from jaxflow.flexgen.runtime import Runtime, accept
from jaxflow.flexgen.scratch_files import DiskError
from jaxflow.flexgen.start import prepare, start
from jaxflow.model.checkpoints.checkpoint import Checkpoint, CheckpointError, open_checkpoint
from jaxflow.parallel.mesh import choose_platform
from jaxflow.prompt import Prompt, make_request, open_tokenizer
from jaxflow.request import InvalidRequest, SamplingParams
from jaxflow.request_output import OutputBuilder, RequestOutput, collect
from jaxflow.text.tokenizer import Tokenizer


def read_prompts(path: str) -> dict[int, Prompt]:
    """Return the prompts of a file by line number. Raises: ConfigError naming the line."""
    found: dict[int, Prompt] = {}
    if not Path(path).is_file():
        raise ConfigError("prompts", path, "an existing file")
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
                f"UTF-8 text ({error.reason} at byte {error.start + 1})",
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
                "prompts", f"{path}, line {number}", "a text or a list of token ids as `prompt`"
            )
        found[number] = prompt
    if not found:
        raise ConfigError("prompts", path, "a file with at least one prompt")
    return found


def check_prompts(
    prompts: dict[int, Prompt],
    path: str,
    sampling: SamplingParams,
    policy: Policy,
    tokenizer: Tokenizer | None,
    vocab_size: int,
) -> None:
    """Check the prompts of a file before the start. Raises: ConfigError naming the line."""
    for number, prompt in prompts.items():
        try:
            accept(policy, make_request("", prompt, sampling, tokenizer, vocab_size))
        except InvalidRequest as error:
            line = f"{path}, line {number}: {str(error.value)[:80]}"
            raise ConfigError("prompts", line, error.accepted) from error


def generate(
    runtime: Runtime,
    prompts: Sequence[Prompt],
    sampling: SamplingParams,
    tokenizer: Tokenizer | None,
    checkpoint: Checkpoint,
) -> list[RequestOutput]:
    """Return the outputs of prompts, in order. Raises: InvalidRequest, DiskError, RequestFailed."""
    model = checkpoint.model_config
    requests = [
        make_request(f"request-{i}", prompt, sampling, tokenizer, model.vocab_size)
        for i, prompt in enumerate(prompts)
    ]
    builders = [
        OutputBuilder(request, prompt if isinstance(prompt, str) else None, tokenizer, model.eos_token_ids)
        for request, prompt in zip(requests, prompts, strict=True)
    ]
    return collect(builders, itertools.chain.from_iterable(runtime.generate(requests, progress=True)))


def run() -> None:
    """Run the command. Raises: ConfigError, PolicyError, CheckpointError, DiskError, InvalidRequest."""
    f = flags.FLAGS
    check_outputs("output", "output_json")
    config: EngineConfig = engine_config_from_flags()
    offload: OffloadConfig = offload_from_flags(config.model)
    policy, path = offload.policy, f.prompts
    if path is not None and f.num_prompts is not None:
        raise ConfigError("num_prompts", f.num_prompts, f"unset, because --prompts {path} has the prompts")
    check_engine(config)
    prepare(offload, config)
    checkpoint = open_checkpoint(config.model, load_format=config.load_format)
    vocab_size = checkpoint.model_config.vocab_size
    sampling = SamplingParams(
        temperature=f.temperature, max_tokens=policy.output_tokens, ignore_eos=path is None, seed=config.seed
    )
    lines = {} if path is None else read_prompts(path)
    tokenizer = open_tokenizer(config, checkpoint)
    check_prompts(lines, path or "", sampling, policy, tokenizer, vocab_size)
    prompts = list(lines.values()) or random_prompts(
        f.num_prompts or policy.block_size, policy.prompt_tokens, vocab_size, config.seed
    )
    with start(offload, config, checkpoint) as runtime:
        outputs = generate(runtime, prompts, sampling, tokenizer, checkpoint)
        result = report(runtime, measure_links(runtime.devices, f.link_mb))
    if f.output:
        rows = [
            {"prompt": out.prompt, "text": out.outputs[0].text, "token_ids": out.outputs[0].token_ids}
            for out in outputs
        ]
        Path(f.output).write_text("".join(json.dumps(row) + "\n" for row in rows), "utf-8")
    if f.output_json:
        Path(f.output_json).write_bytes(msgspec.json.format(msgspec.json.encode(result), indent=1) + b"\n")
    print(text(result))


def main(argv: list[str]) -> int:
    """Run the command. Return the exit status: 2 for an invalid command line, 1 for a failed run."""
    define_engine_flags()
    define_flags()
    flags.DEFINE_string("prompts", None, "File of the prompts, one a line.")
    flags.DEFINE_integer(
        "num_prompts",
        None,
        "Number of random prompts, without --prompts; the default is a block.",
        lower_bound=1,
    )
    flags.DEFINE_float("temperature", 0.0, "Sampling temperature; 0 is greedy.", lower_bound=0.0)
    flags.DEFINE_string("output", None, "File for the outputs, a JSON object a line.")
    flags.DEFINE_string("output_json", None, "File for the report.")
    flags.DEFINE_integer("link_mb", 256, "Size in MB of the transfers that measure the link.", lower_bound=1)
    if {"--help", "-h"} & set(argv[1:]):
        print(__doc__, _flag_help(), sep="\n")
        return 0
    try:
        parse(argv)
    except flags.Error as error:
        print(
            f"error: {flag_error(error)}\n`python -m jaxflow.flexgen --help` lists the flags", file=sys.stderr
        )
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
    """Return the help of every flag with an effect on this command."""
    shown, f = flags.FlagValues(), flags.FLAGS
    ours = [
        flag.name
        for name in (__name__, "jaxflow.flexgen.config")
        for flag in f.get_key_flags_for_module(sys.modules[name])
    ]
    for name in (*ours, *ENGINE_FIELDS):
        shown[name] = f[name]
    return shown.get_help(include_special_flags=False)


if __name__ == "__main__":
    sys.exit(exit_status(main, sys.argv))
