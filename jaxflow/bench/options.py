"""Flags that the commands of the bench share, and what they stand for."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from jaxflow.bench import workload
from jaxflow.bench.conversations import Conversation, of_items, synthetic
from jaxflow.bench.workload import NANOFLOW, UNLIMITED, Item, WorkloadError
from jaxflow.config import EngineConfig
from jaxflow.flags import define_engine_flags
from jaxflow.model.checkpoint import open_checkpoint
from jaxflow.model.cost import DEVICES

PROTOCOL = {"constant": 1200, "lognormal": 2000, "trace": 2000}  # requests handed over; 1000 at 1000/1000


def define_workload(input_len: int = 1024, output_len: int = 512) -> None:
    """Flags of lengths and numbers."""
    flags.DEFINE_integer(
        "input_len",
        input_len,
        "Prompt tokens of a request; the mean, if lengths are lognormal.",
        lower_bound=1,
    )
    flags.DEFINE_integer(
        "output_len",
        output_len,
        "Output tokens of a request; the mean, if lengths are lognormal.",
        lower_bound=1,
    )
    flags.DEFINE_enum(
        "lengths",
        "constant",
        ["constant", "lognormal"],
        "How lengths are distributed, if no trace gives them.",
    )
    flags.DEFINE_float(
        "input_cv",
        2.22,
        "Standard deviation over mean of lognormal prompt lengths, before limits. Default: ShareGPT's.",
    )
    flags.DEFINE_float("output_cv", 0.76, "The same of output lengths.")
    flags.DEFINE_string(
        "trace",
        None,
        "Take lengths from a trace: .csv (prompt_tokens, output_tokens, arrival_s) or Mooncake's .jsonl.",
    )
    flags.DEFINE_enum(
        "trace_filter",
        "auto",
        ["auto", "nanoflow", "none"],
        (
            "Drop a trace's long requests. nanoflow: those over 3072 in, 1024 out, or 4096 together. "
            "auto: nanoflow for .csv, none for .jsonl."
        ),
    )
    flags.DEFINE_integer(
        "num_requests",
        None,
        "Requests; default: 1200, 1000 at 1000/1000, 2000 of lognormal lengths or from a trace.",
        lower_bound=1,
    )
    flags.DEFINE_integer("workload_seed", 0, "Of lengths, prompts and arrivals.", lower_bound=0)


def define_conversations(rounds: int = 1) -> None:
    """Flags of requests that follow one another."""
    flags.DEFINE_integer(
        "rounds",
        rounds,
        (
            "Rounds of a conversation: each prompt is all that was said before, and new text. "
            "--num_requests counts conversations."
        ),
        lower_bound=1,
    )
    flags.DEFINE_integer(
        "next_input_len",
        128,
        "New text tokens of every later round; the mean, if lengths are lognormal.",
        lower_bound=1,
    )
    flags.DEFINE_float(
        "think_time_s",
        0.0,
        "Mean of the exponential pauses between an answer and the next round.",
        lower_bound=0.0,
    )
    flags.DEFINE_integer(
        "trace_shrink",
        1,
        "Divide a Mooncake trace's prompts, outputs and blocks by this, for contexts shorter than its.",
        lower_bound=1,
    )


def define_report() -> None:
    """Flags of what is written, and of what it is held against."""
    flags.DEFINE_string("output_json", None, "Write the report to this file.")
    flags.DEFINE_enum(
        "optimal_device",
        None,
        sorted(DEVICES),
        "Device whose peak Eq. 5 takes; default: this machine's, measured if it is unknown.",
    )
    flags.DEFINE_multi_string(
        "goodput",
        [],
        "KEY:MILLISECONDS that a good request keeps, KEY one of ttft, tpot, e2el. May be repeated.",
    )


def define_engine(model: str | None = None, **defaults: Any) -> None:
    """The engine's flags, some with other defaults here. model: the default of --model; None: it must be
    given.
    """
    define_engine_flags(model)
    for name, value in defaults.items():
        flags.FLAGS.set_default(name, value)


def define_bed() -> None:
    """What plans run on beside each other (`plans.bed_of_flags`), and the report."""
    define_engine()
    flags.DEFINE_list(
        "plans",
        [],
        (
            "Plan files, folders of them, or searched: those shipped for this model and device. --plan "
            "is one more."
        ),
    )
    flags.DEFINE_list(
        "tokens",
        [],
        "Tokens of sequential steps, beside those of the plans. Default without plans: the budget.",
    )
    flags.DEFINE_string("output_json", None, "Write the report to this file.")


def check_workload(max_tokens: float) -> None:
    """Refuses what `items_from_flags` and `conversations_from_flags` would, before a model is loaded for
    nothing. Raises: WorkloadError.
    """
    items, _ = items_from_flags(max_tokens)
    if "rounds" in flags.FLAGS:
        conversations_from_flags(items[:1], max_tokens, vocab_size=2)


def longest(config: EngineConfig) -> int:
    """Tokens of a sequence that an engine will take, known before it is there. Raises: ConfigError,
    CheckpointError.
    """
    return (
        config.max_model_len or open_checkpoint(config.model, load_format="dummy").model_config.max_position
    )


def protocol_requests(kind: str, prompt: int, output: int) -> int:
    """How many requests the rivals' protocol has of such lengths. kind: constant, lognormal or trace."""
    return 1000 if (kind, prompt, output) == ("constant", 1000, 1000) else PROTOCOL[kind]


def items_from_flags(max_tokens: float, *, ordered: bool = False) -> tuple[list[Item], dict[str, Any]]:
    """The requests that the flags ask for, and a description for the report.

    max_tokens: of prompt and output together that the engine takes; a trace's longer requests are left out.
    ordered: take a trace's requests from its start, in order, rather than at random.

    Raises:
      WorkloadError: if the flags' lengths do not fit or the trace cannot be read.
    """
    f = flags.FLAGS
    kind = "trace" if f.trace else f.lengths
    prompt, output, seed = f.input_len, f.output_len, f.workload_seed
    number = f.num_requests or protocol_requests(kind, prompt, output)
    left_out = 0
    if kind == "trace":
        if not Path(f.trace).is_file():
            raise WorkloadError(f"--trace {f.trace}: a file that exists is accepted")
        every = workload.read_trace(
            f.trace, {"auto": None, "nanoflow": NANOFLOW, "none": UNLIMITED}[f.trace_filter]
        )
        every = (
            workload.shrink(every, f.trace_shrink) if "trace_shrink" in f and f.trace_shrink > 1 else every
        )
        fitting = [item for item in every if item.prompt_tokens + item.output_tokens <= max_tokens]
        left_out = len(every) - len(fitting)
        items = fitting[:number] if ordered else workload.sample(fitting, number, seed)
    elif kind == "lognormal":
        limits = workload.Limits(
            NANOFLOW.prompt_tokens, NANOFLOW.output_tokens, min(max_tokens, NANOFLOW.total_tokens)
        )
        items = workload.lognormal(
            number, prompt, output, prompt_cv=f.input_cv, output_cv=f.output_cv, limits=limits, seed=seed
        )
    else:
        if prompt + output > max_tokens:
            raise WorkloadError(
                f"--input_len {prompt} and --output_len {output} are over the {max_tokens} tokens "
                f"that a sequence may have"
            )
        items = workload.constant(number, prompt, output)
    if not items:
        raise WorkloadError(f"{f.trace}: no request fits in {max_tokens} tokens")
    return items, describe(items, kind, trace=f.trace, left_out=left_out, seed=seed)


def conversations_from_flags(
    items: Sequence[Item], max_tokens: float, vocab_size: int
) -> tuple[list[Conversation], dict[str, Any]]:
    """The conversations that `items` open, as many rounds as the flags say, and what a report says of them.

    Raises:
      WorkloadError: for rounds of a trace, which has its own, and lengths that are not possible.
    """
    f = flags.FLAGS
    seed = f.workload_seed
    if f.trace and f.rounds > 1 and f["rounds"].present:
        raise WorkloadError(f"--rounds {f.rounds}: a trace has its own; without --trace it is possible")
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
    """A workload in a report."""
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
