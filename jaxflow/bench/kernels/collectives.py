"""The collectives of a layer alone, over several devices, at the sizes of decodes and of prefill.

  python -m jaxflow.bench collectives --data_parallel_size 2 --output_json collectives.json

`tokens` are those of a device. All ways carry the tokens of one step:

    gather      the rows of all ranks' tokens to every device, with their experts and weights
    scatter     the sums of all ranks' tokens over the devices, to each token's rank
    exchange    a row of each (token, expert) pair to the expert's device and back, experts drawn evenly
    all-reduce  the sum of all ranks' tokens over the devices, as in tensor parallelism
    nccl-sum    the same by NCCL. XLA has a kernel of its own for an all-reduce of up to 4 MB

The bound is the bytes that a device sends or gets, whichever are more, at the datasheet's rate in one
direction. The calls of a loop on the device wait for each other, by a kernel that writes one element of the
next call's rows. `loop_us` is the time of this kernel and the loop, and is not subtracted.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import flags
from jax import lax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from jaxflow.bench.report import machine
from jaxflow.config import ConfigError, ModelConfig
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.cost import find_device
from jaxflow.model.exchanged_experts import list_sent, pieces_of
from jaxflow.parallel.collectives import gather_rows, scatter_rows
from jaxflow.parallel.mesh import DP, make_rank_mesh
from jaxflow.parallel.ragged import send
from jaxflow.pipeline.streams import NCCL_SUMS
from pallas_kernels.gemm.grouped.routings import draw_routing
from pallas_kernels.measure.timing import interleaved

BFLOAT16_BYTES, WORD_BYTES = 2, 4
_PROGRAM_S = 2e-3  # least time of a program, so that the host does not limit it
_FASTEST_S = 10e-6  # of a collective

Way = tuple[jax.Array, Callable[[jax.Array], Any]]  # the rows of a device, and rows -> arrays


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The tokens of a mixture layer on n devices.

    tokens: of a device. experts: [n t, e], the experts of all tokens.
    """

    config: ModelConfig
    devices: int
    tokens: int

    @functools.cached_property
    def experts(self) -> np.ndarray:
        rng, config = np.random.default_rng(self.tokens), self.config
        return draw_routing(rng, self.devices * self.tokens, config.num_experts, config.experts_per_token)

    @property
    def row_bytes(self) -> int:
        return BFLOAT16_BYTES * self.config.hidden_size

    def sent_bytes(self, way: str) -> float:
        """Return the bytes that the busiest device sends or gets in one call."""
        others = (self.devices - 1) * self.tokens
        if way == "gather":
            return others * (self.row_bytes + 2 * WORD_BYTES * self.config.experts_per_token)
        if way == "scatter":
            return others * self.row_bytes
        if way in ("all-reduce", "nccl-sum"):
            return 2 * others * self.row_bytes
        held = self.config.num_experts // self.devices
        owner = self.experts.reshape(self.devices, -1) // held
        rows = np.array([np.bincount(each, minlength=self.devices) for each in owner])
        np.fill_diagonal(rows, 0)
        return 2.0 * max(rows.sum(0).max(), rows.sum(1).max()) * self.row_bytes  # there and back


def _gather(s: Sizes, h: jax.Array, pairs: jax.Array, sums: jax.Array, experts: jax.Array) -> Way:
    return h, lambda h: gather_rows((h, pairs), DP)


def _scatter(s: Sizes, h: jax.Array, pairs: jax.Array, sums: jax.Array, experts: jax.Array) -> Way:
    return sums, lambda sums: scatter_rows(sums, DP)


def _all_reduce(s: Sizes, h: jax.Array, pairs: jax.Array, sums: jax.Array, experts: jax.Array) -> Way:
    return sums, lambda sums: lax.psum(sums, DP)


def _exchange(s: Sizes, h: jax.Array, pairs: jax.Array, sums: jax.Array, experts: jax.Array) -> Way:
    config, (tokens, chosen) = s.config, experts.shape
    sent = list_sent(experts, config.num_experts, None)
    there, back = pieces_of(lax.all_gather(sent.sizes, DP), 1, lax.axis_index(DP))
    most = s.devices * tokens * min(chosen, config.num_experts // s.devices)

    def run(rows: jax.Array) -> jax.Array:
        return send(send(rows, there, DP, length=most), back, DP, length=rows.shape[0])

    return h[sent.pairs // chosen], run


def _nothing(s: Sizes, h: jax.Array, pairs: jax.Array, sums: jax.Array, experts: jax.Array) -> Way:
    return h, lambda h: h[:1, :1] + 1


WAYS: dict[str, Callable[..., Way]] = {
    "gather": _gather,
    "scatter": _scatter,
    "all-reduce": _all_reduce,
    "nccl-sum": _all_reduce,
    "exchange": _exchange,
}
OPTIONS = {"nccl-sum": NCCL_SUMS}  # XLA's flags of a way


def program(
    sizes: Sizes,
    prepare: Callable[..., Way],
    rounds: int,
    mesh: Mesh,
    options: dict[str, Any] | None = None,
) -> Callable[[], Any]:
    """Return a function that enqueues a program of `rounds` calls and returns its arrays.

    A call reads an element of the output of the call before. options: XLA's flags.
    """

    def run(*inputs: jax.Array) -> Any:
        rows, one = prepare(sizes, *inputs)

        def body(_: jax.Array, carry: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            rows, out = carry
            rows = rows.at[0, 0].set(jax.tree.leaves(out)[0][0, 0])  # else XLA moves the call out of the loop
            return rows, one(rows)

        empty = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), jax.eval_shape(one, rows))
        return lax.fori_loop(0, rounds, body, (rows, empty))[1]

    spec = PartitionSpec(DP)
    mapped = jax.jit(
        jax.shard_map(run, mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False),
        compiler_options=options,
    )
    n, t = sizes.devices, sizes.tokens
    config, chosen = sizes.config, sizes.config.experts_per_token
    place = functools.partial(jax.device_put, device=NamedSharding(mesh, spec))
    rng = np.random.default_rng(0)
    inputs = (
        place(jnp.asarray(rng.normal(size=(n * t, config.hidden_size)), jnp.bfloat16)),
        place(jnp.zeros((n * t, 2 * chosen), jnp.int32)),
        place(jnp.zeros((n * n * t, config.hidden_size), jnp.bfloat16)),
        place(jnp.asarray(sizes.experts)),
    )
    return functools.partial(mapped, *inputs)


def measure_one(sizes: Sizes, way: str, seconds: float, mesh: Mesh, bytes_per_s: float | None) -> dict:
    """Return the row of a report: the median time of a call, its rate, its bound and the power of all cards.

    A way that fails has its `error` instead.
    """
    moved = sizes.sent_bytes(way)
    bound_s = moved / bytes_per_s if bytes_per_s else None
    rounds = int(np.clip(_PROGRAM_S / max(_FASTEST_S, bound_s or 0.0), 4, 200))
    row = {"tokens": sizes.tokens, "way": way, "bytes": moved, "calls": rounds}
    try:
        run = program(sizes, WAYS[way], rounds, mesh, OPTIONS.get(way))
        jax.block_until_ready(run())
        with machine.watch(sizes.devices) as readings:
            timing = interleaved({way: run}, calls=rounds, seconds=seconds, rounds=3)[way]
    except jax.errors.JaxRuntimeError as error:  # an exchange may be too large; the other rows still count
        return row | {"error": str(error)[:300]}
    return row | {
        "us": timing.us,
        "spread": timing.spread,
        "gb_per_s": moved / timing.us / 1e3,
        "bound_us": bound_s and 1e6 * bound_s,
        "share_of_bound": bound_s and 1e6 * bound_s / timing.us,
        "seconds": timing.seconds,
        "power": machine.power_summary(readings),
    }


def measure(
    models: Sequence[str],
    devices: int,
    tokens: Sequence[int],
    seconds: float,
    keep: Callable[[dict[str, Any]], None] = lambda result: None,
) -> dict[str, Any]:
    """Return the rows of each model. keep: receives the report so far after each row.

    `rows_missing` counts the rows that are not measured yet. It is above 0 where a time limit ended the run.

    Raises:
      ConfigError: there are fewer devices, or a model has no experts that they share evenly.
    """
    mesh = make_rank_mesh(devices)
    known = find_device(jax.devices()[0].device_kind)
    rate = None if known is None else known.datasheet.network_bytes_per_s
    configs = {name: open_checkpoint(name, load_format="dummy").model_config for name in models}
    for name, config in configs.items():
        if not config.num_experts or config.num_experts % devices:
            raise ConfigError("models", name, f"models whose experts {devices} devices share evenly")
    first = Sizes(next(iter(configs.values())), devices, 1)
    empty = program(first, _nothing, 200, mesh)
    loop_us = interleaved({"": empty}, calls=200, seconds=seconds, rounds=3)[""].us
    rows: list[dict[str, Any]] = []
    cases = [(number, name, way) for number in tokens for name in configs for way in WAYS]
    result = {"devices": devices, "link_bytes_per_s": rate, "loop_us": loop_us, "rows": rows}
    for number, name, way in cases:
        row = measure_one(Sizes(configs[name], devices, number), way, seconds, mesh, rate)
        rows.append({"model": name} | row)
        print(_line(rows[-1]), file=sys.stderr, flush=True)
        result["rows_missing"] = len(cases) - len(rows)
        keep(result)
    return result


def _line(row: dict[str, Any]) -> str:
    head = f"{row['model']:16}{row['tokens']:8}  {row['way']:12}"
    if "error" in row:
        return head + row["error"].splitlines()[0]
    share = "" if row["share_of_bound"] is None else f"{row['share_of_bound']:8.0%} of the bound"
    return head + f"{row['us']:10.1f} us{row['gb_per_s']:8.1f} GB/s{share}"


def text(report: dict[str, Any]) -> str:
    """Return the report as a table."""
    return "\n".join(
        [*map(_line, report["rows"]), f"a loop without a collective: {report['loop_us']:.1f} us"]
    )


def define_flags() -> None:
    """Define the flags of `bench collectives`."""
    flags.DEFINE_list("models", ["qwen3-30b-a3b", "mixtral-8x7b"], "Mixtures: shipped configs, or folders.")
    flags.DEFINE_integer("data_parallel_size", 2, "Devices.", lower_bound=2)
    flags.DEFINE_list("tokens", ["1", "64", "256", "2048", "4096"], "Tokens of a device.")
    flags.DEFINE_float("seconds", 0.5, "Measured seconds of each row.", lower_bound=0.0)
    flags.DEFINE_string("output_json", None, "Write the report to this file.")


def run() -> dict[str, Any]:
    """Run the command and return its report. Raises: ConfigError, CheckpointError."""
    f = flags.FLAGS
    try:
        tokens = [int(word) for word in f.tokens]
    except ValueError:
        tokens = []
    if not tokens or min(tokens) < 1:
        raise ConfigError("tokens", ",".join(f.tokens), "positive numbers of tokens, as 1,64")
    head = {"command_name": "collectives", **machine.describe()}
    found = measure(
        f.models,
        f.data_parallel_size,
        tokens,
        f.seconds,
        keep=lambda result: machine.keep(f.output_json, head | result),
    )
    print(text(found))
    return head | found
