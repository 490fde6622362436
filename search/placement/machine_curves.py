"""The constants of a machine for the placement's cost model (FlexGen Table 7): a file, fitted to measured
points.

A transfer or a product of `units` (bytes, FLOPs) takes a fixed time and a time in proportion to the units,
so small ones are slow. The sizes are known before the search (FlexGen's "piece-wise functions", A.3), which
keeps its programs linear.
"""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import numpy as np

from search import UserError

SCHEMA_VERSION = 1
FOLDER = Path(__file__).parent / "machines"
_STEPS = 1500


class MachineError(UserError):
    """A machine's file that cannot be read or used. The message names the file and the field."""


RENAMED = {"square_s": "batch_layer_s"}  # fields of earlier releases


class TimeCurve(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Seconds of some work: `fixed_s + units / units_per_s`."""

    fixed_s: float
    units_per_s: float

    def __post_init__(self) -> None:
        if not (self.fixed_s >= 0 and self.units_per_s > 0):
            raise MachineError(
                f"fixed_s={self.fixed_s}, units_per_s={self.units_per_s}: a time of 0 or more and a "
                f"positive rate"
            )

    def seconds(self, units: float) -> float:
        return self.fixed_s + units / self.units_per_s if units else 0.0


class Machine(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The curves of a machine.

    Units are bytes for links and memories, FLOPs for products. `method`: their source.
    """

    name: str
    method: str
    host_to_device: TimeCurve
    device_to_host: TimeCurve
    disk_to_host: TimeCurve
    host_to_disk: TimeCurve
    device_products: TimeCurve  # dense products
    device_attention: TimeCurve  # FLOPs of compute-bound attention
    device_memory: TimeCurve  # bytes read or written apart from products
    host_attention: TimeCurve  # bytes of KV that the host attends to
    one_processor: bool = False  # the device is the host: their work takes turns
    # Elements a second that FlexGen's own runtime unpacks from 4 bits: a layer once for a block,
    # with no transfer meanwhile. None: the program of each batch unpacks at the rate of
    # `device_memory`, while others transfer.
    unpack_weights_per_s: float | None = None
    batch_layer_s: float = 0.0  # seconds that the device waits for the driver, for a batch at a layer
    # Bytes a second in each direction of the links of all devices together. None: each has its own rate.
    all_links_per_s: float | None = None
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        if not self.batch_layer_s >= 0:
            raise MachineError(f"batch_layer_s={self.batch_layer_s}: seconds, 0 or more")
        if not (self.unpack_weights_per_s is None or self.unpack_weights_per_s > 0):
            raise MachineError(f"unpack_weights_per_s={self.unpack_weights_per_s}: a positive rate")
        if not (self.all_links_per_s is None or self.all_links_per_s > 0):
            raise MachineError(f"all_links_per_s={self.all_links_per_s}: a positive rate")

    @property
    def has_pools(self) -> bool:
        """Return True for a GPU under this project's runtime, which loses memory to gaps (`pool_limits`)."""
        return not self.one_processor and self.unpack_weights_per_s is None

    def shared_by(self, devices: int) -> "Machine":
        """Return the machine with the links of each of so many devices that transfer at the same time."""
        if self.all_links_per_s is None:
            return self
        most, links = self.all_links_per_s / devices, (self.host_to_device, self.device_to_host)
        down, up = (TimeCurve(link.fixed_s, min(link.units_per_s, most)) for link in links)
        return msgspec.structs.replace(self, host_to_device=down, device_to_host=up)


CURVES = tuple(field.name for field in msgspec.structs.fields(Machine) if field.type is TimeCurve)


class CurvePoint(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One measurement of a curve."""

    units: float
    seconds: float


class MeasuredCurves(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measured points of a machine, by the name of `Machine`'s curve."""

    name: str
    method: str
    points: dict[str, list[CurvePoint]]
    one_processor: bool = False


def fit_curve(points: Sequence[CurvePoint]) -> TimeCurve:
    """Return the curve with the least squared error in the logarithm of seconds, so all sizes count the
    same.

    Raises: MachineError without points of two sizes.
    """
    units, seconds = np.array([p.units for p in points]), np.array([p.seconds for p in points])
    if len(set(units)) < 2 or min(units) <= 0 or min(seconds) <= 0:
        raise MachineError(f"points={len(points)}: a curve is fitted to positive times of at least two sizes")
    # In units of the largest point's, parameters are near 1 and one learning rate serves all.
    fixed, slope = (
        np.asarray(_least_squares(jnp.array(units / units.max()), jnp.array(seconds / seconds.max())))
        * seconds.max()
    )
    return TimeCurve(float(f"{fixed:.4g}"), float(f"{units.max() / slope:.4g}"))


@jax.jit
def _least_squares(x: jax.Array, y: jax.Array) -> jax.Array:
    """[2]: a and b of y = a + b x, both positive."""
    import optax  # an extra that only the fit needs

    params: Any = {"fixed": jnp.log(y.min() / 2), "slope": jnp.zeros(())}

    def loss(params: Any) -> jax.Array:
        return (jnp.log((jnp.exp(params["fixed"]) + jnp.exp(params["slope"]) * x) / y) ** 2).mean()

    optimizer = optax.adam(optax.cosine_decay_schedule(0.05, _STEPS))

    def step(carry: Any, _: None) -> Any:
        params, state = carry
        updates, state = optimizer.update(jax.grad(loss)(params), state, params)
        return (optax.apply_updates(params, updates), state), None

    (params, _), _ = jax.lax.scan(step, (params, optimizer.init(params)), length=_STEPS)
    return jnp.exp(jnp.stack([params["fixed"], params["slope"]]))


def fit_machine(measured: MeasuredCurves) -> Machine:
    """Return the fitted machine. Raises: MachineError naming a curve without measurements."""
    missing = [name for name in CURVES if name not in measured.points]
    if missing:
        raise MachineError(f"points: {', '.join(missing)} were not measured on {measured.name}")
    curves: dict[str, Any] = {name: fit_curve(measured.points[name]) for name in CURVES}
    return Machine(name=measured.name, method=measured.method, one_processor=measured.one_processor, **curves)


def errors(measured: MeasuredCurves, machine: Machine) -> dict[str, float]:
    """Mean relative error of each fitted curve at its points."""
    return {
        name: float(
            np.mean(
                [abs(getattr(machine, name).seconds(p.units) / p.seconds - 1) for p in measured.points[name]]
            )
        )
        for name in CURVES
    }


def load_measured(path: str | os.PathLike) -> MeasuredCurves:
    """Read a file of `python -m search machine --points`.

    Raises: MachineError naming the file and the field.
    """
    try:
        return msgspec.json.decode(Path(path).read_bytes(), type=MeasuredCurves)
    except OSError as error:
        raise MachineError(f"{path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MachineError(f"{path}: {error}") from error


def save_machine(machine: Machine, path: str | os.PathLike) -> None:
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(machine), indent=1) + b"\n")


def load_machine(name: str | os.PathLike) -> Machine:
    """Read a machine by its path, or by the name of a shipped one. Raises: MachineError."""
    shipped = FOLDER / f"{name}.json"
    path = shipped if shipped.exists() else Path(name)
    try:
        text = path.read_bytes()
        fields = msgspec.json.decode(text, type=dict)
        version = fields.get("schema_version")
        if version != SCHEMA_VERSION:
            raise MachineError(
                f"{path}: schema_version={version} is not supported: this release reads {SCHEMA_VERSION}"
            )
        for old, new in RENAMED.items():
            if old in fields:
                raise MachineError(f"{path}: the field {old} is now {new}")
        return msgspec.json.decode(text, type=Machine)
    except OSError as error:
        known = ", ".join(sorted(file.stem for file in FOLDER.glob("*.json")))
        raise MachineError(f"machine={str(name)!r}: {error.strerror}: a file, or one of {known}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise MachineError(f"{path}: {error}") from error
