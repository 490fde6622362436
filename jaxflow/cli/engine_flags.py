"""Command-line flags for the fields of `EngineConfig`."""

import dataclasses
import sys
from collections.abc import Sequence
from typing import Any, get_args, get_type_hints

from absl import flags

from jaxflow.cli.flag_names import arguments_of, canonical
from jaxflow.cli.float_flags import check_floats
from jaxflow.config import OTHER_SETTINGS, EngineConfig

# Flags of earlier versions, and the replacement of each.
REMOVED = {
    "scheduling_policy": "steps are always decode-maximal; `python -m jaxflow.bench sweep --sweep=policies` "
    "compares policies",
    "chunk_size": "--max_num_batched_tokens limits the tokens of a step",
}


def define_engine_flags(model: str | None = None) -> None:
    """Define a flag for every field of `EngineConfig`.

    Args:
      model: default of --model. None makes the flag required.
    """
    hints = get_type_hints(EngineConfig)
    define = {
        int: flags.DEFINE_integer,
        float: flags.DEFINE_float,
        bool: flags.DEFINE_bool,
        str: flags.DEFINE_string,
    }
    for field in dataclasses.fields(EngineConfig):
        default = (model or "") if field.name == "model" else field.default
        kind = next(t for t in (get_args(hints[field.name]) or (hints[field.name],)) if t is not type(None))
        define[kind](field.name, default, field.metadata["help"])
    if model is None:
        flags.register_validator(
            "model",
            bool,
            "give a model, as --model PATH_OR_HUB_ID",
            flag_values=flags.FLAGS,
        )


def engine_config_from_flags() -> EngineConfig:
    """Return the settings of the command line. Raises: ConfigError, which names the field."""
    values = flags.FLAGS
    given: dict[str, Any] = {
        field.name: values[field.name].value for field in dataclasses.fields(EngineConfig)
    }
    return EngineConfig(**given)


def parse(argv: Sequence[str]) -> None:
    """Parse a command line that has only flags, in any spelling of `flag_names`.

    Raises:
      flags.Error: an argument is not a flag, a flag is unknown or removed, or a number is not finite.
    """
    if problem := refused_flag(argv):
        raise flags.Error(problem)
    rest = flags.FLAGS(canonical(argv))[1:]
    if rest:
        raise flags.Error(f"unexpected arguments: {' '.join(rest)}")
    check_floats(flags.FLAGS)


def engine_arguments(argv: Sequence[str]) -> list[str]:
    """Return the command line of a server, where the first word that is no flag and no flag's value is the
    model. Other such words come last.

    The process ends with status 2 after a flag that was removed, or that only vLLM has.
    """
    if problem := refused_flag(argv):
        print(f"error: {problem}", file=sys.stderr)
        sys.exit(2)
    named, rest, words = set(), [], []
    for name, several in arguments_of(argv, flags.FLAGS):
        named.add(name)
        (words if name is None and not several[0].startswith("-") else rest).extend(several)
    model = ["--model", words.pop(0)] if words and "model" not in named else []
    return [argv[0], *model, *rest, *words]


def refused_flag(argv: Sequence[str]) -> str | None:
    """Return an error about the first flag in `argv` that was removed, or that only vLLM has; or None."""
    for argument in argv[1:]:
        name = argument.lstrip("-").partition("=")[0].replace("-", "_")
        if not argument.startswith("-") or name in flags.FLAGS:
            continue
        if name in REMOVED:
            return f"flag --{name} was removed: {REMOVED[name]}"
        if name in OTHER_SETTINGS:
            return f"flag --{name} is not supported: {OTHER_SETTINGS[name]}"
    return None
