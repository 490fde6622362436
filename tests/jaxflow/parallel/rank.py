"""One process of an engine of several, as tests start it: answers requests in
process 0 and prints the tokens.

  python rank.py '{"model": …, "coordinator": …, "fault": "stuck"}'

Keys other than those of `main` are settings of `LLM`. Most faults hit the
process at its `FAULT_CALL`-th step.
"""

import dataclasses
import functools
import json
import os
import sys
import time
import types
from typing import Any

FAULT_CALL = 12


def inject(fault: str) -> None:
    """Make this process fail later."""
    import jax

    from jaxflow.engine import team
    from jaxflow.engine.executor import Executor
    from jaxflow.model.checkpoints.checkpoint import Checkpoint

    if fault in ("program", "weights"):
        Checkpoint.load = lambda *_, **__: sys.exit("a weight was read")
    if fault == "program":  # other sources, and other versions of the packages
        team.code_digest = lambda: "another"
        team.importlib = types.SimpleNamespace(metadata=types.SimpleNamespace(version=lambda name: "0.0"))
        return
    if fault == "weights":
        team.fingerprint = lambda *_, **__: b"others"
        return

    def exhausted(*_: Any, **__: Any) -> Any:
        raise jax.errors.JaxRuntimeError("RESOURCE_EXHAUSTED: Out of memory allocating 1 bytes")

    if fault == "memory at load":
        Checkpoint.load = exhausted
        return
    if fault == "killed at load":
        Checkpoint.load = lambda *_, **__: os.kill(os.getpid(), 9)
        return
    if fault == "layout":  # one layout cannot be compiled later
        compiled = Executor.compile_layout

        def failing_layout(executor: Executor, layout: Any) -> None:
            if layout.tokens == min(executor.layouts):
                raise ValueError("a bug of the compiler")
            compiled(executor, layout)

        Executor.compile_layout = failing_layout
        return
    run, calls = Executor.run, []

    def failing(executor: Executor, *args: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == FAULT_CALL:
            if fault == "memory":
                exhausted()
            if fault == "killed":
                os.kill(os.getpid(), 9)
            if fault == "stopped":
                os.kill(os.getpid(), 19)
            time.sleep(600)  # stuck
        return run(executor, *args, **named)

    Executor.run = failing


def main(given: dict[str, Any]) -> None:
    """Run one process.

    requests: prompts. sampling: the settings of the requests. repeat: the number of rounds.

    layouts_later: begin to serve with the largest layout, as on a GPU, and print how many layouts are not
    ready in the end.

    With a host tier, pages are always loaded and read from the disk, and the tiers' counters are printed.
    """
    prompts, sampling = given.pop("requests"), given.pop("sampling", {})
    repeat, fault = given.pop("repeat", 1), given.pop("fault", None)
    later = given.pop("layouts_later", False)
    if fault is not None:
        inject(fault)
    from jaxflow.engine import first_layouts, start
    from jaxflow.engine.deferred import wait_until_compiled
    from jaxflow.kv.tiers import policy
    from jaxflow.llm import LLM
    from jaxflow.request import SamplingParams
    from pallas_kernels.cards import default_card

    always = policy.FetchCosts(bytes_per_s=1e15, latency_s=0.0, seconds_per_token=1.0)
    start.start_host_tier = functools.partial(start.start_host_tier, costs=always)
    card = dataclasses.replace(default_card(), disk_patience=1e9)
    policy.this_card = lambda: card
    if later:
        first_layouts.on_gpu, first_layouts.first_sizes = (lambda: True), (lambda seconds: [max(seconds)])
    params = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, **sampling})
    with LLM(progress=False, **given) as llm:
        assert given.get("process_id") in (None, 0), "a follower returned from LLM(...)"
        for _ in range(repeat):
            found = llm.generate(prompts, params, use_tqdm=False)
        if later:
            wait_until_compiled()
            print("not ready:", len(llm.executor.unready()))
            again = llm.generate(prompts, params, use_tqdm=False)
            assert drawn(again) == drawn(found)
        if "enable_eplb" in given:
            print("moved slots:", llm.driver._loop.balancer.moved_slots)
        if "kv_offloading_size" in given:
            print(json.dumps(llm.driver.stats().kv_tiers))
    print(json.dumps(drawn(found)), flush=True)


def drawn(outputs: list[Any]) -> list[list[list[int]]]:
    """Return the tokens of each choice of each output."""
    return [[list(choice.token_ids) for choice in output.outputs] for output in outputs]


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
