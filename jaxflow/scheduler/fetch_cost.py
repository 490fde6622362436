"""Is it cheaper to bring KV back from the host, or to compute it again?"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class LoadCosts:
    """What this machine and model need, measured at start.

    Attributes:
      bytes_per_s: over the link to the device, of all shards together, each way.
      latency_s: from the decision to load until the step that can use the pages, beside what their bytes
      take. seconds_a_token: of prefill in a full step.
    """

    bytes_per_s: float
    latency_s: float
    seconds_a_token: float


def worth_loading(tokens: int, num_bytes: int, costs: LoadCosts) -> bool:
    """Whether `num_bytes` come sooner than `tokens` positions are computed. Attention, quadratic, is left
    out: it only adds.
    """
    return costs.latency_s + num_bytes / costs.bytes_per_s < tokens * costs.seconds_a_token
