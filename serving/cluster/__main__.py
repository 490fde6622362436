"""Serve a model by several replicas, each an engine in its own process, on this machine or on a Ray cluster.

  python -m serving.cluster --model FOLDER_OR_FILE_OR_HUB_ID --replicas 2
  python -m serving.cluster --model FOLDER_OR_FILE_OR_HUB_ID --replicas 8 --ray_address auto

The command opens the ports of `python -m serving`, with the same flags, and sends each request to one
replica. It is ready when the first replica is. Needs pip install "jaxflow[cluster]".
"""

import dataclasses
import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING

from absl import flags

import jaxflow.cli.engine_flags
import serving.__main__ as server
from jaxflow.cli.exit_status import run_command
from jaxflow.config import ConfigError, EngineConfig
from jaxflow.parallel.launch import AUTO
from serving import ray_flags
from serving.cluster.apart import ApartRule
from serving.cluster.driver import ClusterDriver
from serving.cluster.model import ClusterModel
from serving.cluster.page_exchange import TransferConfig
from serving.cluster.replica import load_replica
from serving.cluster.wanted import WantedReplicas, read_wanted
from serving.frontend.served_model import ServedModel
from serving.http import http_flags
from serving.operations import operations_flags
from serving.operations.operations import Operations

if TYPE_CHECKING:
    from jaxflow.llm import LLM

PREFILL_REPLICAS = flags.DEFINE_integer(
    "prefill_replicas",
    0,
    "Further engines that compute prompts, and send the KV pages to the --replicas. Needs "
    "--kv_offloading_size.",
    lower_bound=0,
)
PREFILL_RULE = flags.DEFINE_enum_class(
    "prefill_rule",
    ApartRule.PREDICTED,
    ApartRule,
    "Which prompts go to a prefill replica: those that are predicted to delay requests less there, or all "
    "that can.",
)
TRANSFER_TIMEOUT_S = flags.DEFINE_float(
    "transfer_timeout_s",
    10.0,
    "Seconds until KV pages that do not arrive are computed again.",
    lower_bound=0.1,
)
TRANSFER_CHECKSUMS = flags.DEFINE_bool(
    "transfer_checksums", False, "Compare the KV pages with the checksums of their sender."
)
CLUSTER_FILE = flags.DEFINE_string(
    "cluster_file",
    None,
    "JSON file of replicas, version and engine settings, instead of --replicas. It is read again when it "
    "changes: replicas are added, removed, or replaced one at a time.",
)

WATCH_S = 1.0  # between two looks at --cluster_file


def main(argv: list[str]) -> int:
    """Run the command and return its exit status."""
    engine = jaxflow.cli.engine_flags.engine_config_from_flags
    try:
        wanted = wanted_replicas(engine())
        if wanted.config.coordinator is not None:
            accepted = "no flag here: --processes_per_replica starts the processes of an engine"
            raise ConfigError("coordinator", wanted.config.coordinator, accepted)
        if server.MAX_RESTARTS.value:
            accepted = "0 here: lost replicas always start again"
            raise ConfigError("max_restarts", server.MAX_RESTARTS.value, accepted)
        ray_flags.check_ray("command", "serving.cluster")
        processes = ray_flags.PROCESSES_PER_REPLICA.value
        if wanted.prefill_replicas and processes > 1:
            accepted = "1 with prefill replicas: no process has all of a KV page"
            raise ConfigError("processes_per_replica", processes, accepted)
        if processes > 1:  # refuses what an engine of several processes lacks
            dataclasses.replace(wanted.config, coordinator=AUTO)
        transfers = None
        if (wanted.prefill_replicas or CLUSTER_FILE.value is not None) and processes == 1:
            transfers = TransferConfig(TRANSFER_CHECKSUMS.value, TRANSFER_TIMEOUT_S.value)
        load = functools.partial(load_replica, transfers=transfers)
        cluster = ray_flags.connect(wanted.replicas + wanted.prefill_replicas, wanted.config, load)
    except ConfigError as error:
        return server.report_error(error)
    driver = ClusterDriver(
        wanted,
        cluster.launch,
        stall_s=operations_flags.STALL_S.value,
        drain_s=server.DRAIN_TIMEOUT_S.value,
        rule=PREFILL_RULE.value,
    )

    def prepare(config: EngineConfig, template: str | None) -> Callable[[], "LLM"]:
        def load() -> "LLM":
            model = ClusterModel(driver, chat_template=template)
            if CLUSTER_FILE.value is not None:
                watch = threading.Thread(target=watch_file, args=(CLUSTER_FILE.value, config, driver))
                watch.daemon = True
                watch.start()
            return model  # type: ignore[return-value]

        return load

    def operations(served: ServedModel) -> Operations:
        return operations_flags.operations_from_flags(served, driver)

    try:
        return server.run(argv, prepare, operations)
    finally:
        cluster.close()


def wanted_replicas(config: EngineConfig) -> WantedReplicas:
    """Return the replicas of the flags. Raises: ConfigError."""
    if CLUSTER_FILE.value is None:
        return WantedReplicas(ray_flags.REPLICAS.value, config, prefill_replicas=PREFILL_REPLICAS.value)
    for name in ("replicas", "prefill_replicas"):
        if flags.FLAGS[name].present:
            accepted = "no flag with --cluster_file, which has the number"
            raise ConfigError(name, flags.FLAGS[name].value, accepted)
    return read_wanted(CLUSTER_FILE.value, config)


def watch_file(path: str, base: EngineConfig, driver: ClusterDriver) -> None:
    """Bring the replicas to each new state of the file. A file that cannot be used changes nothing."""
    stopped = threading.Event()
    seen = stamp(path)
    while not stopped.wait(WATCH_S):
        if (now := stamp(path)) in (seen, None):
            continue
        seen = now
        try:
            wanted = read_wanted(path, base)
        except ConfigError as error:
            print(f"error: {error}; the replicas stay as they are", file=sys.stderr, flush=True)
            continue
        counts = f"{wanted.replicas} replicas, {wanted.prefill_replicas} prefill replicas"
        server.log(f"{path}: {counts}, version {wanted.version!r}")
        driver.change(wanted)


def stamp(path: str) -> tuple[int, int] | None:
    """Return what changes with a file's content, or None without the file."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_ino, found.st_mtime_ns


if __name__ == "__main__":
    jaxflow.cli.engine_flags.define_engine_flags()
    for module in (jaxflow.cli.engine_flags, server, http_flags, operations_flags, ray_flags):
        flags.adopt_module_key_flags(module)
    sys.argv = jaxflow.cli.engine_flags.engine_arguments(sys.argv)
    run_command(main)
