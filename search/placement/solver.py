"""Find the placement with the highest throughput: a linear program over nine shares (FlexGen Eq. 1) for each
block.
"""

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from search import INSTALL, UserError

try:
    import mip
except ImportError:  # only solving needs the extra `search`
    mip: Any = None

from jaxflow.flexgen.policy import TIERS as POLICY_TIERS
from jaxflow.flexgen.policy import Policy, Shares
from jaxflow.flexgen.pool_limits import least_limit, usable_bytes
from search.placement.cost_model import (
    BlockChoice,
    TierShares,
    ends_s,
    memory_bytes,
    pass_terms,
    passes,
    resources,
)
from search.placement.machine_curves import CURVES, Machine, TimeCurve
from search.placement.workload import PlacementWorkload

GPU_BATCH_SIZES = (1, 2, 4, 8, 12, 16, 20, 24, 32, 40, 48, 64, 80, 96, 128, 160, 192, 256, 384, 512)
NUM_GPU_BATCHES = (
    1,
    2,
    3,
    4,
    6,
    8,
    10,
    12,
    16,
    20,
)  # "bls is less than 20" batches, with the paper's own 16 x 20
TIERS = ("gpu_mem", "cpu_mem", "disk")
GIGA = 1e9
_CORNER = TierShares((0.0, 0.0, 1.0), (0.0, 0.0, 1.0), (0.0, 0.0, 1.0))
_SLACK = 1e-7  # relative difference of two equally fast placements


class PlacementError(UserError):
    """A request that no placement can meet. The message says what would work."""


class MissingSolver(UserError):
    """A search without an LP solver. Policies of given shares need none."""


@dataclasses.dataclass(frozen=True)
class TierMemory:
    """Bytes that a run may use of each tier; inf: unlimited.

    pools: the run's allocators lose a share to gaps, see `jaxflow.flexgen.pool_limits`.

    Raises: PlacementError.
    """

    device: float
    host: float
    disk: float
    pools: bool = False

    def __post_init__(self) -> None:
        for flag, capacity in zip(TIERS, self, strict=True):
            if not capacity >= 0:
                raise PlacementError(f"{flag}={capacity / GIGA}: GB, 0 or more")

    def __iter__(self) -> Iterator[float]:
        return iter((self.device, self.host, self.disk))

    @property
    def usable(self) -> tuple[float, ...]:
        """Return the bytes of tensors that each tier holds."""
        return tuple(
            usable_bytes(tier, int(size)) if self.pools and 0 < size < math.inf else size
            for tier, size in zip(POLICY_TIERS, self, strict=True)
        )

    def of_stage(self, stages: int) -> "TierMemory":
        """Return a stage's part of a machine's memory, in which each stage has a device of its own."""
        return dataclasses.replace(self, host=self.host / stages, disk=self.disk / stages)

    def least(self, tier: str, needed: float) -> float:
        """Return the memory of a tier that holds `needed` bytes of tensors."""
        return least_limit(tier, math.ceil(needed)) if self.pools and 0 < needed < math.inf else needed


@dataclasses.dataclass(frozen=True)
class PlacementOptions:
    """The allowed policies.

    `percent_step`: shares are its multiples (None: any share). `host_attention`: None lets the search
    decide. `schedules`: the search takes the one with the best prediction.
    """

    weight_bits: int = 16
    kv_bits: int = 16
    host_attention: bool | None = None
    value_top_k_percent: float = 100.0
    schedules: Sequence[str] = ("zigzag",)
    pipeline_parallel_size: int = 1
    max_latency_s: float = math.inf  # limit in seconds of a full block
    percent_step: int | None = None
    gpu_batch_sizes: Sequence[int] = GPU_BATCH_SIZES
    num_gpu_batches: Sequence[int] = NUM_GPU_BATCHES

    def __post_init__(self) -> None:
        if self.host_attention and self.kv_bits == 4:
            raise PlacementError(
                "host_attention=on with kv_bits=4: 16, since a host unpacks 4 bits slower than they "
                "cross the link (§5)"
            )
        if not 0 < self.value_top_k_percent <= 100:
            raise PlacementError(
                f"value_top_k_percent={self.value_top_k_percent}: a number above 0 and up to 100"
            )
        if not self.max_latency_s > 0:
            raise PlacementError(f"max_latency_s={self.max_latency_s}: a positive number of seconds")
        if self.percent_step is not None and not (
            1 <= self.percent_step <= 100 and 100 % self.percent_step == 0
        ):
            raise PlacementError(f"percent_step={self.percent_step}: a divisor of 100")
        if self.pipeline_parallel_size < 1:
            raise PlacementError(f"pipeline_parallel_size={self.pipeline_parallel_size}: 1 or more stages")
        for field in ("gpu_batch_sizes", "num_gpu_batches"):
            if not getattr(self, field) or min(getattr(self, field)) < 1:
                raise PlacementError(f"{field}={getattr(self, field)}: positive numbers")

    def choice(
        self, gpu_batch_size: int, num_gpu_batches: int, host_attention: bool, schedule: str
    ) -> BlockChoice:
        """Return a block's choice."""
        return BlockChoice(
            gpu_batch_size,
            num_gpu_batches,
            self.weight_bits,
            self.kv_bits,
            host_attention,
            self.value_top_k_percent,
            schedule,
            self.pipeline_parallel_size,
        )

    def host_attentions(self) -> tuple[bool, ...]:
        if self.kv_bits == 4:
            return (False,)
        return (False, True) if self.host_attention is None else (self.host_attention,)


@dataclasses.dataclass(frozen=True)
class BlockCandidate:
    """The best placement of one block: its seconds, and its tokens."""

    choice: BlockChoice
    latency_s: float
    tokens: int

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.latency_s if self.latency_s else math.inf


def candidates(
    work: PlacementWorkload, machine: Machine, memory: TierMemory, options: PlacementOptions
) -> list[BlockCandidate]:
    """Return the best placement of each block that fits the memory and the latency limit."""
    found = []
    for host_attention, schedule in itertools.product(options.host_attentions(), options.schedules):
        for size in sorted(options.gpu_batch_sizes):
            for batches in sorted(options.num_gpu_batches):
                choice = options.choice(size, batches, host_attention, schedule)
                solved = solve(work, machine, memory, choice, options)
                if solved is None:
                    break  # more batches need more memory and more time
                found.append(BlockCandidate(choice, solved[0], choice.block_size * work.output_tokens))
    return found


def search(
    work: PlacementWorkload, machine: Machine, memory: TierMemory, options: PlacementOptions | None = None
) -> Policy:
    """Return the policy with the highest predicted throughput, and among equals the shortest latency.

    Raises: PlacementError with memories that would fit.
    """
    options = options or PlacementOptions()
    found = candidates(work, machine, memory, options)
    if not found:
        raise PlacementError(_refusal(work, machine, memory, options))
    return policy_of(
        work, machine, memory, max(found, key=lambda one: (one.tokens_per_s, -one.latency_s)).choice, options
    )


def policy_of(
    work: PlacementWorkload,
    machine: Machine,
    memory: TierMemory,
    choice: BlockChoice,
    options: PlacementOptions,
) -> Policy:
    """Return the placement of a choice that fits; among equally fast ones, the one with the least traffic."""
    solved = solve(work, machine, memory, choice, options, tidy=True)
    assert solved is not None, choice
    placed = solved[1]
    return Policy(
        model=work.model,
        prompt_tokens=work.prompt_tokens,
        output_tokens=work.output_tokens,
        weights=_shares(placed.weights),
        kv=_shares(placed.kv),
        activations=_shares(placed.activations),
        **dataclasses.asdict(choice),
    )


def solve(
    work: PlacementWorkload,
    machine: Machine,
    memory: TierMemory,
    choice: BlockChoice,
    options: PlacementOptions,
    *,
    tidy: bool = False,
) -> tuple[float, TierShares] | None:
    """Solve Eq. 1 for one block: (latency in seconds, shares), or None if nothing fits."""
    kinds = [one for one in passes(choice, work.output_tokens) if one.number]
    corner = (pass_terms(work, machine, choice, _CORNER, one).values() for one in kinds)
    unit = max(itertools.chain(*corner)) or 1.0
    model, placed = _program(options.percent_step)
    spent = []
    for one in kinds:
        longest = model.add_var(lb=0.0)
        spent.append((one.number, longest, pass_terms(work, machine, choice, placed, one)))
        for term in resources(machine, choice, spent[-1][2]):
            model += longest >= term * (1 / unit)
    for used, capacity in zip(memory_bytes(work, choice, placed), memory.usable, strict=True):
        if math.isfinite(capacity):
            model += used * (1 / GIGA) <= capacity / GIGA
    layers: Any = sum(number * longest for number, longest, _ in spent)  # seconds of one layer, in units
    constant = work.output_tokens * ends_s(work, machine, choice)
    if math.isfinite(options.max_latency_s):
        model += layers <= (options.max_latency_s - constant) / (work.layers * unit)
    model.objective = mip.minimize(layers)
    if not _optimal(model):
        return None
    latency = constant + work.layers * unit * float(model.objective_value)
    if tidy:
        model += layers <= float(model.objective_value) * (1 + _SLACK)
        traffic: Any = sum(number * sum(terms.values()) for number, _, terms in spent)
        model.objective = mip.minimize(traffic * (1 / unit))
        if not _optimal(model):
            raise RuntimeError(f"{choice}: the solver lost a placement that it had found")
    return latency, TierShares(
        *(tuple(_value(share) for share in kind) for kind in (placed.weights, placed.kv, placed.activations))
    )


def link_bound(
    work: PlacementWorkload, machine: Machine, memory: TierMemory, options: PlacementOptions
) -> float:
    """Return the throughput of the best policy if only the link between host and device took time.

    The result is inf if nothing has to cross.
    """
    free: dict[str, Any] = {
        name: TimeCurve(0.0, math.inf) for name in CURVES if name not in ("host_to_device", "device_to_host")
    }
    only_link = Machine(
        name=machine.name,
        method="",
        host_to_device=machine.host_to_device,
        device_to_host=machine.device_to_host,
        all_links_per_s=machine.all_links_per_s,
        **free,
    )
    return max((one.tokens_per_s for one in candidates(work, only_link, memory, options)), default=math.inf)


def _program(percent_step: int | None) -> tuple[Any, TierShares]:
    """Return a program with nine shares that sum to 1 for each kind of tensor. Raises: MissingSolver."""
    if mip is None:
        raise MissingSolver(f"a placement search needs an LP solver: {INSTALL}")
    model: Any = mip.Model(solver_name=mip.HIGHS)
    model.verbose = 0
    model.max_mip_gap = 1e-9
    kinds = []
    for _ in range(3):
        if percent_step is None:
            shares = [model.add_var(lb=0.0, ub=1.0) for _ in range(3)]
        else:
            parts = 100 // percent_step
            shares = [model.add_var(lb=0, ub=parts, var_type=mip.INTEGER) * (1 / parts) for _ in range(3)]
        model += mip.xsum(shares) == 1.0
        kinds.append(shares)
    return model, TierShares(*kinds)


def _optimal(model: Any) -> bool:
    status = model.optimize()
    if status in (mip.OptimizationStatus.OPTIMAL, mip.OptimizationStatus.FEASIBLE):
        return True
    if status in (mip.OptimizationStatus.INFEASIBLE, mip.OptimizationStatus.INT_INFEASIBLE):
        return False
    raise RuntimeError(f"the solver stopped with {status}")


def _value(share: Any) -> float:
    """Return the value of a solved variable, without the solver's rounding at the ends."""
    value = float(share.x)
    return min(1.0, max(0.0, value if min(value, 1 - value) > 1e-9 else round(value)))


def _shares(shares: Sequence[float]) -> Shares:
    """Return percentages that sum to 100; the largest takes the rounding error."""
    percents = [100 * share for share in shares]
    largest = percents.index(max(percents))
    percents[largest] = 100 - sum(percent for i, percent in enumerate(percents) if i != largest)
    return Shares(*percents)


def _refusal(work: PlacementWorkload, machine: Machine, memory: TierMemory, options: PlacementOptions) -> str:
    """Return the memory or latency that would fit the smallest block."""
    choices = [
        options.choice(
            min(options.gpu_batch_sizes), min(options.num_gpu_batches), host_attention, options.schedules[0]
        )
        for host_attention in options.host_attentions()
    ]
    asked = f"{work.model} with {work.prompt_tokens} + {work.output_tokens} tokens"
    given = ", ".join(f"{name}={capacity / GIGA:g}" for name, capacity in zip(TIERS, memory, strict=True))
    quick = [dataclasses.replace(options, max_latency_s=math.inf)] * math.isfinite(options.max_latency_s)
    latencies = [
        solved[0]
        for choice in choices
        for unlimited in quick
        if (solved := solve(work, machine, memory, choice, unlimited))
    ]
    if latencies:
        return (
            f"max_latency_s={options.max_latency_s:g} with {given}: {asked} takes {min(latencies):.4g} s "
            f"at least"
        )
    fitting = []
    for tier, name in enumerate(TIERS):
        needed = min(least_bytes(work, choice, memory, tier) for choice in choices)
        if math.isfinite(needed):
            fitting.append(f"{name}={_gigabytes(needed)}")
    if fitting:
        return f"{given} GB: {asked} does not fit; it would with {' or '.join(fitting)}"
    endless = dataclasses.replace(memory, device=math.inf, host=math.inf, disk=math.inf)
    device = min(least_bytes(work, choice, endless, 0) for choice in choices)
    needs = [f"gpu_mem={_gigabytes(device)} at least"]
    larger = dataclasses.replace(memory, device=max(memory.device, device * 1.01))
    least = min(
        least_bytes(work, choice, dataclasses.replace(larger, disk=math.inf), 1) for choice in choices
    )
    larger = dataclasses.replace(larger, host=max(memory.host, least * 1.01))
    needs += [f"cpu_mem={_gigabytes(least)}"] * (memory.host < least)
    deepest = min(least_bytes(work, choice, larger, 2) for choice in choices)
    needs += [f"disk={_gigabytes(deepest)}"] * (memory.disk < deepest)
    return f"{given} GB: {asked} does not fit; it would with {' and '.join(needs)}"


def least_bytes(work: PlacementWorkload, choice: BlockChoice, memory: TierMemory, tier: int) -> float:
    """Return the least memory of one tier, given `memory` for the others; inf if no number of bytes helps."""
    model, placed = _program(None)
    needed = model.add_var(lb=0.0)
    for i, (used, capacity) in enumerate(zip(memory_bytes(work, choice, placed), memory.usable, strict=True)):
        if i == tier:
            model += used * (1 / GIGA) <= needed
        elif math.isfinite(capacity):
            model += used * (1 / GIGA) <= capacity / GIGA
    model.objective = mip.minimize(needed)
    if not _optimal(model):
        return math.inf
    return memory.least(POLICY_TIERS[tier], float(model.objective_value) * GIGA)


def _gigabytes(number: float) -> str:
    """Format gigabytes, rounded up so that the advice fits."""
    return f"{math.ceil(number / GIGA * 1e3 + 1e-6) / 1e3:g}"
