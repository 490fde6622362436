"""The status page: its numbers, and the page in a real browser."""

import asyncio
import collections
import json
import os
import re
import shutil
import urllib.request
from pathlib import Path

import numpy as np
import pytest
from fake_llm import FakeLLM
from hypothesis import given
from hypothesis import strategies as st
from served_state import State, http_server, submit

import serving.operations
from jaxflow.engine.expert_load import ExpertTokens
from jaxflow.engine.step_log import StepRecord
from jaxflow.request import SamplingParams
from serving.operations import Operations
from serving.operations.status import WINDOW_S, RecentExperts, percentiles, recent

PAGE = Path(serving.operations.__file__).parent / "status.html"


class Ignored:
    def post(self, events): ...


def test_status_of_each_state():
    state = State(FakeLLM(), loaded=False)
    status = Operations(state).status
    assert status.now()["state"] == "loading" and "model" not in status.now()
    state.loaded = True
    box = submit(state.llm)
    assert box.ended.wait(10)
    now = status.now()
    assert (now["state"], now["model"], now["running"]) == ("ready", "fake", 0)
    assert now["generated_per_s"] > 0 and now["latencies_ms"]["first token"] is not None
    assert now["kv"] == [{"tier": "device", "used": 0, "total": 1000}]
    state.draining = True
    assert status.now()["state"] == "draining"
    state.llm.driver.die(MemoryError("a secret"))
    now = status.now()
    assert (now["state"], now["faults"][0]["kind"]) == ("failed", "engine stopped: MemoryError")
    assert "secret" not in json.dumps(now)


def test_experts_of_a_mixture():
    """The status holds the last seconds, the metric and /experts the time since the start."""
    state = State(FakeLLM())
    operations = Operations(state)
    assert operations.status.now()["experts"] is None and operations.experts() is None
    assert b"jaxflow_expert_imbalance" not in operations.metrics()
    state.llm.driver.experts = ExpertTokens([1, 2], np.array([[3, 1, 0, 0], [1, 1, 1, 1]]))
    assert operations.status.now()["experts"] == {"layers": [1, 2], "load": [[3, 1, 0, 0], [1, 1, 1, 1]]}
    assert b'jaxflow_expert_imbalance{layer="1"} 3.0' in operations.metrics()
    state.llm.driver.experts = ExpertTokens([1, 2], np.array([[3, 1, 0, 12], [5, 1, 5, 5]]))
    assert operations.status.now()["experts"]["load"] == [[0, 0, 0, 4], [1.33, 0, 1.33, 1.33]]
    with (
        http_server(operations) as port,
        urllib.request.urlopen(f"http://127.0.0.1:{port}/experts") as answer,
    ):
        assert json.load(answer) == {"layers": [1, 2], "tokens": [[3, 1, 0, 12], [5, 1, 5, 5]]}
    state.llm.close()


def test_shares_of_experts_forget_what_is_older_than_the_window():
    recent_experts, total = RecentExperts(), np.zeros((1, 2), np.int64)
    for second in range(40):  # expert 0 has all tokens, then expert 1
        total = total + np.array([[1, 0]] if second < 20 else [[0, 1]])
        load = recent_experts.now(ExpertTokens([0], total), float(second))["load"]
        assert second < 1 or sum(load[0]) == pytest.approx(2, abs=0.02)
        assert load == [[2, 0]] if second < 20 else load[0][1] > 0
        assert second < 20 + WINDOW_S or load == [[0, 2]]


@given(st.integers(1, 40), st.floats(0.001, 5.0))
def test_rates_of_steps_at_even_times(steps, interval_s):
    """The rate is right whether the deque or the window ends first."""
    kept = collections.deque(maxlen=20)
    for number in range(steps):
        kept.append(StepRecord("p", 1, 1, 0, 1, 1, 0.0, 0.0, number * interval_s))
    now_s = (steps - 1) * interval_s
    found, window_s = recent(kept, now_s)
    full = len(kept) == 20 and 19 * interval_s < WINDOW_S
    assert window_s == pytest.approx(19 * interval_s if full else WINDOW_S)
    assert len(found) <= window_s / interval_s + 1
    assert len(found) >= min(steps, int(window_s / interval_s) - 1)


def test_the_page_loads_nothing_else():
    page = PAGE.read_text("utf-8")
    assert re.findall(r"(?:src|href)=\"([^\"]*)\"", page) == ["data:,", "#main"]
    assert not re.findall(r"https?://|@import|url\(|innerHTML", page)


@given(st.lists(st.floats(0, 1e3), max_size=50))
def test_percentiles_lie_within_the_values(seconds):
    found = percentiles(seconds)
    assert (found is None) == (not seconds)
    if found is not None:
        low, high = 1e3 * min(seconds), 1e3 * max(seconds)
        assert low * (1 - 1e-9) <= found[0] <= found[1] * (1 + 1e-9) <= high * (1 + 1e-8)


@pytest.mark.slow  # 20 s: a browser starts
@pytest.mark.skipif(shutil.which("chromium") is None, reason="Debian's chromium is not installed")
def test_the_page_in_chromium(tmp_path):
    playwright = pytest.importorskip("playwright.sync_api", reason="the group `clients` is not installed")
    pictures = Path(os.environ.get("JAXFLOW_SCREENSHOTS", tmp_path))
    state = State(FakeLLM())
    state.llm.driver.experts = ExpertTokens([0, 1], np.array([[9, 1, 0, 0], [1, 1, 1, 1]]))
    operations = Operations(state)
    for number in range(4):
        request = state.llm.request([5, 6], SamplingParams(max_tokens=4000), request_id=str(number))
        state.llm.driver.submit(request, Ignored())
    with http_server(operations) as port, playwright.sync_playwright() as tool:
        browser = tool.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        problems: list[str] = []
        page = browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme="light")
        page.on("console", lambda message: problems.append(message.text) if message.type == "error" else None)
        page.on("pageerror", lambda error: problems.append(str(error)))
        page.goto(f"http://127.0.0.1:{port}/status")
        header = page.locator("#header[data-state=ready]")
        header.wait_for(timeout=30_000)
        page.wait_for_function("document.getElementById('generated').textContent !== '–'")
        assert page.locator("#running").text_content() == "4"
        pixels = "[...experts.getContext('2d').getImageData(0, 0, 4, 2).data]"
        red, _, blue, _, *others = page.evaluate(pixels)
        assert red > 2 * blue and others[4:8] == [255] * 4  # the busiest expert, and one without tokens
        page.keyboard.press("Tab")  # the link to the numbers
        page.keyboard.press("Tab")
        assert page.evaluate("document.activeElement.id") == "pause"
        page.keyboard.press("Enter")
        assert page.locator("#pause").get_attribute("aria-pressed") == "true"
        page.keyboard.press("Enter")
        page.wait_for_timeout(2500)
        page.screenshot(path=pictures / "status-light.png")
        for scheme in ("light", "dark"):
            page.emulate_media(color_scheme=scheme)
            assert contrasts(page) == []
        page.screenshot(path=pictures / "status-dark.png")
        state.llm.driver.die(MemoryError("device"))
        page.locator("#header[data-state=failed]").wait_for(timeout=30_000)
        red, green, blue = map(
            int, re.findall(r"\d+", page.evaluate("getComputedStyle(header).backgroundColor"))[:3]
        )
        assert red > 2 * max(green, blue)
        assert "engine stopped: MemoryError" in page.locator("#faults").text_content()
        page.screenshot(path=pictures / "status-dead.png")
        page.set_viewport_size({"width": 360, "height": 700})
        assert page.evaluate("document.documentElement.scrollWidth") <= 360
        browser.close()
        assert problems == []


# Text whose contrast with its background is below 4.5, the limit of WCAG AA.
CONTRASTS = """() => {
  const parts = color => color.match(/[\\d.]+/g).map(Number);
  const light = color => parts(color).slice(0, 3).map(v => v / 255)
    .map(v => v <= 0.04045 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4)
    .reduce((sum, v, i) => sum + v * [0.2126, 0.7152, 0.0722][i], 0);
  const ground = node => {
    for (; node; node = node.parentElement) {
      const color = getComputedStyle(node).backgroundColor;
      if ((parts(color)[3] ?? 1) > 0) return color;
    }
    return "rgb(255, 255, 255)";
  };
  return [...document.querySelectorAll("body *")]
    .filter(node => node.tagName !== "SCRIPT")
    .filter(node => [...node.childNodes].some(c => c.nodeType === 3 && c.textContent.trim()))
    .map(node => {
      const [a, b] = [light(getComputedStyle(node).color), light(ground(node))].sort((x, y) => y - x);
      return [node.textContent.trim().slice(0, 30), (a + 0.05) / (b + 0.05)];
    })
    .filter(([, ratio]) => ratio < 4.5);
}"""


def contrasts(page) -> list:
    return page.evaluate(CONTRASTS)


def test_events_stream_over_http():
    async def first_event(port: int) -> bytes:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"GET /status/events HTTP/1.1\r\nHost: a\r\n\r\n")
        found = await reader.readuntil(b"}\n\n")
        writer.close()
        return found

    state = State(FakeLLM())
    with http_server(Operations(state)) as port:
        event = asyncio.run(first_event(port))
    state.llm.close()
    assert b"content-type: text/event-stream" in event and b'"state":"ready"' in event
