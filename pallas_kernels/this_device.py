"""The kind of device that programs of this process run on.

It is the kind of JAX's first device. A process that lowers programs for the device of another process has no
such device, and takes a description instead (`lower_for`).
"""

import dataclasses

import jax


@dataclasses.dataclass(frozen=True)
class DeviceKind:
    """What the choice and the lowering of programs ask about a device.

    Attributes:
      platform: JAX's name of the backend, `gpu` or `cpu`.
      name: JAX's `device_kind`.
      capability: CUDA's compute capability, for example "9.0"; empty for other devices.
      sms: streaming multiprocessors, or None.
    """

    platform: str
    name: str
    capability: str = ""
    sms: int | None = None


_described: list[DeviceKind] = []


def lower_for(device: DeviceKind) -> None:
    """Let this process lower programs for another device, for the rest of its life. It must not run them."""
    _described[:] = [device]


def described_device() -> DeviceKind | None:
    """Return the device of `lower_for`; None in a process that runs its programs."""
    return _described[0] if _described else None


def this_device() -> DeviceKind:
    """Return the kind of device that this process lowers programs for."""
    if _described:
        return _described[0]
    device = jax.devices()[0]
    return DeviceKind(
        jax.default_backend(),
        device.device_kind,
        str(getattr(device, "compute_capability", "")),
        getattr(device, "core_count", None),
    )
