"""A served fake model, without a server."""

import dataclasses
import threading
import time

from fake_llm import FakeLLM

from jaxflow.request import Finished, SamplingParams


@dataclasses.dataclass
class State:
    llm: FakeLLM
    loaded: bool = True
    draining: bool = False


class Box:
    def __init__(self):
        self.ended = threading.Event()

    def post(self, events):
        if any(isinstance(event, Finished) for event in events):
            self.ended.set()


def submit(llm: FakeLLM) -> Box:
    box = Box()
    llm.driver.submit(llm.request([5, 6], SamplingParams(max_tokens=2), request_id="one"), box)
    return box


def wait_for(condition) -> None:
    deadline = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)
