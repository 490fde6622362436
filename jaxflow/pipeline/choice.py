"""Which plan a step runs: the one that is predicted to be the fastest for what the step is made of.

A bucket may have several plans, each searched for another composition: how many tokens decode, and how many
keys each of them reads. What is compared is a plan's gain over the sequential one, interpolated between the
compositions that were predicted, and from it is taken what a prediction may be too good by
(`Predictions.margin`): where no plan then gains anything, the step is sequential. A step pays a few
microseconds for it.
"""

import bisect
import dataclasses
from collections.abc import Callable, Iterable, Sequence

from jaxflow.pipeline.plan import NanoOp, Plan, PlanError, Predictions

_FORMS = ("_scatter", "_gather", "_swap")  # of sums over devices, but for the usual one


@dataclasses.dataclass(frozen=True)
class Gain:
    """How many times faster than the sequential step a plan is: `table[i][j]` at `decode_tokens[i]`,
    `mean_context_tokens[j]`.

    margin: by how much of itself that may be too good.
    """

    decode_tokens: tuple[int, ...]
    mean_context_tokens: tuple[int, ...]
    table: tuple[tuple[float, ...], ...]
    margin: float = 0.0

    @classmethod
    def of(cls, predicted: Predictions) -> "Gain":
        table = tuple(
            tuple(alone / step for alone, step in zip(*rows, strict=True))
            for rows in zip(predicted.sequential_s, predicted.step_s, strict=True)
        )
        return cls(predicted.decode_tokens, predicted.mean_context_tokens, table, predicted.margin)

    def at(self, decode_tokens: float, mean_context_tokens: float) -> float:
        """Of a step of this composition."""
        return between(
            self.decode_tokens, self.mean_context_tokens, self.table, decode_tokens, mean_context_tokens
        )

    def sure(self, decode_tokens: float, mean_context_tokens: float) -> float:
        """What is left of it if it was predicted as much too large as it may be."""
        return self.at(decode_tokens, mean_context_tokens) / (1 + self.margin)

    @property
    def ever(self) -> bool:
        """Whether it is sure to gain anything, for any composition: else it is never picked."""
        return max(map(max, self.table)) > 1 + self.margin


def between(
    xs: Sequence[float], ys: Sequence[float], table: Sequence[Sequence[float]], x: float, y: float
) -> float:
    """A table's value at (x, y): bilinear between its points, level beyond them."""
    i, along_x = _place(xs, x)
    j, along_y = _place(ys, y)
    low, high = table[i], table[min(i + 1, len(xs) - 1)]
    following = min(j + 1, len(ys) - 1)
    one = low[j] + (low[following] - low[j]) * along_y
    other = high[j] + (high[following] - high[j]) * along_y
    return one + (other - one) * along_x


def _place(axis: Sequence[float], value: float) -> tuple[int, float]:
    """The point before a value, and how far it is on the way to the next, 0 to 1."""
    at = bisect.bisect_right(axis, value) - 1
    if at < 0:
        return 0, 0.0
    if at == len(axis) - 1:
        return at, 0.0
    return at, (value - axis[at]) / (axis[at + 1] - axis[at])


def pick(gains: Sequence[Gain | None], decode_tokens: float, mean_context_tokens: float) -> int:
    """Which of a bucket's plans to run, by index: the largest sure gain, the first of equals. None is the
    sequential plan.
    """
    best, index = 0.0, 0
    for at, gain in enumerate(gains):
        value = 1.0 if gain is None else gain.sure(decode_tokens, mean_context_tokens)
        if value > best:
            best, index = value, at
    return index


def portfolio(
    searched: Iterable[Plan], buckets: Iterable[int], sequential: Callable[[int], Plan]
) -> dict[int, tuple[Plan, ...]]:
    """The plans of each bucket, where there is a choice the sequential one first.

    searched: each is for the bucket of its tokens, and makes one where there is none. A plan without
    predictions cannot be compared: it is its bucket's only one, for every composition. The sequential one
    among them adds none; one that no step would pick, since it is sure to gain nowhere, is left out: an
    engine need not compile it. sequential: makes the sequential plan of so many tokens.

    Raises: PlanError for several plans of a bucket that cannot be told apart.
    """
    by_tokens: dict[int, list[Plan]] = {tokens: [] for tokens in buckets}
    for plan in searched:
        never = is_sequential(plan) or (plan.predictions is not None and not Gain.of(plan.predictions).ever)
        by_tokens.setdefault(plan.tokens, []).extend([] if never else [plan])
    found = {}
    for tokens, plans in sorted(by_tokens.items()):
        uncompared = [plan for plan in plans if plan.predictions is None]
        if uncompared and len(plans) > 1:
            raise PlanError(
                uncompared[0].name,
                f"has no predictions: it cannot be one of {len(plans)} plans for {tokens} tokens",
            )
        found[tokens] = tuple(plans) if uncompared else (sequential(tokens), *plans)
        names = [plan.name for plan in found[tokens]]
        twice = [name for name in names if names.count(name) > 1]
        if twice:
            raise PlanError(twice[0], f"two plans for {tokens} tokens have this name")
    return found


def is_sequential(plan: Plan) -> bool:
    """Whether each op is there once, nothing is cut, nothing overlaps or waits, and sums over devices are as
    usual.

    Of a plan that `jaxflow.pipeline.program.check` accepts: in what order the ops are, and of which model, is
    not looked at.
    """
    ops = [nano.op for nano in plan.nano_ops]
    usual = plan.sums == "kernels" and not any(op.endswith(_FORMS) for op in ops)
    return (
        usual and 0 < len(ops) == len(set(ops)) and all(_plain(nano, plan.tokens) for nano in plan.nano_ops)
    )


def _plain(nano: NanoOp, tokens: int) -> bool:
    """Whether it is all tokens' and like any other. A sum's SMs are what NCCL takes: a searched plan says so,
    a step does not ask.
    """
    sms = nano.sms if nano.op.endswith("_reduce") else None
    return nano == NanoOp(nano.id, nano.op, 0, tokens, sms=sms)
