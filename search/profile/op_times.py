"""The profile of one GPU and model: each op's isolated time, and the speed that two concurrent ops keep.

A file is JSON with a schema version. A profile belongs to one device, model and parallelism; a search of
another one refuses it. `seconds` interpolates between the measured points.
"""

import bisect
import collections
import functools
import os
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import msgspec

from jaxflow.model.composition import Composition
from jaxflow.model.cost import find_device
from jaxflow.model.graph import Op
from search import UserError

SCHEMA_VERSION = 1
ATTENTION = ("decode_attention", "chunk_attention")
PAIR_TOKENS, PAIR_DECODES = (
    1024,
    256,
)  # tokens of a pair's product and chunk attention; decodes of its decode attention
# SMs that an NCCL collective holds by default: its channels on H200s
# (benchmarks/h200/kernels/all-reduce-of-two.json)
NETWORK_SMS = 24
# two devices send each other a full part by the copy engines (`jaxflow.parallel.collectives`)
EXCHANGE = "exchange"
COLLECTIVES = ("_reduce", "_scatter", "_gather", EXCHANGE)  # endings of their names


Count = Annotated[int, msgspec.Meta(ge=1)]
Number = Annotated[int, msgspec.Meta(ge=0)]
Positive = Annotated[float, msgspec.Meta(gt=0)]
Dtype = Annotated[str, msgspec.Meta(pattern="^(bfloat16|float32|float8_e4m3fn)$")]
NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class ProfileError(UserError):
    """A profile that cannot be read, or belongs to another device or model.

    The message names the file or field.
    """


class OpTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The isolated time of one op of `jaxflow.model.graph` on one layer, on `sms` SMs.

    keys: attention's mean context, else 0. watts, clock_mhz: of the sensors. joules: of the full card for
    one call, by its energy counter. None: not measured.
    """

    op: str
    tokens: Count
    keys: Number
    sms: Count
    seconds: Positive
    watts: float | None = None
    clock_mhz: Positive | None = None
    joules: float | None = None


class Pair(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Two concurrent ops. A performance P is a share of the op's best isolated speed (NanoFlow §4.1.1).

    seconds: until both had ended. A product and attention end together; a collective next to a product ends
    earlier, so its performance is a lower bound. None in old profiles, whose pairs have `PAIR_TOKENS` and
    `PAIR_DECODES`, where one op waited for the other. joules: of both, by the card's energy counter.
    """

    first: str  # the compute-bound one: its P is its share R of the device
    second: str
    first_sms: Count
    second_sms: Number
    first_performance: NotNegative
    second_performance: NotNegative
    watts: float | None = None
    clock_mhz: Positive | None = None
    joules: float | None = None
    seconds: Positive | None = None
    first_tokens: Count | None = None
    second_tokens: Count | None = None
    keys: Number | None = None  # context of the second op; 0 for a collective


class Profile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, dict=True):
    """The measurements of one model on one device. method: the method of measurement, or the source of a
    model.

    energy_step_s: the time between the steps of the card's energy counter, where it was read.
    """

    device: str
    versions: dict[str, str]
    model: str
    tensor_parallel_size: Count
    dtype: Dtype
    kv_cache_dtype: Dtype
    total_sms: Count
    method: str
    op_times: Annotated[tuple[OpTime, ...], msgspec.Meta(min_length=1)]
    pairs: tuple[Pair, ...] = ()
    schema_version: int = SCHEMA_VERSION
    energy_step_s: float | None = None

    @functools.cached_property
    def curves(self) -> dict[tuple[str, int], dict[int, list[tuple[int, float]]]]:
        """Return (op, sms) -> keys -> [(tokens, seconds)], by tokens."""
        found: dict[tuple[str, int], dict[int, list[tuple[int, float]]]] = collections.defaultdict(
            lambda: collections.defaultdict(list)
        )
        for one in sorted(self.op_times, key=lambda one: one.tokens):
            found[one.op, one.sms][one.keys].append((one.tokens, one.seconds))
        return found


def save_profile(profile: Profile, path: str | os.PathLike) -> None:
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(profile), indent=1) + b"\n")


def load_profile(path: str | os.PathLike, *, device: str | None = None, model: str | None = None) -> Profile:
    """Read a profile. Raises: ProfileError naming the file and the field, also for another device or model.

    A model in a folder is compared by the folder's name, as in plans.
    """
    try:
        text = Path(path).read_bytes()
        version = msgspec.json.decode(text, type=dict).get("schema_version")
        if version != SCHEMA_VERSION:
            raise ProfileError(
                f"{path}: schema_version={version} is not supported: this release reads {SCHEMA_VERSION}"
            )
        profile = msgspec.json.decode(text, type=Profile)
    except OSError as error:
        raise ProfileError(f"{path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise ProfileError(f"{path}: {error}") from error
    same_model = model is None or Path(profile.model).name == Path(model).name
    for field, wanted, same in (
        ("device", device, device in (None, profile.device)),
        ("model", model, same_model),
    ):
        if not same:
            raise ProfileError(
                f"{path}: {field}={getattr(profile, field)!r}, but it is asked about {wanted!r}: "
                f"measure that one"
            )
    return profile


def with_collectives(profile: Profile, measured: Profile) -> Profile:
    """Return the profile with another profile's measured collectives in place of its own.

    Raises: ProfileError for a profile of another device or kind, or without collectives.
    """
    wanted, there = (
        find_device(of.device) or of.device for of in (profile, measured)
    )  # by either of a device's names
    if wanted != there:
        raise ProfileError(f"device={measured.device!r} of the collectives: {profile.device!r} is needed")
    for field in ("tensor_parallel_size", "dtype"):
        wanted, there = getattr(profile, field), getattr(measured, field)
        if wanted != there:
            raise ProfileError(f"{field}={there!r} of the collectives: {wanted!r} is needed")
    found = {one.op for one in measured.op_times if one.op.endswith(COLLECTIVES)}
    if not found:
        raise ProfileError("no collectives were measured: `search measure --ops network` does")
    kept = tuple(one for one in profile.op_times if one.op not in found)
    theirs = tuple(
        msgspec.structs.replace(one, sms=profile.total_sms) for one in measured.op_times if one.op in found
    )
    return msgspec.structs.replace(
        profile, op_times=(*kept, *theirs), method=f"{profile.method}; collectives measured"
    )


def seconds(profile: Profile, op: str, tokens: float, keys: float = 0, sms: int | None = None) -> float:
    """Return the isolated time of an op on `tokens` tokens of one layer.

    The time is linear between measured points and proportional beyond the points.

    Raises: ProfileError if the op was not measured on this number of SMs.
    """
    if tokens <= 0:
        return 0.0
    sms = profile.total_sms if sms is None else sms
    by_keys = profile.curves.get((op, sms))
    if not by_keys:
        known = sorted({one.sms for one in profile.op_times if one.op == op})
        raise ProfileError(
            f"op={op!r} on sms={sms} was not measured for {profile.model} on {profile.device}; it "
            f"was on {known or 'none'}"
        )
    return _between([(at, _between(curve, tokens)) for at, curve in sorted(by_keys.items())], keys)


def fastest(profile: Profile, op: str, tokens: float, keys: float = 0) -> float:
    """Return the isolated seconds on the SMs that suit the op best. Raises: as `seconds`."""
    return min(seconds(profile, op, tokens, keys, sms) for name, sms in profile.curves if name == op)


def keys_lasting(took_s: Callable[[float], float], wanted_s: float, most: float) -> float:
    """Return the context, at most `most`, at which attention takes `wanted_s`.

    took_s: seconds by context, rising.
    """
    low, high = 0.0, most
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (middle, high) if took_s(middle) < wanted_s else (low, middle)
    return high


def _between(points: list[tuple[int, float]], x: float) -> float:
    """Interpolate between points: constant before the first, proportional beyond the last."""
    i = bisect.bisect_left(points, x, key=lambda point: point[0])
    if i == 0:
        return points[0][1]
    if i == len(points):
        at, value = points[-1]
        return value * x / at if at else value
    (x0, y0), (x1, y1) = points[i - 1], points[i]
    return y0 + (y1 - y0) * (x - x0) / (x1 - x0)


def alone(op: Op, tokens: int, keys: int) -> Composition:
    """Return a step that gives the op `tokens` tokens of context `keys`."""
    if op.name == "chunk_attention":
        return Composition(chunks=((tokens, max(0.0, keys - tokens / 2)),))
    return Composition(decode_tokens=tokens, decode_keys=keys or 1)


AXES = {"tokens": "tokens", "keys": "keys", "sms": "SMs"}  # as they are called


def held_out_errors(
    profile: Profile, fill: Callable[[str, float, int], float] = lambda op, tokens, sms: 1.0
) -> dict[str, float | None]:
    """Return for each axis the mean relative error of interpolated op times at points left out.

    Each point between two others on the axis is compared with their interpolation. The value is None without
    such points. Seconds are linear in tokens and in context; between SM counts the rates of full waves are
    (`search.profile.share_times`). fill: the full part of an op's waves (`ShareTimes.fill`).
    """
    return {axis: _mean(_errors(profile, axis, fill)) for axis in AXES}


def in_words(errors: dict[str, float | None]) -> str:
    """Return the errors as a sentence."""
    known = [f"{error:.1%} along {AXES[axis]}" for axis, error in errors.items() if error is not None]
    if unknown := [AXES[axis] for axis, error in errors.items() if error is None]:
        known.append(f"not known along {', '.join(unknown)}, where no point lies between others")
    return f"Mean error of interpolation at points left out: {'; '.join(known)}"


def _errors(profile: Profile, axis: str, fill: Callable[[str, float, int], float]) -> list[float]:
    lines: dict[tuple, list[tuple[int, float]]] = collections.defaultdict(list)
    for one in profile.op_times:
        place = {"op": one.op, "tokens": one.tokens, "keys": one.keys, "sms": one.sms}
        at = place.pop(axis)
        lines[tuple(place.values())].append(
            (at, 1 / (one.seconds * fill(one.op, one.tokens, one.sms)) if axis == "sms" else one.seconds)
        )
    errors = []
    for line in map(sorted, lines.values()):
        for (x0, y0), (x, y), (x1, y1) in zip(line, line[1:], line[2:], strict=False):
            between = y0 + (y1 - y0) * (x - x0) / (x1 - x0)
            errors.append(abs((y / between if axis == "sms" else between / y) - 1))
    return errors


def _mean(errors: list[float]) -> float | None:
    return sum(errors) / len(errors) if errors else None
