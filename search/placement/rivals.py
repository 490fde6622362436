"""What a found policy is held against, by the cost model: FlexGen's ablations (Tables 4, 23), hand-made
policies, each tier alone.
"""

import dataclasses
from collections.abc import Iterable

from jaxflow.flexgen.policy import Policy, Shares
from search.placement.cost import Prediction, memory_bytes, predict, split
from search.placement.machine_curves import Machine
from search.placement.solver import Memory, Options, candidates, policy_of
from search.placement.workload import Workload

DEVICE, HOST, DISK = Shares(device=100.0), Shares(host=100.0), Shares(disk=100.0)


@dataclasses.dataclass(frozen=True)
class Row:
    """A rival; without a policy, none of its kind fits."""

    name: str
    policy: Policy | None
    prediction: Prediction | None


def rivals(work: Workload, machine: Machine, memory: Memory, options: Options, found: Policy) -> list[Row]:
    """The found policy first, then each thing taken away from it or done by hand.

    "no search" is the weights' and all other tensors' next tier that has room, in batches as large as fit and
    one to a block; "row by row" is what other systems do: KV and activations on the device, one batch a block
    (DeepSpeed's policy).
    """
    rows = [Row("all optimisations", found, predict(work, machine, found))]
    rows.append(Row("no overlap", found, predict(work, machine, found, overlap=False)))
    by_hand = [
        placed
        for beyond in (HOST, DISK)
        for placed in ((beyond, HOST, HOST), (beyond, DISK, HOST), (beyond, DISK, DISK))
    ]
    rows.append(_largest("no search", work, machine, memory, options, found, by_hand, batches=(1,)))
    rows.append(
        _searched(
            "no host attention", work, machine, memory, dataclasses.replace(options, host_attention=False)
        )
    )
    rows.append(_searched("no disk", work, machine, dataclasses.replace(memory, disk=0.0), options))
    row_by_row = [(weights, DEVICE, DEVICE) for weights in (DEVICE, HOST, DISK)]
    rows.append(_largest("row by row", work, machine, memory, options, found, row_by_row, batches=(1,)))
    for name, tier in (("all on the device", DEVICE), ("all on the host", HOST), ("all on disk", DISK)):
        rows.append(
            _largest(
                name,
                work,
                machine,
                memory,
                options,
                found,
                [(tier, tier, tier)],
                batches=options.num_gpu_batches,
            )
        )
    return rows


def fits(work: Workload, memory: Memory, policy: Policy) -> bool:
    """Whether each tier has room."""
    return all(
        used <= capacity for used, capacity in zip(memory_bytes(work, *split(policy)), memory, strict=True)
    )


def _searched(name: str, work: Workload, machine: Machine, memory: Memory, options: Options) -> Row:
    best = max(candidates(work, machine, memory, options), key=lambda one: one.tokens_per_s, default=None)
    if best is None:
        return Row(name, None, None)
    policy = policy_of(work, machine, memory, best.choice, options)
    return Row(name, policy, predict(work, machine, policy))


def _largest(
    name: str,
    work: Workload,
    machine: Machine,
    memory: Memory,
    options: Options,
    found: Policy,
    placements: Iterable[tuple[Shares, Shares, Shares]],
    batches: Iterable[int],
) -> Row:
    """The first of the placements that fits at all, at the batches with which it is fastest."""
    for weights, kv, activations in placements:
        made = [
            Policy(
                model=found.model,
                prompt_tokens=found.prompt_tokens,
                output_tokens=found.output_tokens,
                gpu_batch_size=size,
                num_gpu_batches=number,
                weights=weights,
                kv=kv,
                activations=activations,
                weight_bits=found.weight_bits,
                kv_bits=found.kv_bits,
                host_attention=found.host_attention,
            )
            for size in options.gpu_batch_sizes
            for number in batches
        ]
        fitting = [(policy, predict(work, machine, policy)) for policy in made if fits(work, memory, policy)]
        fitting = [
            (policy, prediction)
            for policy, prediction in fitting
            if prediction.latency_s <= options.max_latency_s
        ]
        if fitting:
            return Row(name, *max(fitting, key=lambda one: one[1].tokens_per_s))
    return Row(name, None, None)
