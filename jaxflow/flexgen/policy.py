"""FlexGen's policy (§4.3) as a file: the placement of weights, KV and activations, and the block size.

`search.placement.command` writes the file, and the offline runtime follows the policy. Shares are percentages
of a kind of tensor in each memory tier.
"""

import os
from pathlib import Path

import msgspec

SCHEMA_VERSION = 1
TIERS = ("device", "host", "disk")
KINDS = ("weights", "kv", "activations")  # kinds of tensors with shares
PERCENTAGES = "three percentages that sum to 100, each 0 to 100"
SCHEDULES = ("zigzag", "diagonal")
WIDTHS = (16, 4)  # bits: bfloat16, or 4-bit groups of 64
_COUNTS = (
    *("prompt_tokens", "output_tokens", "gpu_batch_size", "num_gpu_batches"),
    "pipeline_parallel_size",
)
_TOLERANCE = 1e-6  # percent


class PolicyError(ValueError):
    """An invalid policy. The message names the field, the value and the accepted values."""


class Shares(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Percentages of a kind of tensor on device, host and disk. `Policy` checks that they sum to 100."""

    device: float = 0.0
    host: float = 0.0
    disk: float = 0.0

    @property
    def are_whole(self) -> bool:
        """Return True for percentages from 0 to 100 that sum to 100."""
        return all(0 <= share <= 100 for share in self) and abs(sum(self) - 100) <= _TOLERANCE

    def __iter__(self):
        return iter((self.device, self.host, self.disk))


class Policy(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """FlexGen's 11 variables, the bits of weights and KV, and the place of the decodes' attention.

    A block is `num_gpu_batches` batches of `gpu_batch_size` sequences, and one fetch of a layer's weights
    serves a block. With several stages a block has a micro-batch of `num_gpu_batches` batches for each of
    them (`jaxflow.flexgen.stages`). `weights` are placed by tensors of a layer, `kv` and `activations` by
    sequences of a batch. With `host_attention`, the host computes the attention of decodes over KV that is
    not on the device. With `value_top_k_percent` below 100, decodes attend to the V rows of the top keys only
    (`jaxflow.flexgen.sparse_values`). `schedule` is the order of a block's steps (`jaxflow.flexgen.block`).

    Raises: PolicyError.
    """

    model: str
    prompt_tokens: int
    output_tokens: int
    gpu_batch_size: int
    num_gpu_batches: int
    weights: Shares
    kv: Shares
    activations: Shares
    weight_bits: int = 16
    kv_bits: int = 16
    host_attention: bool = False
    value_top_k_percent: float = 100.0
    schedule: str = "zigzag"
    pipeline_parallel_size: int = 1
    schema_version: int = SCHEMA_VERSION

    def __post_init__(self) -> None:
        for field in _COUNTS:
            if getattr(self, field) < 1:
                raise PolicyError(f"{field}={getattr(self, field)}; accepted is a positive number")
        for field in KINDS:
            shares = getattr(self, field)
            if not (isinstance(shares, Shares) and shares.are_whole):
                raise PolicyError(
                    f"{field}={shares}; accepted are {PERCENTAGES}, for example "
                    f"Shares(device=20.0, host=80.0, disk=0.0)"
                )
        for field in ("weight_bits", "kv_bits"):
            if getattr(self, field) not in WIDTHS:
                raise PolicyError(
                    f"{field}={getattr(self, field)}; accepted is {' or '.join(map(str, WIDTHS))}"
                )
        if self.schedule not in SCHEDULES:
            raise PolicyError(f"schedule={self.schedule!r}; accepted is {' or '.join(SCHEDULES)}")
        if self.schedule != "zigzag" and self.pipeline_parallel_size > 1:
            raise PolicyError(
                f"schedule={self.schedule!r} with pipeline_parallel_size={self.pipeline_parallel_size}; "
                "accepted is zigzag, the order of the stages"
            )
        if not 0 < self.value_top_k_percent <= 100:  # also for NaN
            raise PolicyError(
                f"value_top_k_percent={self.value_top_k_percent}; accepted is a number above 0 and up to 100"
            )
        if self.host_attention and self.kv_bits != 16:
            raise PolicyError(
                f"host_attention=True with kv_bits={self.kv_bits}; accepted is kv_bits=16, because a host "
                "unpacks 4 bits slower than they cross the link (§5)"
            )

    @property
    def sparse_values(self) -> bool:
        """Return True if decodes leave out rows of V."""
        return self.value_top_k_percent < 100

    @property
    def block_size(self) -> int:
        """The number of sequences of a block: FlexGen's effective batch size."""
        return self.gpu_batch_size * self.num_gpu_batches * self.pipeline_parallel_size


def save_policy(policy: Policy, path: str | os.PathLike) -> None:
    """Write a policy to a file."""
    Path(path).write_bytes(msgspec.json.format(msgspec.json.encode(policy), indent=1) + b"\n")


def load_policy(path: str | os.PathLike, *, model: str | None = None) -> Policy:
    """Read a policy.

    Raises: PolicyError, naming the file and the field; also for a policy of another model than `model`.
    """
    try:
        text = Path(path).read_bytes()
        version = msgspec.json.decode(text, type=dict).get("schema_version")
        if version != SCHEMA_VERSION:
            raise PolicyError(f"{path}: schema_version={version}; accepted is {SCHEMA_VERSION}")
        policy = msgspec.json.decode(text, type=Policy)
    except OSError as error:
        raise PolicyError(f"{path}: {error.strerror or error}") from error
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise PolicyError(f"{path}: {error}") from error
    if model is not None and policy.model != model:
        raise PolicyError(
            f"{path}: model={policy.model!r}, used for {model!r}; accepted is a policy of that model"
        )
    return policy
