"""Check the engine with this device's kernels against the engine with reference implementations.

    python benchmarks/check_engine.py [--model llama-3.1-8b] [--layers 4] [--fp8] [--tensor_parallel_size 4]
        [--pipeline_parallel_size 2] [--plan plan.json] [--longest 2900] [--prompts 30] [--output_json FILE]

The first engine runs on one device or on several, and the reference engine on one device. The first engine
draws greedy answers, with decode attention, chunks of every size, and batches that change from step to step.
Then both engines score the prompts with these answers, and so does an exact engine: the reference engine with
float32 activations and the same weights. The check compares the log-probabilities of every token. In bfloat16
two correct engines differ by rounding. A wrong key, page or mask changes log-probabilities by about 1.

A router that rounds otherwise chooses other experts, so correct engines of mixtures differ by more than dense
ones. Therefore the limits are multiples of what the reference engine differs from the exact one.

--plan names a plan for steps of 512 tokens, which the first engine runs in full steps. Such plans are
benchmarks/plans/h200/llama-3.1-8b/tp2/check-512-copied.json for two devices, and
tp4/check-512-swapped.json for four.

With --fp8 the engines have e4m3 weights and an e4m3 cache. An activation that rounds to another e4m3 value
changes by 6 %, and the next layers follow.
"""

import argparse
import dataclasses
import json
import shlex
import sys
from collections.abc import Sequence
from typing import Any, cast

import jax
import numpy as np

from jaxflow.bench.report import machine
from jaxflow.bench.report.requests import write_json
from jaxflow.config import ConfigError, EngineConfig
from jaxflow.engine.executor import Executor
from jaxflow.engine.executor_start import make_executor, make_staged_executor
from jaxflow.engine.loop import Loop
from jaxflow.engine.loop_start import make_loop
from jaxflow.engine.settings import resolve
from jaxflow.engine.staged_executor import StagedExecutor
from jaxflow.engine.start import prepare_process
from jaxflow.engine.step_plans import choose_plans
from jaxflow.model.checkpoints.checkpoint import CheckpointError, open_checkpoint
from jaxflow.pipeline.plan import PlanError
from jaxflow.request import Delta, Logprob, Request, SamplingParams, Started
from pallas_kernels.kernel_set import REFERENCE, KernelSet
from pallas_kernels.measure.provenance import provenance

MEAN, LARGEST = 1.25, 2.0  # limits of the mean and of the largest difference over those of the reference
STEP_SIZES = (8, 64, 256, 512)  # tokens of the steps of both engines


def run(
    engine: Loop, requests: Sequence[Request]
) -> tuple[dict[str, list[int]], dict[str, list[list[Logprob]]]]:
    """Run all requests at once.

    Return the drawn tokens of each request, and the log-probabilities at each place of its prompt: that of
    the prompt's token first.
    """
    tokens: dict[str, list[int]] = {r.request_id: [] for r in requests}
    prompts: dict[str, list[list[Logprob]]] = {}
    for request in requests:
        engine.add(request, 0.0)
    while engine.has_work:
        for event in engine.step():
            if isinstance(event, Delta):
                tokens[event.request_id] += event.token_ids
            elif isinstance(event, Started) and event.prompt_logprobs:
                prompts[event.request_id] = [list(entry.values()) for entry in event.prompt_logprobs if entry]
    return tokens, prompts


def set_of(executor: Executor | StagedExecutor) -> KernelSet:
    """Return the kernels of an executor; all its stages have the same ones."""
    first = executor if isinstance(executor, Executor) else executor.stages[0]
    return first.programs.context.kernels


def differences(ours: dict[str, list[list[Logprob]]], others: dict[str, list[list[Logprob]]]) -> np.ndarray:
    """Return [tokens], the difference of each token's log-probability in nats. Arguments: of `run`."""
    pairs = [
        (a[0].logprob, b[0].logprob)
        for key, entries in ours.items()
        for a, b in zip(entries, others[key], strict=True)
    ]
    return np.abs(np.subtract(*np.array(pairs).T))


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the flags of the command line, or of `words`."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="llama-3.1-8b")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--fp8", action="store_true")
    parser.add_argument("--tensor_parallel_size", type=int, default=1)
    parser.add_argument("--pipeline_parallel_size", type=int, default=1)
    parser.add_argument("--plan", default="sequential")
    parser.add_argument("--longest", type=int, default=2900, help="tokens of the longest prompt")
    parser.add_argument("--prompts", type=int, default=30, help="prompts of random lengths up to 900 tokens")
    parser.add_argument("--output_json")
    return parser.parse_args(words)


def check(given: argparse.Namespace) -> dict[str, Any]:
    """Return the comparison of both engines."""
    settings = EngineConfig(
        model=given.model,
        load_format="dummy",
        dtype="bfloat16",
        quantization="fp8" if given.fp8 else None,
        kv_cache_dtype="fp8" if given.fp8 else "auto",
        tensor_parallel_size=given.tensor_parallel_size,
        pipeline_parallel_size=given.pipeline_parallel_size,
        plan=given.plan,
        max_model_len=4096,
        max_num_batched_tokens=STEP_SIZES[-1],
        max_num_seqs=64,
        num_kv_pages=1024,
    )
    prepare_process(settings)
    checkpoint = open_checkpoint(settings.model, load_format="dummy")
    model = dataclasses.replace(
        checkpoint.model_config, layers=checkpoint.model_config.layers[: given.layers]
    )
    checkpoint = dataclasses.replace(checkpoint, model_config=model)
    config = resolve(settings, model)

    def engine(kernels: KernelSet | None, dtype: str = config.dtype) -> Loop:
        """Return a warm engine: with this device's kernels for None, else on one device."""
        local = config
        if kernels is not None:
            one = {"tensor_parallel_size": 1, "pipeline_parallel_size": 1}
            local = dataclasses.replace(config, plan="sequential", **one)
        cache = {} if given.fp8 else {"kv_cache_dtype": dtype}
        local = dataclasses.replace(local, dtype=dtype, **cache)
        plans = {tokens: plan for tokens, plan in choose_plans(local, model).items() if tokens in STEP_SIZES}
        make = make_executor if local.pipeline_parallel_size == 1 else make_staged_executor
        executor = make(local, checkpoint, plans, kernels=kernels, progress=False)
        executor.warm_up()
        print(set_of(executor).describe(), flush=True)
        return make_loop(local, model, executor)

    rng = np.random.default_rng()
    fixed = {1, 2, 63, 64, 65, 127, 500, 1300, given.longest}
    drawn_lengths = rng.integers(1, min(900, given.longest + 1), given.prompts).tolist()
    lengths = [*sorted(n for n in fixed if n <= given.longest), *drawn_lengths]
    prompts = [rng.integers(0, model.vocab_size, n).tolist() for n in lengths]
    fast = engine(None)
    greedy = SamplingParams(temperature=0.0, max_tokens=48, ignore_eos=True)
    drawn, _ = run(fast, [Request(f"{i}", p, greedy) for i, p in enumerate(prompts)])
    again, _ = run(fast, [Request(f"{i}", p, greedy) for i, p in reversed(list(enumerate(prompts)))])
    score = SamplingParams(temperature=0.0, max_tokens=1, ignore_eos=True, prompt_logprobs=1)
    scored = [Request(f"{i}", p + drawn[f"{i}"], score) for i, p in enumerate(prompts)]
    _, ours = run(fast, scored)
    compilations = fast.executor.compilations
    reference = engine(REFERENCE)
    _, by_reference = run(reference, scored)
    jax.config.update("jax_default_matmul_precision", "highest")
    exact = engine(REFERENCE, "float32")
    rounded, wide = cast(Executor, reference.executor), cast(Executor, exact.executor)
    wide.take_weights(jax.tree.map(lambda a, b: a.astype(b.dtype), rounded.weights, wide.weights))
    _, by_exact = run(exact, scored)
    own, other = (differences(one, by_exact) for one in (ours, by_reference))
    answers = [entry for i in range(len(prompts)) for entry in by_exact[f"{i}"][-48:]]
    result = {
        "model": given.model,
        "layers": given.layers,
        "tensor_parallel_size": given.tensor_parallel_size,
        "pipeline_parallel_size": given.pipeline_parallel_size,
        "quantization": config.quantization,
        "kv_cache_dtype": config.kv_cache_dtype,
        "plan": given.plan,
        "kernels": set_of(fast.executor).name,
        "tokens_compared": int(own.size),
        "mean_difference_nats": float(own.mean()),
        "largest_difference_nats": float(own.max()),
        "mean_difference_of_reference_nats": float(other.mean()),
        "largest_difference_of_reference_nats": float(other.max()),
        "mean_difference_to_reference_nats": float(differences(ours, by_reference).mean()),
        "drawn_tokens_ranked_first": float(np.mean([entry[0].rank == 1 for entry in answers])),
        "mean_loss_of_drawn_tokens_nats": float(
            np.mean([max(one.logprob for one in entry) - entry[0].logprob for entry in answers])
        ),
        "same_tokens_in_reverse_order": float(
            np.mean([drawn[k][j] == again[k][j] for k in drawn for j in range(48)])
        ),
        "compilations_after_warmup": compilations,
    }
    return result


def passes(result: dict[str, Any]) -> bool:
    """Return whether the engine is as close to the exact engine as the reference engine is.

    A greedy token loses at most the sum of two differences, so the mean loss is below twice their mean.
    """
    mean, largest = (result[f"{name}_difference_of_reference_nats"] for name in ("mean", "largest"))
    return (
        result["mean_difference_nats"] < MEAN * mean
        and result["largest_difference_nats"] < LARGEST * largest
        and result["mean_loss_of_drawn_tokens_nats"] < 2 * MEAN * mean
        and result["compilations_after_warmup"] == 0
    )


def main() -> int:
    """Run the check, write its report, and return the exit status.

    0: the engines agree. 1: they do not. 2: the command line is wrong.
    """
    given = parse()
    try:
        with machine.watch(given.tensor_parallel_size * given.pipeline_parallel_size) as readings:
            result = check(given)
    except (ConfigError, CheckpointError, PlanError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    head = {
        "command_name": "check_engine",
        **provenance(shlex.join(["python", "-m", "benchmarks.check_engine", *sys.argv[1:]])),
    }
    result = machine.with_power(head | result, readings)
    print(json.dumps(result, indent=1))
    if given.output_json:
        write_json(given.output_json, result)
    return 0 if passes(result) else 1


if __name__ == "__main__":
    sys.exit(main())
