"""Health against a fake engine that hangs, recovers, dies and drains."""

import time

import pytest
from fake_llm import FAULT_TOKEN, FakeLLM
from served_state import State, submit, wait_for

from serving.operations.health import MIN_STALL_S, Health, make_first_token

STALL_S = 0.05


@pytest.fixture
def state():
    state = State(FakeLLM())
    yield state
    state.llm.close()


def healthy(health: Health) -> tuple[bool, bool, bool]:
    return health.startup().ok, health.live().ok, health.ready().ok


def test_a_hang_is_not_live_and_recovers(state):
    health = Health(state, lambda: 0.0, STALL_S)
    state.llm.driver.gate.clear()
    time.sleep(2 * STALL_S)
    assert healthy(health) == (True, True, True)  # idle
    box = submit(state.llm)
    wait_for(lambda: not health.live().ok)
    assert healthy(health) == (True, False, False)
    assert health.stalled_for_s > STALL_S and "--stall_s" in health.live().reason
    state.llm.driver.gate.set()
    assert box.ended.wait(10)
    wait_for(lambda: health.live().ok)
    assert healthy(health) == (True, True, True)


def test_a_dead_engine_is_not_live(state):
    health = Health(state, lambda: 0.0, STALL_S)
    state.llm.driver.die(MemoryError("device"))
    assert healthy(health) == (True, False, False)


def test_draining_is_live_and_not_ready(state):
    state.draining = True
    assert healthy(Health(state, lambda: 0.0)) == (True, True, False)


def test_loading_is_live_and_not_started(state):
    state.loaded = False
    assert healthy(Health(state, lambda: 0.0)) == (False, True, False)


def test_default_stall_follows_the_longest_step(state):
    assert Health(state, lambda: 0.0).stall_s == MIN_STALL_S
    assert Health(state, lambda: 3.0).stall_s == 60.0


def test_first_token_is_made_or_refused():
    llm = FakeLLM()
    make_first_token(llm)
    llm.driver.gate.clear()
    with pytest.raises(RuntimeError, match="no token"):
        make_first_token(llm, timeout_s=0.05)
    llm.close()
    llm = FakeLLM(fault_token=0)
    assert FAULT_TOKEN != 0
    with pytest.raises(RuntimeError) as failed:
        make_first_token(llm)
    assert isinstance(failed.value.__cause__, ZeroDivisionError)
    llm.close()
