"""Measure each op of a layer on this device, in isolation and in pairs: a profile for plan searches.

  python -m search measure --model llama-3.1-8b --out search/profiles/h200-llama-3.1-8b.json

Every op runs sustained on dummy weights and a random cache, at a few batch sizes, attention at a few
contexts. On Hopper, kernels can be bounded to some SMs, so ops also run on a part of the SMs, and products
run concurrently with attention. With --tensor_parallel_size, ops are those of one device's shard, measured
on the first device. Collectives, and the largest products concurrent with one, run on all devices; --ops can
leave them out.

The most important measurements come first (`search.profile.entries`). Those that do not fit --time_limit_s,
compilation included, are left out and named. The file is written after every measurement; running the same
command again continues it. Programs are compiled in threads, between measurements, and kept between runs.
"""

import dataclasses
import importlib.metadata
import os
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import msgspec
from absl import flags
from tqdm import tqdm

from jaxflow.cli.output_files import check_outputs
from jaxflow.config import ConfigError, ModelConfig
from jaxflow.kv.device_cache import kv_heads
from jaxflow.model.checkpoints.checkpoint import open_checkpoint
from jaxflow.model.graph import Op, model_graph
from jaxflow.parallel.mesh import make_mesh
from pallas_kernels.kernel_set import kernel_set_for
from search.profile.collective_bench import collective, concurrent, equal_ops
from search.profile.entries import PAIR_KEYS, Measurement, OpPair, described, entries
from search.profile.op_bench import PAGE_SIZE, PHASES, LayerBench, OpCase, TimedProgram
from search.profile.op_times import (
    ATTENTION,
    EXCHANGE,
    NETWORK_SMS,
    OpTime,
    Pair,
    Profile,
    fastest,
    held_out_errors,
    in_words,
    keys_lasting,
    load_profile,
    save_profile,
    seconds,
)
from search.profile.share_times import ShareTimes, product_shapes
from search.profile.sustain import Sustained, sustain

DTYPES = ("auto", "bfloat16", "float32", "float8_e4m3fn")
_AT_ONCE = 16  # programs compiled before any is measured, since compilation may use the device
_SAME = (
    "versions",
    "tensor_parallel_size",
    "dtype",
    "kv_cache_dtype",
    "total_sms",
)  # fields of a continued profile that must agree


_FIRST_S = 3.0  # expected seconds of a piece before the first is done


class TimeBudget:
    """A time limit for many pieces of work, with the expected time of further pieces.

    clock: returns seconds.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic):
        self.limit_s, self.clock, self.begun = limit_s, clock, clock()
        self._took: dict[str, tuple[float, int]] = {}

    @property
    def spent_s(self) -> float:
        return self.clock() - self.begun

    @property
    def left_s(self) -> float:
        return max(0.0, self.limit_s - self.spent_s)

    def took(self, kind: str, seconds: float, pieces: int = 1) -> None:
        """Record the time of pieces.

        Recent pieces weigh more, since the first ones include compilation and warm-up.
        """
        before, number = self._took.get(kind, (0.0, 0))
        self._took[kind] = (0.7 * before + seconds, round(0.7 * number) + pieces)

    def a_piece_s(self, kind: str) -> float:
        """Return the expected seconds of a piece."""
        seconds, number = self._took.get(kind, (_FIRST_S, 1))
        return seconds / max(1, number)

    def fits(self, *kinds: str) -> int:
        """Return the number of pieces of all these kinds that are expected to finish in time."""
        return int(self.left_s / max(1e-9, sum(map(self.a_piece_s, kinds))))


def define_flags() -> None:
    flags.DEFINE_string("model", "llama-3.1-8b", "A shipped config's name, a folder or a hub id.")
    flags.DEFINE_string("out", None, "File for the profile; one that is there is continued.")
    flags.DEFINE_integer("tensor_parallel_size", 1, "Devices that share the model.", lower_bound=1)
    flags.DEFINE_list(
        "ops", [], "Ops that are measured; network: all sums and gathers over devices. Default: all."
    )
    flags.DEFINE_list("tokens", ["128", "256", "512", "768", "1024", "1536", "2048"], "Tokens of a step.")
    flags.DEFINE_list(
        "keys",
        ["256", "1024", "4096"],
        "Contexts of attention: keys a token sees on average; unless given, the model's at most.",
    )
    flags.DEFINE_list(
        "sms",
        None,
        "SM counts of attention next to concurrent products; default: 24,32,40,48 where kernels can be "
        "bounded.",
    )
    flags.DEFINE_enum(
        "dtype", "auto", DTYPES, "Of weights and products; auto: bfloat16 on GPU, float32 on CPU."
    )
    flags.DEFINE_enum("kv_cache_dtype", "auto", DTYPES, "The dtype of the KV cache; auto: the model's.")
    flags.DEFINE_float(
        "time_limit_s",
        480.0,
        "For everything, compilation included; what does not fit is left out.",
        lower_bound=0.0,
    )
    flags.DEFINE_string(
        "compilation_cache_dir",
        "~/.cache/jaxflow/compiled",
        "Folder for compiled programs; empty: none.",
    )
    flags.DEFINE_float("seconds", 0.4, "Seconds that each measurement is sustained.", lower_bound=0.001)


def run() -> None:
    """Run the command."""
    f = flags.FLAGS
    if not f.out:
        raise ConfigError("out", f.out, "--out FILE, a file for the profile")
    check_outputs("out")
    config = open_checkpoint(f.model, load_format="dummy").model_config
    tokens, keys = _numbers("tokens", f.tokens), contexts(f.model, config.max_position)
    layer, empty = this_device(f.model, config, f.dtype, f.kv_cache_dtype, f.tensor_parallel_size)
    chosen = chosen_ops(layer, f.ops)
    if f.sms is not None and not layer.kernels.can_be_bounded:
        raise ConfigError(
            "sms",
            ",".join(f.sms),
            f"nothing: kernels {layer.kernels.name!r} of {empty.device} always take the whole device",
        )
    shares = (
        ()
        if not layer.kernels.can_be_bounded
        else (24, 32, 40, 48)
        if f.sms is None
        else _numbers("sms", f.sms)
    )
    if any(share >= empty.total_sms for share in shares):
        raise ConfigError("sms", max(shares), f"less than the device's {empty.total_sms} SMs")
    profile = resumed(f.out, empty)
    if f.compilation_cache_dir and layer.platform == "gpu":
        jax.config.update("jax_compilation_cache_dir", str(Path(f.compilation_cache_dir).expanduser()))
    wanted, budget = entries(chosen, tokens, keys, shares, empty.total_sms), TimeBudget(f.time_limit_s)
    profile, left = measure(profile, layer, wanted, f.out, budget, seconds_each=f.seconds)
    print(f"{budget.spent_s:.0f} s of {f.time_limit_s:g}")
    there = f"{len(profile.op_times)} times of ops and {len(profile.pairs)} pairs"
    print(
        f"{f.out}: {there if profile.op_times else 'not written, nothing was measured'} of "
        f"{profile.model} on {profile.device}"
    )
    print(in_words(interpolation_errors(profile, config)))
    if not shares:
        print(
            f"No concurrent attention and products: kernels {layer.kernels.name!r} always take the whole "
            f"device, so no plan overlaps them."
        )
    if left:
        print(
            f"Left out for --time_limit_s={f.time_limit_s:g}: {described(left)}. The same command "
            f"continues with them."
        )


def contexts(name: str, most: int) -> tuple[int, ...]:
    """Return the contexts of --keys; by default at most the model's.

    Raises: ConfigError for a longer given one.
    """
    keys = _numbers("keys", flags.FLAGS.keys)
    if max(keys) > most and flags.FLAGS["keys"].present:
        raise ConfigError("keys", max(keys), f"at most {most}, which {name} was made for")
    return tuple(sorted({min(count, most) for count in keys}))


def interpolation_errors(profile: Profile, config: ModelConfig) -> dict[str, float | None]:
    """Return the interpolation errors of a search in this profile; with pairs it knows the waves of
    products.
    """
    tp = profile.tensor_parallel_size
    shares = ShareTimes(
        profile, model_graph(config, tp), product_shapes(config, tp) if profile.pairs else None
    )
    return held_out_errors(profile, shares.fill)


def this_device(
    name: str, config: ModelConfig, dtype: str, kv_dtype: str, tp: int = 1
) -> tuple[LayerBench, Profile]:
    """Return the layer with the kernels of this device, and its profile without entries.

    tp: the devices that the layer is split over. Raises: ConfigError where it cannot be split.
    """
    device, platform = jax.devices()[0], jax.default_backend()
    dtype = dtype if dtype != "auto" else "bfloat16" if platform == "gpu" else "float32"
    fp8 = dtype == "float8_e4m3fn"
    stream = "bfloat16" if fp8 else dtype
    kv_dtype = stream if kv_dtype == "auto" else kv_dtype
    kernels = kernel_set_for(
        platform,
        str(getattr(device, "compute_capability", "")),
        head_dim=config.head_dim,
        queries_per_kv_head=config.num_heads // config.num_kv_heads,
        kv_heads=kv_heads(config, tp) // tp,
        page_size=PAGE_SIZE,
        dtype=stream,
        kv_dtype=kv_dtype,
        hidden_size=config.hidden_size,
        device=device.device_kind,
    )
    empty = Profile(
        device=device.device_kind,
        versions={
            "jax": jax.__version__,
            "jaxlib": importlib.metadata.version("jaxlib"),
            "kernels": kernels.name,
        },
        model=name,
        tensor_parallel_size=tp,
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        total_sms=getattr(device, "core_count", 1) if platform == "gpu" else 1,
        method="measured: ops in a loop on the device, pairs joined after every two calls, random data",
        op_times=(),
    )
    return LayerBench(
        config, kernels, dtype=stream, kv_dtype=kv_dtype, fp8=fp8, platform=platform, tp=tp
    ), empty


def chosen_ops(layer: LayerBench, names: Sequence[str]) -> dict[str, Op]:
    """Return the ops to measure: those named, or all. Of equal collectives only the first is measured.

    Raises: ConfigError for an unknown name, and for collectives over more devices than are here.
    """
    same = equal_ops(layer)
    measured = {name: op for name, op in layer.ops.items() if op.kind != "network" or name in same}
    found = {
        n: op
        for n, op in measured.items()
        if not names or n in names or (op.kind == "network" and "network" in names)
    }
    known = (*measured, *(["network"] if same else []))
    if unknown := [name for name in names if name not in known]:
        raise ConfigError("ops", ",".join(unknown), ", ".join(known))
    devices = len(jax.devices())
    if layer.tp > devices and any(op.kind == "network" for op in found.values()):
        accepted = f"at most the {devices} devices here, unless --ops leaves out {', '.join(same)}"
        raise ConfigError("tensor_parallel_size", layer.tp, accepted)
    return found


def resumed(path: str | os.PathLike, empty: Profile) -> Profile:
    """Return the profile of an existing file, or `empty`.

    Raises: ProfileError or ConfigError for a file of another device or model.
    """
    if not Path(path).exists():
        return empty
    found = load_profile(path, device=empty.device, model=empty.model)
    for field in _SAME:
        there, here = getattr(found, field), getattr(empty, field)
        if there != here:
            raise ConfigError(
                "out", str(path), f"a new file, or one with {field}={here!r}: this one's is {there!r}"
            )
    return found


def measure(
    profile: Profile,
    layer: LayerBench,
    wanted: Sequence[Measurement],
    path: str | os.PathLike,
    budget: TimeBudget,
    *,
    seconds_each: float,
) -> tuple[Profile, list[Measurement]]:
    """Add the measurements that the profile lacks, and write it after each one.

    Returns the profile, and the measurements that did not fit the budget.
    """
    left = [entry for entry in wanted if not _has(profile, entry)]
    bar = tqdm(total=len(wanted), initial=len(wanted) - len(left), desc="Measuring", unit="entry", delay=1.0)
    with bar, ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as threads:
        while left and (
            number := min(budget.fits("compile", "measure"), _AT_ONCE if layer.platform == "gpu" else 1)
        ):
            begun = budget.spent_s
            batch = left[:number]
            programs = compiled(layer, batch, threads)
            budget.took("compile", budget.spent_s - begun, number)
            for entry, (program, executable) in zip(batch, programs, strict=True):
                if budget.left_s < budget.a_piece_s("measure"):
                    return profile, left
                begun = budget.spent_s
                bar.set_postfix_str(f"{_product(entry).op}, {_product(entry).tokens} tokens")
                profile = _with(profile, layer, entry, program, executable, seconds_each)
                _replace(profile, path)
                left = left[1:]
                budget.took("measure", budget.spent_s - begun)
                bar.update()
    return profile, left


def compiled(
    layer: LayerBench, batch: Sequence[Measurement], threads: ThreadPoolExecutor
) -> list[tuple[TimedProgram, Any]]:
    """Return each measurement's program with its executable; all compile at the same time."""
    programs = [_program(layer, entry) for entry in batch]
    return list(zip(programs, threads.map(TimedProgram.compile, programs), strict=True))


def _product(entry: Measurement) -> OpCase:
    return entry if isinstance(entry, OpCase) else entry.product


def _has(profile: Profile, entry: Measurement) -> bool:
    total = profile.total_sms
    if isinstance(entry, OpCase):
        return any(
            (t.op, t.tokens, t.keys, t.sms) == (entry.op, entry.tokens, entry.keys, entry.sms or total)
            for t in profile.op_times
        )
    a, b = entry.product, entry.other
    return any(
        (p.first, p.second, p.first_sms, p.second_sms) == (a.op, b.op, *held_sms(entry, total))
        for p in profile.pairs
    )


def _program(layer: LayerBench, entry: Measurement) -> TimedProgram:
    if isinstance(entry, OpPair):
        if layer.ops[entry.other.op].kind == "network":
            return concurrent(layer, entry.product, entry.other, make_mesh(layer.tp))
        return layer.concurrent(entry.product, entry.other, PAIR_KEYS)
    if layer.ops[entry.op].kind == "network":
        return collective(layer, entry, make_mesh(layer.tp))
    return layer.alone(entry)


def _with(
    profile: Profile,
    layer: LayerBench,
    entry: Measurement,
    program: TimedProgram,
    executable: Any,
    seconds_each: float,
) -> Profile:
    given, kept = program.drawn(max(1, layer.config.num_experts))
    if isinstance(entry, OpCase):
        found = timed(executable, given, kept, seconds_each)
        took, sms = found.seconds / program.calls, entry.sms or profile.total_sms
        names = equal_ops(layer).get(entry.op, (entry.op,))
        joules = None if found.joules is None else found.joules / program.calls
        times = (
            OpTime(name, entry.tokens, entry.keys, sms, took, found.watts, found.clock_mhz, joules)
            for name in names
        )
        step_s = found.energy_step_s or profile.energy_step_s
        return msgspec.structs.replace(profile, op_times=(*profile.op_times, *times), energy_step_s=step_s)
    pair = timed_pair(
        profile,
        layer,
        entry,
        given,
        lambda given, lasting_s: timed(executable, given, None, lasting_s),
        seconds_each,
    )
    return msgspec.structs.replace(profile, pairs=(*profile.pairs, pair))


def timed(executable: Any, given: Any, kept: Any, seconds_each: float) -> Sustained:
    """Time a program. Its results are passed back in, so they stay in place."""
    state = [kept]

    def once() -> Any:
        made = executable(given, state[0])
        state[0] = made if kept is not None else None
        return made

    return sustain(once, seconds_each)


def _replace(profile: Profile, path: str | os.PathLike) -> None:
    """Write a profile so that an interruption leaves no partial file."""
    part = Path(f"{os.fspath(path)}.part")
    save_profile(profile, part)
    part.replace(path)


def _numbers(flag: str, words: Sequence[str]) -> tuple[int, ...]:
    try:
        found = tuple(sorted({int(word) for word in words}))
    except ValueError:
        found = ()
    if not found or found[0] < 1:
        raise ConfigError(flag, ",".join(words), "positive integers, as 128,1024")
    return found


_REACHES = (1.6, 1.2)  # factors around the guess, for the contexts to try


def timed_pair(
    profile: Profile,
    layer: LayerBench,
    entry: OpPair,
    given: Any,
    run: Callable[[Any, float], Sustained],
    seconds_each: float,
) -> Pair:
    """Return the performance of both ops of a pair; attention has the context at which both end together.

    profile: has both ops in isolation. given: the input of the pair's program. run: sustains the program.
    """
    a, b, keys = entry.product, entry.other, 0
    first_sms, second_sms = held_sms(entry, profile.total_sms)

    def loaded(keys: int) -> Any:
        return given | {"batch": layer.batch(dataclasses.replace(b, keys=keys), PAIR_KEYS)}

    if b.op in ATTENTION:
        fewest = min(one.keys for one in profile.op_times if one.op == b.op)
        least = max(fewest, b.tokens // 2 if b.op == "chunk_attention" else 1)  # a chunk sees itself
        wanted_s = seconds(profile, a.op, a.tokens, 0, first_sms)

        def alone_s(keys: float) -> float:
            return seconds(profile, b.op, b.tokens, keys, second_sms)

        def together_s(keys: int) -> float:
            return run(loaded(keys), seconds_each / 2).seconds / PHASES

        keys = equal_ends(together_s, alone_s, keys_lasting(alone_s, wanted_s, PAIR_KEYS), least, PAIR_KEYS)
        given = loaded(keys)
    found = run(given, seconds_each)
    took = found.seconds / PHASES
    kept = (min(1.0, fastest(profile, one.op, one.tokens, keys) / took) for one, keys in ((a, 0), (b, keys)))
    joules = None if found.joules is None else found.joules / PHASES
    about = {"watts": found.watts, "clock_mhz": found.clock_mhz, "joules": joules, "seconds": took}
    return Pair(
        a.op,
        b.op,
        first_sms,
        second_sms,
        *kept,
        first_tokens=a.tokens,
        second_tokens=b.tokens,
        keys=keys,
        **about,
    )


def equal_ends(
    together_s: Callable[[int], float], alone_s: Callable[[float], float], guess: float, least: int, most: int
) -> int:
    """Return the context, from `least` to `most`, at which attention ends with the concurrent op.

    together_s: seconds until both have ended, by context. alone_s: of attention alone on its SMs, rising.
    Only the end of both can be timed. With a short context that is the other op's end; with a long one it is
    attention's, which then grows in proportion to its isolated time. A guess that is far off is followed.
    """

    def within(keys: float) -> int:
        return round(min(most, max(least, keys)))

    keys = guess
    for reach in _REACHES:
        short, long = within(keys / reach), within(keys * reach)
        first_s, longer = together_s(short), together_s(long) / alone_s(long)
        keys = keys_lasting(lambda keys, longer=longer: longer * alone_s(keys), first_s, most)
    return within(keys)


def held_sms(pair: OpPair, total: int) -> tuple[int, int]:
    """Return the SMs that each op of a pair holds, as far as known; an exchange holds none."""
    sent = {EXCHANGE: 0, "attn_reduce": min(NETWORK_SMS, total)}.get(pair.other.op, total)
    return pair.product.sms or total, pair.other.sms or sent
