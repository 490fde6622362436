"""Measured constants of each device, one JSON file a device, each constant with its source.

`card_of` reads the file of a device. A device without a file, and a constant that a device's file lacks,
get the values of default.json, which were measured on an H200. The file's parts:

- constants: name -> {value, source}; the fields of `Card`.
- hardware: the datasheet, and the measured rates where known (`jaxflow.model.cost`).
- power: joules of work by clock (`jaxflow.model.energy`).
- fixed_joules: joules of a FLOP and of a byte at the power cap, without a clock
  (`search.profile.step_joules`).
- clock: the rates and costs of kernels at a power cap (`search.profile.clock`).
"""

import dataclasses
import functools
import json
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

SCHEMA_VERSION = 1
FOLDER = Path(__file__).parent


@dataclasses.dataclass(frozen=True, eq=False)
class Card:
    """The constants of one device.

    Attributes:
      device: name as in the file, or "" for the default.
      gate_kernel_rows: (first, last) number of rows for which the dense kernel is faster than XLA's product
        followed by the gate.
      flat_bias_max_rows: the most rows of a product with a bias that flat GEMM computes although XLA's
        product alone is faster, because XLA adds the bias in a kernel of its own; 0: none.
      pdl_max_decodes, pdl_min_layer_bytes: limits of decode steps that run with programmatic dependent
        launch.
      expert_mlp_max_tokens, expert_mlp_bf16_max_tokens: the largest steps with one kernel for both products
        of experts in e4m3 and in bfloat16; 0: none.
      norm_of_rows_max_tokens: the largest step whose norms add the rows of a mixture's experts; 0: none.
      route_max_tokens: the largest step whose routers are one kernel; 0: none. route_and_sort_max_tokens: the
        largest of them whose kernels also sort the rows, up to 8.
      decode_attention_least_pages, decode_attention_whole_pages, decode_attention_short_pages: `least`,
        `whole` and `short` of `pallas_kernels.attention.decode.work_list.PairCuts`; 0: never.
      decode_attention_one_fence: whether decode attention counts parts with fewer fences.
      mxfp4_in_blocks: whether experts in MXFP4 are stored in the order of tensor cores.
      mxfp4_rows_tiles: rows of a tile -> `blocks`, `chunks`, `warpgroups` and `by_warps` of a `RowsTile`.
      sort_rows_max_tokens, sort_held_rows_max_tokens: the largest steps whose rows kernels sort by expert,
        on a device with all experts, and on one that holds some of them; 0: none.
      decode_only_max_decodes: the largest decode step that has a program without chunks.
      latent_window_flop: FLOP that take as long as the fixed part of a window of latent prefill by head.
      disk_patience: seconds that a sequence waits for disk pages, over the seconds to compute their tokens.
      sampler_memory_share: share of the memory that one block of the full sampler may use.
      plan_margin, plan_margin_copies, plan_margin_swaps, plan_margin_swaps_fp8: relative error of a
        predicted gain, by the kind of plan.
      restart_margin: relative change of a measured gain after a restart, by the form of the all-reduces.
      dense_gemm_cost_us, fp8_gemm_cost_us: microseconds of the steps, tiles and parts of a GEMM. Steps are
        keyed by "columns x cluster".
      fp8_gemm_fill: microseconds to add parts, and the factor of steps that wait, of split fp8 tiles.
      hardware, power, fixed_joules, clock: the file's other parts, or None.
      sources: where each constant comes from.
    """

    device: str
    gate_kernel_rows: tuple[int, int]
    flat_bias_max_rows: int
    pdl_max_decodes: int
    pdl_min_layer_bytes: int
    expert_mlp_max_tokens: int
    expert_mlp_bf16_max_tokens: int
    norm_of_rows_max_tokens: int
    route_max_tokens: int
    route_and_sort_max_tokens: int
    decode_attention_least_pages: int
    decode_attention_whole_pages: int
    decode_attention_short_pages: int
    decode_attention_one_fence: bool
    mxfp4_in_blocks: bool
    mxfp4_rows_tiles: Mapping[str, Mapping[str, Any]]
    sort_rows_max_tokens: int
    sort_held_rows_max_tokens: int
    decode_only_max_decodes: int
    latent_window_flop: float
    disk_patience: float
    sampler_memory_share: float
    plan_margin: float
    plan_margin_copies: float
    plan_margin_swaps: float
    plan_margin_swaps_fp8: float
    restart_margin: Mapping[str, float]
    dense_gemm_cost_us: Mapping[str, Any]
    fp8_gemm_cost_us: Mapping[str, Any]
    fp8_gemm_fill: Mapping[str, float]
    hardware: Mapping[str, Any] | None = None
    power: Mapping[str, Any] | None = None
    fixed_joules: Mapping[str, Any] | None = None
    clock: Mapping[str, Any] | None = None
    sources: Mapping[str, str] = dataclasses.field(default_factory=dict)


def read_card(path: Path, base: Card | None = None) -> Card:
    """Return the card of a file. Constants that the file lacks come from `base`.

    Raises: ValueError, which names the file, for another schema version or an unknown or missing constant.
    """
    data = json.loads(path.read_text("utf-8"))
    if data.get("schema_version") != SCHEMA_VERSION:
        raise ValueError(
            f"{path}: schema_version={data.get('schema_version')!r}: accepted is {SCHEMA_VERSION}"
        )
    constants = data.get("constants", {})
    fields = {name: _frozen(constant["value"]) for name, constant in constants.items()}
    fields["sources"] = dict(base.sources if base else {}) | {
        name: each["source"] for name, each in constants.items()
    }
    parts = {name: data.get(name) for name in ("hardware", "power", "fixed_joules", "clock")}
    try:
        known = {"device": data["device"], **fields, **parts}
        return Card(**known) if base is None else dataclasses.replace(base, **known)
    except TypeError as error:
        raise ValueError(f"{path}: {error}") from error


def _frozen(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


@functools.cache
def cards() -> Mapping[str, Card]:
    """Return device name -> card of every file but the default, by name."""
    files = sorted(path for path in FOLDER.glob("*.json") if path.stem != "default")
    found = [read_card(path, default_card()) for path in files]
    return {card.device: card for card in found}


@functools.cache
def default_card() -> Card:
    """Return the card of a device that has no file."""
    return read_card(FOLDER / "default.json")


@functools.cache
def card_of(device: str) -> Card:
    """Return the card of a device, or the default card for an unknown device.

    device: a name as in the files ("H200"), or JAX's `device_kind`, which contains all words of the name
    ("NVIDIA H200", "NVIDIA A100-SXM4-80GB").
    """
    words = set(re.split(r"[^A-Za-z0-9]+", device))
    found = [card for name, card in cards().items() if set(re.split(r"[^A-Za-z0-9]+", name)) <= words]
    return found[0] if found else default_card()


@functools.cache
def this_card() -> Card:
    """Return the card of the device that this process lowers programs for."""
    from pallas_kernels.this_device import this_device  # JAX: rooms without JAX read cards by name

    return card_of(this_device().name)
