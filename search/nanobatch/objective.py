"""The objective of a plan search: the cost of a token, of which the kept plan has least.

time: the seconds of a step. energy: its joules. tokens: its seconds at the highest clock, or its joules over
the watts of the power cap, if that is longer; so the plan has the most tokens a second at the cap. The names
are those of `pallas_kernels.tune`.

The joules are the profile's. A nano-op draws the watts above idle that its op drew in isolation on these SMs,
for the time that it takes alone, and the card draws its idle watts for the whole step. Ops without joules in
the profile, kernels beside nano-ops, and the ops outside the layers have the joules of their work on a known
card, and none on another one.
"""

import collections

from jaxflow.config import ConfigError
from jaxflow.model.cost import find_device
from jaxflow.model.energy import shipped_power
from jaxflow.model.graph import Work
from jaxflow.pipeline.plan import Plan
from pallas_kernels.tune.rules import OBJECTIVES
from search.nanobatch.outside import outside_s, outside_work
from search.nanobatch.problem import SearchProblem
from search.nanobatch.side_kernels import ADDITION, exchange_work, side_kernels
from search.nanobatch.simulate import Timeline, simulate
from search.profile.share_times import ShareTimes

TIME, TOKENS, ENERGY = OBJECTIVES


def check_objective(objective: str, shares: ShareTimes) -> None:
    """Raises: ConfigError for joules where the profile has none, and for tokens where no cap is known."""
    profile, known = shares.profile, shares.op_watts.by_op
    device = find_device(profile.device)
    ops = (op for layer in shares.graph.layers for op in layer if op.kind in ("dense", "attention"))
    lacking = [name for name in dict.fromkeys(op.name for op in ops) if name not in known]
    if objective != TIME and lacking:
        accepted = (
            f"{TIME}, since the profile has no joules of {', '.join(lacking)}; on a card with a power sensor "
            f"`python -m search measure --model {profile.model} --out profile.json` measures joules"
        )
        raise ConfigError("objective", objective, accepted)
    if objective == TOKENS and (device is None or shipped_power(device.name) is None):
        accepted = f"{TIME} or {ENERGY}, since the power cap of {profile.device} is not known"
        raise ConfigError("objective", objective, accepted)


def token_cost(plan: Plan, timeline: Timeline, setting: SearchProblem) -> float:
    """Return the cost of a token: seconds for time and tokens, joules of all cards for energy.

    Padding is no token.
    """
    load, cost = setting.load, _step_s(timeline, setting)
    if setting.objective != TIME:
        joules = step_joules(plan, timeline, setting)
        if setting.objective == ENERGY:
            cost = joules * setting.shares.profile.tensor_parallel_size
        else:
            assert setting.power is not None
            cost = max(_fastest_s(plan, timeline, setting), joules / setting.power.cap_w)
    return cost / load.real_tokens


def step_joules(plan: Plan, timeline: Timeline, setting: SearchProblem) -> float:
    """Return the predicted joules of a step on one card, with idle power."""
    shares, load, graph = setting.shares, setting.load, setting.graph
    idle_w = setting.power.idle_w if setting.power else 0.0
    moved = sum(side.moved for side in side_kernels([one.run for one in timeline.entries], plan, load))
    rest = outside_work(graph, load.part(0, load.tokens)) + Work(activation_bytes=moved)
    runs = collections.Counter(
        (one.run.op, one.run.nano.start, one.run.nano.stop, one.sms)
        for one in timeline.entries
        if one.run.op.name != ADDITION
    )
    joules = idle_w * _step_s(timeline, setting)
    for (op, start, stop, sms), number in runs.items():
        step = load.part(start, stop)
        watts = shares.op_watts.at(op.name, *shares.case(op.name, step, op.window), sms)
        if watts is not None:
            joules += number * (watts - idle_w) * shares.seconds(op, step, sms)
        else:
            rest += (exchange_work if plan.sums == "copies" else type(op).work)(op, step) * number
    governor = setting.governor
    return joules if governor is None else joules + governor.joules(rest, timeline.clock_hz or 0.0)


def _step_s(timeline: Timeline, setting: SearchProblem) -> float:
    """Return the seconds of a step, with the ops outside the layers."""
    step = setting.load.part(0, setting.load.tokens)
    return timeline.step_s + outside_s(setting.graph, step, setting.device, setting.shares.profile.dtype)


def _fastest_s(plan: Plan, timeline: Timeline, setting: SearchProblem) -> float:
    """Return the seconds of a step at the highest clock; without a known governor, at the profile's."""
    if setting.governor is not None:
        clock_hz = setting.governor.highest_hz
        timeline = simulate(
            plan, setting.graph, setting.shares, setting.load, device=setting.device, power=setting.power,
            clock_hz=clock_hz,
        )  # fmt: skip
    return _step_s(timeline, setting)
