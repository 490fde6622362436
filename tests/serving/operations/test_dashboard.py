"""The Grafana dashboard: each query finds a series of a running server."""

import contextlib
import json
import re
import shutil
import socket
import subprocess
import threading
import time

import httpx
import paths
import pytest
from fake_llm import FakeLLM
from prometheus_client.parser import text_string_to_metric_families
from served_state import State, http_server, submit

from serving.operations import Operations

PANELS = json.loads((paths.ROOT / "deploy" / "grafana" / "jaxflow.json").read_text("utf-8"))["panels"]
QUERIES = [target["expr"] for panel in PANELS for target in panel["targets"]]


def test_each_query_names_exposed_metrics():
    state = State(FakeLLM())
    text = Operations(state).metrics().decode()
    state.llm.close()
    exposed = set(re.findall(r"^(jaxflow_\w+)", text, re.MULTILINE)) | {
        family.name for family in text_string_to_metric_families(text)
    }
    named = {name for query in QUERIES for name in re.findall(r"jaxflow_\w+", query)}
    assert named and named <= exposed
    assert len({panel["id"] for panel in PANELS}) == len(PANELS)


@pytest.mark.slow  # 30 s: Prometheus starts and scrapes several times
@pytest.mark.skipif(shutil.which("prometheus") is None, reason="Prometheus is not installed")
def test_each_query_returns_a_series(tmp_path):
    state = State(FakeLLM())
    stop = threading.Event()

    def load() -> None:
        while not stop.is_set():
            submit(state.llm).ended.wait(10)
            time.sleep(0.05)

    thread = threading.Thread(target=load, daemon=True)
    thread.start()
    with http_server(Operations(state)) as port, prometheus(tmp_path, port) as query:
        missing = list(QUERIES)
        deadline = time.monotonic() + 120
        while missing and time.monotonic() < deadline:
            time.sleep(1)
            missing = [expression for expression in missing if not query(expression)]
        lines = query('jaxflow_step_seconds_count{job="jaxflow"}')
    stop.set()
    thread.join(10)
    state.llm.close()
    assert missing == []
    assert float(lines[0]["value"][1]) > 0


@contextlib.contextmanager
def prometheus(folder, port: int):
    """A Prometheus that scrapes `port` each second. Yields a function from a query to its series."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        own = probe.getsockname()[1]
    scrape = {"job_name": "jaxflow", "scrape_interval": "1s"}
    scrape["static_configs"] = [{"targets": [f"127.0.0.1:{port}"]}]
    config = folder / "prometheus.json"  # YAML includes JSON
    config.write_text(json.dumps({"scrape_configs": [scrape]}))
    command = ["prometheus", f"--config.file={config}", f"--storage.tsdb.path={folder / 'data'}"]
    with open(folder / "prometheus.log", "wb") as log:
        process = subprocess.Popen(
            [*command, f"--web.listen-address=127.0.0.1:{own}"], stdout=log, stderr=subprocess.STDOUT
        )

    def query(expression: str) -> list:
        values = {"$job": "jaxflow", "$__rate_interval": "10s"}
        for name, value in values.items():
            expression = expression.replace(name, value)
        try:
            answer = httpx.get(f"http://127.0.0.1:{own}/api/v1/query", params={"query": expression})
        except httpx.TransportError:
            return []  # Prometheus is starting
        assert answer.status_code in (200, 503), answer.text
        return answer.json()["data"]["result"] if answer.status_code == 200 else []

    try:
        yield query
    finally:
        process.terminate()
        process.wait(30)
