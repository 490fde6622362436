"""Flags that several benchmark commands share, and the workloads that they describe."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from jaxflow.bench.workload import lengths as workload
from jaxflow.bench.workload.conversations import Conversation, of_items, synthetic
from jaxflow.bench.workload.lengths import Item, WorkloadError
from jaxflow.cli.engine_flags import define_engine_flags
from jaxflow.config import EngineConfig
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.cost import DEVICES

# number of requests; 1000 at lengths 1000/1000
PROTOCOL = {"constant": 1200, "lognormal": 2000, "trace": 2000}


def define_workload(input_len: int = 1024, output_len: int = 512) -> None:
    """Define the flags of request lengths and numbers."""
    flags.DEFINE_integer(
        "input_len",
        input_len,
        "Prompt tokens of a request; the mean for lognormal lengths.",
        lower_bound=1,
    )
    flags.DEFINE_integer(
        "output_len",
        output_len,
        "Output tokens of a request; the mean for lognormal lengths.",
        lower_bound=1,
    )
    flags.DEFINE_enum(
        "lengths",
        "constant",
        ["constant", "lognormal"],
        "Distribution of lengths without a trace.",
    )
    flags.DEFINE_float(
        "input_cv",
        2.22,
        "Standard deviation over mean of lognormal prompt lengths, before limits. Default: ShareGPT's.",
    )
    flags.DEFINE_float(
        "output_cv", 0.76, "Standard deviation over mean of lognormal output lengths, before limits."
    )
    flags.DEFINE_string(
        "trace",
        None,
        "Trace file with request lengths: .csv (prompt_tokens, output_tokens, arrival_s) or Mooncake's "
        ".jsonl.",
    )
    flags.DEFINE_enum(
        "trace_filter",
        "auto",
        list(workload.TRACE_FILTERS),
        (
            "Filter of a trace's long requests. nanoflow drops those over 3072 in, 1024 out, or 4096 in "
            "total. auto: nanoflow for .csv, none for .jsonl."
        ),
    )
    flags.DEFINE_integer(
        "num_requests",
        None,
        "Number of requests; default: 1200, 1000 at 1000/1000, 2000 of lognormal lengths or from a trace.",
        lower_bound=1,
    )
    flags.DEFINE_integer("workload_seed", 0, "Seed of lengths, prompts and arrivals.", lower_bound=0)


def define_conversations(rounds: int = 1) -> None:
    """Define the flags of multi-round conversations."""
    flags.DEFINE_integer(
        "rounds",
        rounds,
        (
            "Rounds per conversation: each prompt is the previous conversation plus new text. "
            "--num_requests counts conversations."
        ),
        lower_bound=1,
    )
    flags.DEFINE_integer(
        "next_input_len",
        128,
        "New text tokens of every later round; the mean for lognormal lengths.",
        lower_bound=1,
    )
    flags.DEFINE_float(
        "think_time_s",
        0.0,
        "Mean seconds of the exponential pauses between an answer and the next round.",
        lower_bound=0.0,
    )
    flags.DEFINE_integer(
        "trace_shrink",
        1,
        "Divisor of a Mooncake trace's prompts, outputs and blocks, for shorter contexts.",
        lower_bound=1,
    )


def define_report() -> None:
    """Define the flags of the report and of its comparison values."""
    flags.DEFINE_string("output_json", None, "Write the report to this file.")
    flags.DEFINE_enum(
        "optimal_device",
        None,
        sorted(DEVICES),
        "Device with the peak rate for Eq. 5; default: this machine's device, measured if unknown.",
    )
    flags.DEFINE_multi_string(
        "goodput",
        [],
        "Latency limit KEY:MILLISECONDS of a good request, KEY one of ttft, tpot, e2el. May be repeated.",
    )


def define_engine(model: str | None = None, **defaults: Any) -> None:
    """Define the engine's flags, with `defaults` replacing some default values.

    model: the default of --model; None makes the flag required.
    """
    define_engine_flags(model)
    for name, value in defaults.items():
        flags.FLAGS.set_default(name, value)


def define_bed() -> None:
    """Define the flags for comparing plans (`plans.bed_of_flags`), and for the report."""
    define_engine()
    flags.DEFINE_list(
        "plans",
        [],
        (
            "Plan files, folders of plans, or `searched` for the plans shipped for this model and "
            "device. --plan adds one more."
        ),
    )
    flags.DEFINE_list(
        "tokens",
        [],
        "Tokens of sequential steps, in addition to those of the plans. Default without plans: the token "
        "budget.",
    )
    flags.DEFINE_string("output_json", None, "Write the report to this file.")


def check_workload(max_tokens: float) -> None:
    """Check the flags of `items_from_flags` and `conversations_from_flags` before a model is loaded.

    Raises: WorkloadError.
    """
    items, _ = items_from_flags(max_tokens)
    if "rounds" in flags.FLAGS:
        conversations_from_flags(items[:1], max_tokens, vocab_size=2)


def longest(config: EngineConfig) -> int:
    """Return the maximum tokens of a sequence for an engine of this config, before the engine starts.

    Raises: ConfigError, CheckpointError.
    """
    return (
        config.max_model_len or open_checkpoint(config.model, load_format="dummy").model_config.max_position
    )


def protocol_requests(kind: str, prompt: int, output: int) -> int:
    """Return the number of requests in the rivals' protocol. kind: constant, lognormal or trace."""
    return 1000 if (kind, prompt, output) == ("constant", 1000, 1000) else PROTOCOL[kind]


def items_from_flags(max_tokens: float, *, ordered: bool = False) -> tuple[list[Item], dict[str, Any]]:
    """Return the requests that the flags describe, and a description for the report.

    max_tokens: the engine's limit for prompt plus output; longer requests of a trace are left out. ordered:
    take a trace's requests from its start in order, instead of at random.

    Raises:
      WorkloadError: if the lengths exceed the limit or the trace cannot be read.
    """
    f = flags.FLAGS
    kind = "trace" if f.trace else f.lengths
    prompt, output, seed = f.input_len, f.output_len, f.workload_seed
    number = f.num_requests or protocol_requests(kind, prompt, output)
    left_out = 0
    if kind == "trace":
        if not Path(f.trace).is_file():
            raise WorkloadError(f"--trace {f.trace}: accepted is an existing file")
        every = workload.read_trace(f.trace, workload.TRACE_FILTERS[f.trace_filter])
        every = (
            workload.shrink(every, f.trace_shrink) if "trace_shrink" in f and f.trace_shrink > 1 else every
        )
        fitting = workload.fitting(every, max_tokens)
        left_out = len(every) - len(fitting)
        items = fitting[:number] if ordered else workload.sample(fitting, number, seed)
    elif kind == "lognormal":
        limits = workload.nanoflow_limits(max_tokens)
        items = workload.lognormal(
            number, prompt, output, prompt_cv=f.input_cv, output_cv=f.output_cv, limits=limits, seed=seed
        )
    else:
        if prompt + output > max_tokens:
            raise WorkloadError(
                f"--input_len {prompt} plus --output_len {output}: accepted is a sum of at most "
                f"{max_tokens} tokens"
            )
        items = workload.constant(number, prompt, output)
    if not items:
        raise WorkloadError(
            f"--trace {f.trace}: accepted is a trace with requests of at most {max_tokens} tokens"
        )
    return items, describe(items, kind, trace=f.trace, left_out=left_out, seed=seed)


def conversations_from_flags(
    items: Sequence[Item], max_tokens: float, vocab_size: int
) -> tuple[list[Conversation], dict[str, Any]]:
    """Return the conversations that `items` open, with --rounds rounds each, and a description for the
    report.

    Raises:
      WorkloadError: for --rounds with a trace, which has its own rounds, and for impossible lengths.
    """
    f = flags.FLAGS
    seed = f.workload_seed
    if f.trace and f.rounds > 1 and f["rounds"].present:
        raise WorkloadError(
            f"--rounds {f.rounds}: accepted only without --trace, because a trace has its own rounds"
        )
    if f.trace or f.rounds == 1:
        return of_items(items, workload.prompts(items, vocab_size, seed)), {}
    number = len(items) * (f.rounds - 1)
    if f.lengths == "lognormal":
        later = workload.lognormal(
            number, f.next_input_len, f.output_len, prompt_cv=f.input_cv, output_cv=f.output_cv, seed=seed + 1
        )
    else:
        later = workload.constant(number, f.next_input_len, f.output_len)
    talks = synthetic(items, later, vocab_size, think_s=f.think_time_s, max_tokens=max_tokens, seed=seed)
    rounds = sum(len(talk.rounds) for talk in talks)
    described = {
        "kind": "conversations",
        "rounds": f.rounds,
        "mean_rounds": rounds / len(talks),
        "think_time_s": f.think_time_s,
    }
    return talks, described | {
        "mean_next_prompt_tokens": float(np.mean([item.prompt_tokens for item in later]))
    }


def describe(items: Sequence[Item], kind: str, **more: Any) -> dict[str, Any]:
    """Return a report's description of a workload."""
    prompt, output = (
        sum(lengths) / len(items)
        for lengths in zip(*((i.prompt_tokens, i.output_tokens) for i in items), strict=True)
    )
    known = {name: value for name, value in more.items() if value is not None}
    return {
        "kind": kind,
        "requests": len(items),
        "mean_prompt_tokens": prompt,
        "mean_output_tokens": output,
        **known,
    }
