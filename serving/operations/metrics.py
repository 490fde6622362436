"""Prometheus metrics: `jaxflow_*`, and the names of vLLM that dashboards use."""

import collections
from collections.abc import Iterator
from typing import Any

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

import jaxflow
from serving.operations.fleet import Fleet
from serving.operations.health import Health, ServedState
from serving.operations.recorder import Recorder

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

# (field of Recorder, jaxflow_*, vllm:*, help)
HISTOGRAMS = (
    ("queue_s", "queue_seconds", "request_queue_time_seconds", "Seconds that a sequence waited to begin"),
    ("prefill_s", "prefill_seconds", "request_prefill_time_seconds", "Seconds of a sequence's prefill"),
    ("decode_s", "decode_seconds", "request_decode_time_seconds", "Seconds of a sequence's decode"),
    ("inference_s", "inference_seconds", "request_inference_time_seconds", "Seconds of prefill and decode"),
    ("total_s", "e2e_seconds", "e2e_request_latency_seconds", "Seconds from arrival to the last token"),
    (
        "first_token_s",
        "ttft_seconds",
        "time_to_first_token_seconds",
        "Seconds from arrival to the first token",
    ),
    ("inter_token_s", "inter_token_seconds", "inter_token_latency_seconds", "Seconds between two tokens"),
    (
        "time_per_output_token_s",
        "time_per_output_token_seconds",
        "request_time_per_output_token_seconds",
        "A sequence's mean seconds between two tokens",
    ),
    ("prompt_tokens", "request_prompt_tokens", "request_prompt_tokens", "Prompt tokens of a sequence"),
    (
        "generation_tokens",
        "request_generation_tokens",
        "request_generation_tokens",
        "Generated tokens of a sequence",
    ),
    ("step_tokens", "step_tokens", "iteration_tokens_total", "Tokens computed in a step"),
    ("step_s", "step_seconds", None, "Seconds of a step"),
    ("loop_lag_s", "event_loop_lag_seconds", None, "Delay of a timer of the event loop"),
)
# (field of Stats, jaxflow_*, vllm:*, help), exposed with the ending _total
COUNTERS = (
    ("prompt_tokens", "prompt_tokens", "prompt_tokens", "Prompt tokens computed"),
    ("completion_tokens", "generation_tokens", "generation_tokens", "Tokens generated"),
    ("preemptions", "preemptions", "num_preemptions", "Sequences that lost their pages and began again"),
    ("steps", "engine_steps", None, "Steps enqueued"),
    (
        "compilations_after_warmup",
        "compilations",
        None,
        "Compilations after warm-up. Each one stops all streams",
    ),
    ("cached_prompt_tokens", "cached_prompt_tokens", "prefix_cache_hits", "Prompt tokens found in the cache"),
)
GAUGES = (
    ("running_requests", "running_requests", "num_requests_running", "Requests that run"),
    ("waiting_requests", "waiting_requests", "num_requests_waiting", "Requests that wait to begin"),
)
# (field of EngineConfig, help)
LIMITS = (
    ("max_num_seqs", "Most sequences that run at the same time"),
    ("max_num_batched_tokens", "Most tokens of a step"),
)


class EngineCollector(Collector):
    """The metrics of a served model, read when Prometheus asks.

    Args:
      legacy_metric_names: also expose the names that vLLM removed.
      fleet: the replicas behind the server; None for one engine.
    """

    def __init__(
        self,
        served: ServedState,
        recorder: Recorder,
        health: Health,
        legacy_metric_names: bool,
        fleet: Fleet | None = None,
    ):
        self._served, self._recorder, self._health, self._fleet = served, recorder, health, fleet
        self._legacy = legacy_metric_names

    def describe(self) -> Iterator[Metric]:
        """Return nothing: the names depend on whether the model is loaded."""
        return iter(())

    def collect(self) -> Iterator[Metric]:
        """Return the metrics of this moment."""
        self._recorder.update()
        yield _gauge("jaxflow_ready", "1 if new requests are served", float(self._health.ready().ok))
        yield _gauge("jaxflow_live", "1 if steps advance while there is work", float(self._health.live().ok))
        if self._fleet is not None:
            yield from _replicas(self._fleet)
        if self._served.loaded:
            yield from self._loaded()

    def _loaded(self) -> Iterator[Metric]:
        llm, recorder = self._served.llm, self._recorder
        stats, model = llm.driver.stats(), llm.name
        config = llm.engine_config
        yield InfoMetricFamily(
            "jaxflow",
            "The program and its model",
            {
                "version": jaxflow.__version__,
                "model_name": model,
                "plan": config.plan,
                "dtype": config.dtype,
                "kv_cache_dtype": config.kv_cache_dtype,
            },
        )
        for field, text in LIMITS:
            yield _gauge(f"jaxflow_{field}", text, getattr(config, field))
        yield _gauge(
            "jaxflow_seconds_without_progress",
            "Seconds since a step advanced, 0 while idle",
            llm.driver.seconds_without_progress(),
        )
        for field, ours, theirs, text in HISTOGRAMS:
            histogram = getattr(recorder, field)
            for name, labels in _names(ours, theirs, model):
                family = HistogramMetricFamily(name, text, labels=list(labels))
                family.add_metric(list(labels.values()), histogram.cumulative(), histogram.sum)
                yield family
        for field, ours, theirs, text in COUNTERS:
            for name, labels in _names(ours, theirs, model):
                yield _counter(name, text, getattr(stats, field), **labels)
        for field, ours, theirs, text in GAUGES:
            for name, labels in _names(ours, theirs, model):
                yield _gauge(name, text, getattr(stats, field), **labels)
        yield _by_label(CounterMetricFamily, "jaxflow_steps", "Steps by plan", "plan", stats.steps_by_plan)
        found = llm.driver.expert_tokens()
        if found is not None:
            text = "Tokens at a layer's busiest expert over the mean of its experts, since the start"
            layers = dict(zip(map(str, found.layers), found.imbalance(), strict=True))
            yield _by_label(GaugeMetricFamily, "jaxflow_expert_imbalance", text, "layer", layers)
        yield from self._outcomes(model)
        yield from self._pages(stats, model)
        looked_up = stats.prompt_tokens + stats.cached_prompt_tokens
        yield _counter("vllm:prefix_cache_queries", "Prompt tokens looked up", looked_up, model_name=model)
        if self._legacy:
            yield from self._removed(stats, model)

    def _outcomes(self, model: str) -> Iterator[Metric]:
        recorder = self._recorder
        text = "Sequences that ended, by outcome"
        yield _by_label(CounterMetricFamily, "jaxflow_requests", text, "outcome", recorder.sequences)
        family = CounterMetricFamily("vllm:request_success", text, labels=["model_name", "finished_reason"])
        for reason, count in recorder.sequences.items():
            family.add_metric([model, reason], count)
        yield family
        text = "Requests that were not taken, by reason"
        yield _by_label(CounterMetricFamily, "jaxflow_refusals", text, "reason", recorder.refusals)
        text = "Streams that ended because their clients read too slowly"
        yield _counter("jaxflow_streams_dropped", text, recorder.dropped_streams)
        text = "Seconds that the host waited for steps"
        yield _counter("jaxflow_device_wait_seconds", text, recorder.device_wait_s)
        text = "Seconds of steps that the host spent on other work than waiting"
        yield _counter("jaxflow_host_seconds", text, recorder.host_s)

    def _pages(self, stats: Any, model: str) -> Iterator[Metric]:
        used = stats.kv_pages - stats.kv_pages_free
        family = GaugeMetricFamily("jaxflow_kv_pages", "Pages of the device's KV cache", labels=["state"])
        family.add_metric(["used"], used)
        family.add_metric(["free"], stats.kv_pages_free)
        yield family
        usage, text = used / max(1, stats.kv_pages), "Used share of the device's KV pages, 0 to 1"
        yield _gauge("vllm:kv_cache_usage_perc", text, usage, model_name=model)
        if stats.kv_tiers:
            text = "Counts and contents of the host and disk tiers of the KV cache"
            yield _by_label(GaugeMetricFamily, "jaxflow_kv_tiers", text, "counter", stats.kv_tiers)

    def _removed(self, stats: Any, model: str) -> Iterator[Metric]:
        usage = 1 - stats.kv_pages_free / max(1, stats.kv_pages)
        text = "The former name of vllm:kv_cache_usage_perc"
        yield _gauge("vllm:gpu_cache_usage_perc", text, usage, model_name=model)
        text = "The former name of vllm:inter_token_latency_seconds"
        family = HistogramMetricFamily("vllm:time_per_output_token_seconds", text, labels=["model_name"])
        histogram = self._recorder.inter_token_s
        family.add_metric([model], histogram.cumulative(), histogram.sum)
        yield family


def _replicas(fleet: Fleet) -> Iterator[Metric]:
    replicas = fleet.replicas()
    states = collections.Counter(replica.state for replica in replicas)
    yield _by_label(GaugeMetricFamily, "jaxflow_replicas", "Replicas by state", "state", states)
    for name, text, kind, field in (
        ("jaxflow_replica_requests", "Requests at a replica", GaugeMetricFamily, "requests"),
        ("jaxflow_replica_tokens", "Tokens to compute", GaugeMetricFamily, "outstanding_tokens"),
        (
            "jaxflow_replica_open_loans",
            "Lent and not acknowledged KV pages, by prompt",
            GaugeMetricFamily,
            "open_loans",
        ),
        ("jaxflow_replica_losses", "Processes that were lost", CounterMetricFamily, "restarts"),
    ):
        values = {str(replica.index): getattr(replica, field) for replica in replicas}
        yield _by_label(kind, name, text, "replica", values)
    yield _counter("jaxflow_requests_moved", "Requests that changed their replica", fleet.moved)
    text = "Requests that ended with their replica"
    yield _counter("jaxflow_requests_interrupted", text, fleet.interrupted)
    moved, results = fleet.transfers, ("done", "failed")
    text, values = "Prompts whose KV pages went to another replica", {r: getattr(moved, r) for r in results}
    yield _by_label(CounterMetricFamily, "jaxflow_kv_transfers", text, "result", values)
    yield _counter("jaxflow_kv_transfer_bytes", "Bytes of the KV pages that arrived", moved.bytes)


def make_registry(collector: EngineCollector) -> CollectorRegistry:
    """Return a registry of this server alone."""
    registry = CollectorRegistry(auto_describe=False)
    registry.register(collector)
    return registry


def exposition(registry: CollectorRegistry) -> bytes:
    """Return the metrics in Prometheus' text format."""
    return generate_latest(registry)


def _names(ours: str, theirs: str | None, model: str) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield each name of a metric with its labels."""
    yield f"jaxflow_{ours}", {}
    if theirs is not None:
        yield f"vllm:{theirs}", {"model_name": model}


def _gauge(name: str, text: str, value: float, **labels: str) -> Metric:
    family = GaugeMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _counter(name: str, text: str, value: float, **labels: str) -> Metric:
    family = CounterMetricFamily(name, text, labels=list(labels))
    family.add_metric(list(labels.values()), value)
    return family


def _by_label(kind: Any, name: str, text: str, label: str, values: Any) -> Metric:
    family = kind(name, text, labels=[label])
    for key, value in values.items():
        family.add_metric([key], value)
    return family
