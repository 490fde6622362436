"""Drives blocks through the model: FlexGen's Algorithm 1, its six verbs overlapped by what is enqueued before
what.

In the time of a square's compute the next layer's weights and the next square's KV and activation come down,
and what the last square made goes up. One thread enqueues everything, and waits for the square before: a
transfer that is issued before a compute runs beside it, one issued behind may wait for it, since the device's
memory is handed out in the order of the compute. So the next square's loads are issued first, then this one's
compute, then its stores.
"""

import time
from collections.abc import Callable, Generator, Sequence

import jax

from jaxflow.flexgen.block import Block
from jaxflow.flexgen.running_block import Run, Setup
from jaxflow.flexgen.schedule import Square, squares
from jaxflow.flexgen.step_inputs import Drawn


class Driver:
    """Runs blocks, one at a time."""

    def __init__(self, setup: Setup):
        self._setup, self._closed = setup, False
        self.prefill_s = 0.0  # of the last block
        self.prefill_crossed = (0, 0)  # bytes to the device and from it, of the last block's prompts

    def run(
        self, block: Block, finished: Callable[[Sequence[int]], bool], on_square: Callable[[Square], object]
    ) -> Generator[Drawn, None, None]:
        """Computes a block; yields each batch's tokens as they are enqueued. Who wants no more of them must
        close the iterator.

        Args:
          finished: whether all sequences of these batches have ended, as far as the caller knows.
          on_square: told each square as it is enqueued.

        Raises: DiskError, also from closing the iterator.
        """
        g, run = self._setup.geometry, Run(self._setup, block)
        order = list(
            squares(block.batches, g.config.num_layers, g.policy.output_tokens, self._setup.schedule)
        )
        started, self.prefill_s, self.prefill_crossed = time.perf_counter(), 0.0, (0, 0)
        prompts_left = block.batches
        try:
            i = 0
            while i < len(order):
                begins = order[i].token > 0 and order[i].layer == 0 and run.place(order[i]) == 0
                if begins and finished([one.batch for one in order[i : i + run.width]]):
                    i = next((j for j in range(i, len(order)) if order[j].token == 0), len(order))
                    yield from run.stop()
                    continue
                for drawn in run.step(order, i):
                    yield drawn
                    if drawn.token == 0:
                        prompts_left -= 1
                        if not prompts_left:
                            jax.block_until_ready(drawn.tokens)
                            self.prefill_s = time.perf_counter() - started
                            self.prefill_crossed = self._setup.tiers.traffic.crossed()
                on_square(order[i])
                i += 1
            yield from run.stop()
        except (
            GeneratorExit
        ):  # the caller wants no more: what was read ahead must not be taken for the next block's
            if not self._closed:
                for _ in run.stop():
                    pass
            raise
        finally:
            run.end()

    def free(self) -> None:
        """Lets go of all memory of device and host, whoever still holds this; nothing runs afterwards."""
        for store in (
            self._setup.weights,
            self._setup.kv,
            self._setup.activations,
            self._setup.tiers.staging,
        ):
            store.free()

    def close(self) -> None:
        self._closed = True
        self._setup.host_thread.shutdown(cancel_futures=True)
