"""The choice of a step's plan: the plans of each bucket, and the fastest plan for a step's composition.

A bucket may have several plans. Each was searched for another composition: the number of tokens that decode,
and the mean number of keys that a decode reads. `portfolio` decides the plans of each bucket before anything
is compiled. `pick` decides the plan of each step, in a few microseconds. It compares the plans' gains over
the sequential plan, interpolated between the predicted compositions and reduced by the error of the
predictions (`Predictions.margin`). The step is sequential where no reduced gain exceeds 1.
"""

import bisect
import dataclasses
from collections.abc import Callable, Iterable, Sequence

from jaxflow.pipeline.plan import NanoOp, Plan, PlanError, Predictions

_FORMS = ("_scatter", "_gather", "_swap")  # the forms of sums over devices other than all-reduces


@dataclasses.dataclass(frozen=True)
class Gain:
    """A plan's speed over the sequential plan's: `table[i][j]` at `decode_tokens[i]`,
    `mean_context_tokens[j]`.

    margin: the relative error by which the table may be too large.
    """

    decode_tokens: tuple[int, ...]
    mean_context_tokens: tuple[int, ...]
    table: tuple[tuple[float, ...], ...]
    margin: float = 0.0

    @classmethod
    def of(cls, predicted: Predictions) -> "Gain":
        """Return the gain that predicted step times imply."""
        table = tuple(
            tuple(sequential / step for sequential, step in zip(*rows, strict=True))
            for rows in zip(predicted.sequential_s, predicted.step_s, strict=True)
        )
        return cls(predicted.decode_tokens, predicted.mean_context_tokens, table, predicted.margin)

    def at(self, decode_tokens: float, mean_context_tokens: float) -> float:
        """Return the predicted gain of a step of this composition."""
        return between(
            self.decode_tokens, self.mean_context_tokens, self.table, decode_tokens, mean_context_tokens
        )

    def sure(self, decode_tokens: float, mean_context_tokens: float) -> float:
        """Return the gain of a step of this composition, reduced by the margin."""
        return self.at(decode_tokens, mean_context_tokens) / (1 + self.margin)

    @property
    def ever(self) -> bool:
        """Return whether a reduced gain exceeds 1 for a composition. Otherwise no step picks the plan."""
        return max(map(max, self.table)) > 1 + self.margin


def between(
    xs: Sequence[float], ys: Sequence[float], table: Sequence[Sequence[float]], x: float, y: float
) -> float:
    """Return a table's value at (x, y): bilinear between its points, constant beyond them."""
    i, along_x = _place(xs, x)
    j, along_y = _place(ys, y)
    low, high = table[i], table[min(i + 1, len(xs) - 1)]
    following = min(j + 1, len(ys) - 1)
    one = low[j] + (low[following] - low[j]) * along_y
    other = high[j] + (high[following] - high[j]) * along_y
    return one + (other - one) * along_x


def _place(axis: Sequence[float], value: float) -> tuple[int, float]:
    """Return the index of the point before a value, and the fraction of the way to the next point."""
    at = bisect.bisect_right(axis, value) - 1
    if at < 0:
        return 0, 0.0
    if at == len(axis) - 1:
        return at, 0.0
    return at, (value - axis[at]) / (axis[at + 1] - axis[at])


def pick(gains: Sequence[Gain | None], decode_tokens: float, mean_context_tokens: float) -> int:
    """Return the index of the plan to run: the largest reduced gain, or the first of equal ones.

    gains: of each plan of the bucket; None for the sequential plan.
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
    """Return the plans of each bucket. The sequential plan comes first where there is a choice.

    A plan without predictions cannot be compared: it is its bucket's only plan, for every composition. A
    sequential plan among the searched ones adds no plan. A plan that no step would pick is left out, so that
    the engine need not compile it.

    Args:
      searched: plans, each for the bucket of its tokens, which is made if it is missing.
      buckets: step sizes that have a plan in any case.
      sequential: returns the sequential plan of a number of tokens.

    Raises: PlanError for several plans of a bucket that cannot be compared or have one name.
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
    """Return whether a plan runs each op once, over all tokens, on one stream, without waits.

    Its sums over devices must be all-reduces by NCCL's kernels. The plan is one that
    `jaxflow.pipeline.program.check` accepts: the order of its ops and its model are not examined.
    """
    ops = [nano.op for nano in plan.nano_ops]
    usual = plan.sums == "kernels" and not any(op.endswith(_FORMS) for op in ops)
    return (
        usual and 0 < len(ops) == len(set(ops)) and all(_plain(nano, plan.tokens) for nano in plan.nano_ops)
    )


def _plain(nano: NanoOp, tokens: int) -> bool:
    """Return whether a nano-op covers all tokens and sets nothing else.

    A searched plan notes the SMs that NCCL takes for a sum. The compiler ignores these SMs.
    """
    sms = nano.sms if nano.op.endswith("_reduce") else None
    return nano == NanoOp(nano.id, nano.op, 0, tokens, sms=sms)
