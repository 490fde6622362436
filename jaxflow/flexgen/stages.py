"""Layers of an offloaded run in pipeline stages, each on its own devices and tiers (FlexGen §4.4).

Each stage runs the block loop over its layers, on a thread of its own. A block consists of as many
micro-batches as there are stages, each of `num_gpu_batches` batches. For each token a stage passes one
micro-batch after the other through its layers, and hands the activations to the next stage. The last stage
draws the tokens and hands them to the first.
"""

import concurrent.futures
import dataclasses
import threading
import time
from collections.abc import Callable, Generator, Sequence
from typing import Any

import jax

from jaxflow.config import ModelConfig
from jaxflow.flexgen.block import Block, BlockStep, DrawnTokens, pipeline_order
from jaxflow.flexgen.block_loop import BlockSetup, Handing, RunningBlock


def split_layers(config: ModelConfig, stages: int) -> list[ModelConfig]:
    """Return the configuration of each stage: equally many layers, and one more
    in the first stages of the rest.
    """
    size, more = divmod(config.num_layers, stages)
    starts = [stage * size + min(stage, more) for stage in range(stages + 1)]
    return [
        dataclasses.replace(config, layers=config.layers[starts[stage] : starts[stage + 1]])
        for stage in range(stages)
    ]


class PipelineStopped(Exception):
    """Another stage failed, or the caller stopped early."""


class HandOver:
    """The arrays on their way between stages, by the stage and the step that take them. Thread-safe."""

    def __init__(self) -> None:
        self._waiting: dict[tuple[int, int, int], Any] = {}
        self._changed, self._stopped = threading.Condition(), False

    def give(self, stage: int, token: int, batch: int, arrays: Any) -> None:
        """Hand arrays to a stage, for a batch's token."""
        with self._changed:
            self._waiting[stage, token, batch] = arrays
            self._changed.notify_all()

    def take(self, stage: int, token: int, batch: int) -> Any:
        """Wait for the arrays that were given. Raises: PipelineStopped."""
        key = stage, token, batch
        with self._changed:
            self._changed.wait_for(lambda: self._stopped or key in self._waiting)
            if key not in self._waiting:
                raise PipelineStopped
            return self._waiting.pop(key)

    def stop(self) -> None:
        """Let every waiting stage raise PipelineStopped."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()


class StagedRunner:
    """Runner of blocks over the stages of a pipeline. Attributes: as `BlockRunner`."""

    def __init__(self, setups: Sequence[BlockSetup]):
        self._setups = tuple(setups)
        self._threads = concurrent.futures.ThreadPoolExecutor(
            len(self._setups), thread_name_prefix="pipeline-stage"
        )
        self.prefill_s = 0.0
        self.prefill_crossed = (0, 0)

    def run(
        self, block: Block, finished: Callable[[Sequence[int]], bool], on_step: Callable[[BlockStep], object]
    ) -> Generator[DrawnTokens, None, None]:
        """Run a block to its end, and yield each batch's tokens when they are enqueued.

        Arguments: as for `BlockRunner.run`. `finished` is not asked, because the stages run the same steps.

        Raises: DiskError.
        """
        del finished
        hand, last = HandOver(), len(self._setups) - 1
        handings = [
            Handing(hand, stage, self._setups[(stage + 1) % (last + 1)].geometry.mesh, stage == last)
            for stage in range(last + 1)
        ]
        runs = [
            RunningBlock(setup, block, handing) for setup, handing in zip(self._setups, handings, strict=True)
        ]
        started, prompts_left = time.perf_counter(), block.batches
        others = [
            self._threads.submit(self._stage, run, setup, block, hand)
            for run, setup in zip(runs[:-1], self._setups, strict=False)
        ]
        order = self._order(self._setups[last], block)
        try:
            for i, step in enumerate(order.steps):
                for drawn in runs[last].step(order, i):
                    yield drawn
                    prompts_left -= drawn.token == 0
                    if drawn.token == 0 and not prompts_left:
                        jax.block_until_ready(drawn.tokens)
                        self.prefill_s = time.perf_counter() - started
                        self.prefill_crossed = self._crossed()
                on_step(step)
            yield from runs[last].stop()
            for other in others:
                other.result()
        except PipelineStopped:
            raise _fault(others) from None
        except GeneratorExit:
            hand.stop()
            concurrent.futures.wait(others)
            for _ in runs[last].stop():
                pass
            raise
        finally:
            hand.stop()
            concurrent.futures.wait(others)
            for run in runs:
                run.end()

    def _stage(self, run: RunningBlock, setup: BlockSetup, block: Block, hand: HandOver) -> None:
        """Run the steps of a stage that draws no tokens."""
        order = self._order(setup, block)
        try:
            for i in range(len(order.steps)):
                for _ in run.step(order, i):
                    pass
        except PipelineStopped:
            pass
        except BaseException:
            hand.stop()
            raise
        for _ in run.stop():
            pass

    def _order(self, setup: BlockSetup, block: Block) -> Any:
        g = setup.geometry
        layers, tokens = g.config.num_layers, g.policy.output_tokens
        return pipeline_order(block.batches, layers, tokens, g.policy.num_gpu_batches)

    def _crossed(self) -> tuple[int, int]:
        crossed = [setup.tiers.traffic.crossed() for setup in self._setups]
        return sum(one[0] for one in crossed), sum(one[1] for one in crossed)

    def free(self) -> None:
        """Release all memory of devices and host. No block can run afterwards."""
        for setup in self._setups:
            setup.free()

    def close(self) -> None:
        """Stop the threads."""
        self._threads.shutdown()
        for setup in self._setups:
            setup.host_thread.shutdown(cancel_futures=True)


def _fault(others: Sequence[concurrent.futures.Future]) -> BaseException:
    """Return the fault of the stage that stopped the others."""
    faults = (other.exception() for other in others)
    return next(fault for fault in faults if fault is not None)
