"""The decodes of one micro-batch of a pipeline, so that all micro-batches take equal time (SARATHI §3.2)."""

import numpy as np

from jaxflow.scheduler.config import SchedulerConfig
from jaxflow.scheduler.state import SlotTable


def micro_batch(decoding: np.ndarray, table: SlotTable, index: int, config: SchedulerConfig) -> np.ndarray:
    """Return the slots that decode in a micro-batch, int32 [n], ascending.

    The micro-batch gets a P-th of the predicted decode time of all decoding sequences, P the number of
    stages. The sequences that waited longest go first. A sequence whose last token is still in the pipeline
    waits. So sequences of a large micro-batch move to the next one, until all are equal.

    Args:
      decoding: int32 [m], all slots that decode.
      index: of this call of `Scheduler.schedule`.
    """
    ready = decoding[table.sampled_at[decoding] <= index - config.stages]
    if not len(ready):
        return ready
    token_s, key_s = config.decode_cost
    share_s = (token_s * len(decoding) + key_s * float(table.num_computed[decoding].sum())) / config.stages
    ready = ready[np.argsort(table.sampled_at[ready], kind="stable")]
    total_s = np.cumsum(token_s + key_s * table.num_computed[ready])
    # The number of sequences with a total nearest to the share, at least one.
    count = int(np.abs(total_s - share_s).argmin()) + 1
    return np.sort(ready[:count])
