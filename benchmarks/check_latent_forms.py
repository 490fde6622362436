"""Compare an engine that may run chunks of latent attention by head with one that keeps the absorbed form.

    python -m benchmarks.check_latent_forms [--model deepseek-v3] [--layers 2] [--repeats 3]
        [--output_json FILE]

Both engines run on one device, with its kernels. The first engine draws greedy answers to prompts of 1,500
and 6,000 tokens, beside the decodes of short prompts. Then both engines score the prompts with these answers.
The check compares the log-probabilities of every token. It also compares each drawn token with the token that
the absorbed form ranks first, and allows a small difference of their log-probabilities.

Then the engines prefill the long prompts in turns. The times are medians, from the first request to the last
token. A layer of DeepSeek-V3 with experts takes 23 GB in each engine; the first three layers have none.
"""

import argparse
import dataclasses
import json
import shlex
import statistics
import sys
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.check_engine import run, set_of
from jaxflow.bench.report import machine
from jaxflow.bench.report.requests import write_json
from jaxflow.config import ConfigError, EngineConfig
from jaxflow.engine.executor_start import make_executor
from jaxflow.engine.kernel_choice import choose_kernels
from jaxflow.engine.loop import Loop
from jaxflow.engine.loop_start import make_loop
from jaxflow.engine.settings import resolve
from jaxflow.engine.start import prepare_process
from jaxflow.engine.step_plans import choose_plans
from jaxflow.model.checkpoints.checkpoint import CheckpointError, open_checkpoint
from jaxflow.request import Logprob, Request, SamplingParams
from pallas_kernels.kernel_set import KernelSet
from pallas_kernels.measure.provenance import provenance

# The mean and the largest difference in nats, and the share of drawn tokens that the other form ranks first.
LIMITS = (0.02, 0.5, 0.9)
STEP_TOKENS = (64, 2048)
LONG = (1500, 6000, 1500, 6000, 1500, 1500)  # tokens of prompts
ANSWER = 24  # tokens


def forms_of(kernels: KernelSet) -> dict[str, KernelSet]:
    """Return a device's kernels, which may run chunks by head, and the same with the absorbed form alone.

    Raises: ConfigError if the device's kernels have no form by head for the model.
    """
    if kernels.latent_up_chunk_attention is None:
        raise ConfigError("kernels", kernels.name, "kernels that run chunks of latent attention by head")
    return {"by_head": kernels, "absorbed": dataclasses.replace(kernels, latent_up_chunk_attention=None)}


def seconds(engine: Loop, requests: Sequence[Request]) -> float:
    """Return the time in which an engine answers requests."""
    begin = time.perf_counter()
    run(engine, requests)
    return time.perf_counter() - begin


def compare(
    by_head: dict[str, list[list[Logprob]]], absorbed: dict[str, list[list[Logprob]]]
) -> dict[str, Any]:
    """Return the differences of scores. An entry has the score of the token itself, and of the likeliest.

    The last `ANSWER` entries of a request are those of its answer.
    """
    pairs = [
        (a[0].logprob, b[0].logprob)
        for name in absorbed
        for a, b in zip(by_head[name], absorbed[name], strict=True)
    ]
    differences = np.abs(np.subtract(*np.array(pairs).T))
    drawn = [entry for name in absorbed for entry in absorbed[name][-ANSWER:]]
    gaps = [max(one.logprob for one in entry) - entry[0].logprob for entry in drawn]
    return {
        "tokens_compared": int(differences.size),
        "mean_difference_nats": float(differences.mean()),
        "largest_difference_nats": float(differences.max()),
        "drawn_tokens_ranked_first_by_absorbed": float(np.mean([entry[0].rank == 1 for entry in drawn])),
        "largest_gap_of_drawn_tokens_nats": float(max(gaps)),
    }


def agree(result: dict[str, Any]) -> bool:
    """Return whether both forms gave the same up to rounding, and both ran. Equal bits mean that one did."""
    mean, largest, share = LIMITS
    return (
        0 < result["mean_difference_nats"] < mean
        and result["largest_difference_nats"] < largest
        and result["largest_gap_of_drawn_tokens_nats"] < largest
        and result["drawn_tokens_ranked_first_by_absorbed"] > share
        and not any(result["compilations_after_warmup"].values())
    )


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags of the command line, or of `words`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="deepseek-v3")
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--output_json")
    return parser.parse_args(words)


def check(given: argparse.Namespace) -> dict[str, Any]:
    """Return the comparison of both engines."""
    settings = EngineConfig(
        model=given.model,
        load_format="dummy",
        max_model_len=max(LONG) + 2 * ANSWER,
        max_num_batched_tokens=max(STEP_TOKENS),
        max_num_seqs=64,
        num_kv_pages=1024,
        enable_prefix_caching=False,
    )
    prepare_process(settings)
    checkpoint = open_checkpoint(settings.model, load_format="dummy")
    model = dataclasses.replace(
        checkpoint.model_config, layers=checkpoint.model_config.layers[: given.layers]
    )
    checkpoint = dataclasses.replace(checkpoint, model_config=model)
    config = resolve(settings, model)
    plans = {n: plan for n, plan in choose_plans(config, model).items() if n in STEP_TOKENS}

    def engine(kernels: KernelSet) -> Loop:
        executor = make_executor(config, checkpoint, plans, kernels=kernels, progress=False)
        executor.warm_up()
        print(set_of(executor).describe(), flush=True)
        return make_loop(config, model, executor)

    engines = {name: engine(kernels) for name, kernels in forms_of(choose_kernels(config, model)).items()}
    # The counter is the process's: the second engine's start adds to that of the first.
    started = {name: each.executor.compilations for name, each in engines.items()}
    rng = np.random.default_rng(0)
    lengths = [*rng.integers(1, 120, 32).tolist(), *LONG]
    prompts = [rng.integers(0, model.vocab_size, n).tolist() for n in lengths]
    greedy = SamplingParams(temperature=0.0, max_tokens=ANSWER, ignore_eos=True)
    drawn, _ = run(engines["by_head"], [Request(f"{i}", p, greedy) for i, p in enumerate(prompts)])
    score = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)
    scored = [Request(f"{i}", p + drawn[f"{i}"], score) for i, p in enumerate(prompts)]
    scores = {name: run(one, scored)[1] for name, one in engines.items()}

    one = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True)
    times: dict[str, dict[str, list[float]]] = {}
    for length in sorted(set(LONG)):
        timed = [Request(f"{i}", p, one) for i, p in enumerate(prompts) if len(p) == length]
        runs = [{name: seconds(each, timed) for name, each in engines.items()} for _ in range(given.repeats)]
        times[f"{len(timed)} x {length}"] = {name: [run[name] for run in runs] for name in engines}
    return {
        "model": given.model,
        "layers": given.layers,
        **compare(scores["by_head"], scores["absorbed"]),
        "compilations_after_warmup": {
            name: each.executor.compilations - started[name] for name, each in engines.items()
        },
        "prefill_seconds": times,
    }


def main() -> int:
    """Run the check, write its report, and return the exit status.

    0: the forms agree. 1: they do not. 2: the model or the device has not both forms.
    """
    given = parse()
    try:
        with machine.watch(1) as readings:
            result = check(given)
    except (ConfigError, CheckpointError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    head = {
        "command_name": "check_latent_forms",
        **provenance(shlex.join(["python", "-m", "benchmarks.check_latent_forms", *sys.argv[1:]])),
    }
    result = machine.with_power(head | result, readings)
    if given.output_json:
        write_json(given.output_json, result)
    print(json.dumps({key: result[key] for key in result if key not in head}, indent=1))
    for case, forms in result["prefill_seconds"].items():
        by_head, absorbed = (statistics.median(forms[name]) * 1e3 for name in ("by_head", "absorbed"))
        print(f"{case:12} by head {by_head:8.2f} ms  absorbed {absorbed:8.2f} ms  x{absorbed / by_head:.2f}")
    print("agree" if agree(result) else "DIFFER")
    return 0 if agree(result) else 1


if __name__ == "__main__":
    sys.exit(main())
