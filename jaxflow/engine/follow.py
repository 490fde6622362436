"""The life of a process that follows process 0: it replays the calls of the
executor until process 0 stops.
"""

import logging
import queue
import signal
import threading
from typing import Any

import jax

from jaxflow.engine.executor import Executor
from jaxflow.engine.expert_balancer import MovedLayer
from jaxflow.engine.recorded_calls import every_layout, replay
from jaxflow.engine.stage_threads import AnyPending
from jaxflow.engine.staged_executor import StagedExecutor
from jaxflow.kv.tiers.disk_parts import FollowerDisk
from jaxflow.kv.tiers.disk_tier import DiskTier
from jaxflow.parallel.launch import LOST
from jaxflow.parallel.links import Leader

log = logging.getLogger(__name__)


def follow(executor: Executor | StagedExecutor, leader: Leader, disk: DiskTier | None = None) -> None:
    """Replay the calls of process 0 on this process's devices. Return once process 0 stops.

    disk: of this process's parts of the KV pages; None without a disk tier.

    A fault ends all processes, see `Leader.fail`. A first signal to end asks process 0 to drain and stop; a
    second one ends this process at once.
    """
    _ask_on_signal(leader)
    steps: queue.SimpleQueue[AnyPending | None] = queue.SimpleQueue()
    waiting = threading.Thread(target=_wait, args=(steps, leader), name="finished", daemon=True)
    waiting.start()
    layouts = every_layout(executor)
    pages: dict[int, Any] = {}
    moved: dict[int, MovedLayer] = {}
    parts = None if disk is None else FollowerDisk(disk, pages, leader.answer)
    try:
        for call in leader.calls():
            steps.put(replay(executor, layouts, pages, call, parts, moved))
    except Exception as error:
        _fail(leader, error)


def _wait(steps: queue.SimpleQueue[AnyPending | None], leader: Leader) -> None:
    """Wait for the steps in their order, so that process 0 knows how far this process's devices are."""
    try:
        while True:
            if (pending := steps.get()) is not None:
                jax.block_until_ready(pending.tokens)
            leader.finished += 1
    except Exception as error:
        _fail(leader, error)


def _fail(leader: Leader, error: Exception) -> None:
    if not isinstance(
        error, jax.errors.JaxRuntimeError
    ):  # JAX's errors name an operation, so a traceback adds nothing
        log.exception("a call cannot be replayed")
    leader.fail(error, LOST)


def _ask_on_signal(leader: Leader) -> None:
    asked: list[int] = []

    def on_signal(number: int, _: Any) -> None:
        asked.append(number)
        if len(asked) > 1:
            signal.signal(number, signal.SIG_DFL)
            signal.raise_signal(number)
        threading.Thread(
            target=leader.ask_to_stop, daemon=True
        ).start()  # this thread may hold the leader's lock

    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, on_signal)
