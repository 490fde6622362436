"""The forms in which devices share the experts of a mixture, and the rates of the ops.

The devices hold whole experts in two forms. In the first, tensor-parallel attention gives all devices all
tokens. A device computes the pairs of its own experts, and an all-reduce adds the outputs. In the second,
each device has tokens of its own, as with data-parallel attention. Up to as many devices as a token has
experts gather the rows of all tokens, and scatter the sums (`jaxflow.model.gathered_tokens`). With more, the
row of each (token, expert) pair goes to the device of the expert and back, by two all-to-alls a layer
(`jaxflow.model.exchanged_experts`).
"""

import dataclasses
import functools
from collections.abc import Mapping

from jaxflow.bench.engine.expert_balance import Mixture, Routes
from jaxflow.bench.engine.expert_balance import simulate as simulate_balance
from jaxflow.config import ModelConfig
from jaxflow.model.cost import Rates
from jaxflow.model.gathered_tokens import ranks_gather
from jaxflow.model.graph import BFLOAT16, Graph, SharedExperts, Widths, model_graph
from pallas_kernels.cards import Card

HOST_DEVICES = 8
EXCHANGES = ("expert_dispatch", "expert_combine")
GROUPED = ("expert_up_gate", "expert_down")
ATTENTION = ("chunk_attention", "decode_attention")
SPARE = 0.25  # slots for copies, over the number of experts
ZIPF, DRIFT_STEPS, BALANCE_STEPS, WINDOW_STEPS = 1.0, 1e5, 100, 50


@dataclasses.dataclass(frozen=True)
class Sharing:
    """How devices share the experts of a layer.

    Attributes:
      devices: of the experts; 1 if a device holds all experts, or columns of all.
      exchanged: whether each device has tokens of its own, and sends rows for other devices.
      slots: of one device, with an expert or a copy in each; None for E / devices.
      balance: the mean number of pairs of a device over the largest. A step
        waits for the device with the most.
      sent_bytes, returned_bytes: bytes of an element that goes to the expert's device, and back.
      once_a_host: whether a token's row goes to another host once, for all experts of the token there.
    """

    devices: int = 1
    exchanged: bool = False
    slots: int | None = None
    balance: float = 1.0
    sent_bytes: float = BFLOAT16.activations
    returned_bytes: float = BFLOAT16.activations
    once_a_host: bool = False

    @property
    def choosers(self) -> int:
        """Return the devices whose own tokens choose among the experts."""
        return self.devices if self.exchanged else 1


def shared_graph(config: ModelConfig, tp: int, widths: Widths, sharing: Sharing) -> Graph:
    """Return the ops of the device with the most pairs. tp: devices that share attention and dense layers."""
    if sharing.devices == 1:
        return model_graph(config, tp, widths)
    slots = None if sharing.slots is None else sharing.slots * sharing.devices
    shared = SharedExperts(slots, sharing.balance, sharing.sent_bytes, sharing.returned_bytes)
    return model_graph(config, tp, widths, ranks=sharing.choosers, shared=shared)


def exchange_bytes_per_s(chosen: int, sharing: Sharing, inside: float, outside: float) -> float:
    """Return the rate of an exchange: bytes for other devices over the time of the slower of two networks.

    Rows inside the host and rows between hosts travel at the same time. Tokens choose experts evenly. A
    gather sends each device the same rows, so it has the rate of pairs.

    chosen: experts of a token. inside, outside: bytes/s of one device to devices
      of its host, and to other hosts.
    """
    devices, host = sharing.devices, min(sharing.devices, HOST_DEVICES)
    hosts = devices / host
    near, far = chosen * (host - 1) / devices, chosen * (devices - host) / devices
    if sharing.once_a_host and not ranks_gather(
        devices, 1, chosen
    ):  # a device of the other host passes the row on
        near, far = chosen * (host - 1) / host, (hosts - 1) * (1 - (1 - 1 / hosts) ** chosen)
    return chosen * (devices - 1) / devices / max(near / inside, far / outside)


@dataclasses.dataclass(frozen=True)
class RateShares:
    """What an op reaches of the rates of a device.

    grouped_flops, grouped_bytes: the grouped products of the experts.
    latent_flops: attention on latent vectors.
    """

    grouped_flops: float = 1.0
    grouped_bytes: float = 1.0
    latent_flops: float = 1.0


def shares_of(card: Card) -> RateShares:
    """Return the shares that a card has, and 1 for others.

    Latent attention takes the share of the card's attention kernels among its products: no
    kernel of its own is measured.
    """
    grouped = (card.hardware or {}).get("grouped", {})
    clock = card.clock or {}
    return RateShares(
        grouped.get("flops_share", 1.0),
        grouped.get("bytes_share", 1.0),
        clock["attention_share"] / clock["tensor_share"]["bfloat16"] if clock else 1.0,
    )


def op_rates(
    config: ModelConfig, sharing: Sharing, rates: Rates, shares: RateShares, outside: float
) -> Mapping[str, Rates]:
    """Return the rates of the ops that do not reach `rates`, by name.

    outside: bytes/s of a device to other hosts.
    """
    found: dict[str, Rates] = {}
    if config.num_experts:
        grouped = _scaled(rates, shares.grouped_flops, shares.grouped_bytes)
        found |= dict.fromkeys(GROUPED, grouped)
    if config.latent is not None:
        found |= dict.fromkeys(ATTENTION, _scaled(rates, shares.latent_flops, 1.0))
    if sharing.exchanged and sharing.devices > 1:
        rate = exchange_bytes_per_s(config.experts_per_token, sharing, rates.network_bytes_per_s, outside)
        found |= dict.fromkeys(EXCHANGES, dataclasses.replace(rates, network_bytes_per_s=rate))
    return found


def _scaled(rates: Rates, flops: float, memory: float) -> Rates:
    by_dtype = {dtype: flops * each for dtype, each in rates.flops_per_s.items()}
    return Rates(by_dtype, memory * rates.memory_bytes_per_s, rates.network_bytes_per_s)


def slots_with_copies(experts: int, devices: int) -> int:
    """Return the slots of a device, with 25 % more than the experts in all, rounded up."""
    return -(-round(experts * (1 + SPARE)) // devices)


@functools.cache
def balances_of(experts: int, chosen: int, devices: tuple[int, ...], tokens: int) -> Mapping[int, float]:
    """Return the balance of the experts for each number of devices, placed by load with copies.

    `bench expert_balance` simulates the balance: preferences by Zipf's law with exponent 1 that drift.
    devices: divisors of the experts. tokens: of all devices in a step.
    """
    rows = simulate_balance(
        Routes(Mixture("", experts, chosen), tokens, ZIPF, DRIFT_STEPS),
        list(devices),
        SPARE,
        steps=BALANCE_STEPS,
        window_size=WINDOW_STEPS,
        step_interval=WINDOW_STEPS,
        seed=0,
    )
    copied = [row for row in rows if row["layout"] == "placed by load, with copies"]
    return {row["devices"]: row["mean_over_max_load"] for row in copied}
