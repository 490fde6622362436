"""The rule that sends a prompt to a prefill replica, and the record of transfers."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from jaxflow.config import ConfigError, EngineConfig
from serving.cluster.apart import FAILURE_PAUSE_S, Load, Prompt, TransferRecord, saves_time
from serving.cluster.wanted import WantedReplicas

tokens = st.integers(0, 10_000)
loads = st.builds(Load, tokens, tokens, st.integers(0, 500))
times = st.floats(0, 1e-2)


@given(tokens, st.integers(1, 15), loads, times, times)
def test_the_rule_is_monotonic(full, rest, load, token_s, moved_s):
    """More work for the replica that answers speaks for a prefill apart, and more
    for the other speaks against it.
    """
    prompt = Prompt(full + rest, full, full, rest)
    chosen = saves_time(prompt, load, token_s, moved_s)
    busier = Load(load.queued_here + 100, load.queued_apart, load.decoding + 3)
    assert saves_time(prompt, busier, token_s, moved_s) >= chosen
    assert (
        saves_time(prompt, Load(load.queued_here, load.queued_apart + 100, load.decoding), token_s, moved_s)
        <= chosen
    )
    assert saves_time(prompt, load, token_s, moved_s + 1e-3) <= chosen


def test_the_rule_weighs_the_decodes_against_the_transfer():
    prompt = Prompt(together=1000, apart=990, moved=990, rest=10)
    idle, busy = Load(0, 0, 0), Load(0, 0, 100)
    assert not saves_time(prompt, idle, 1e-4, 1e-5)  # the same work, and a transfer
    assert saves_time(prompt, busy, 1e-4, 1e-5)  # a hundred answers would wait
    assert not saves_time(prompt, busy, 1e-4, 1.0)
    assert saves_time(prompt, Load(5000, 0, 0), 1e-4, 1e-5)  # the queue is shorter there


def test_transfers_have_a_recent_rate_and_a_pause():
    transfers = TransferRecord()
    assert transfers.token_s == 0 and not transfers.paused(0.0)
    for _ in range(200):
        transfers.note(100, 1000, 0.5)
    assert transfers.token_s == pytest.approx(0.005) and transfers.bytes == 200_000
    for _ in range(200):
        transfers.note(100, 1000, 1.0)
    assert transfers.token_s == pytest.approx(0.01)
    transfers.note_failure(10.0)
    assert transfers.paused(10.0 + FAILURE_PAUSE_S / 2) and not transfers.paused(10.0 + FAILURE_PAUSE_S)


def test_prefill_replicas_need_a_host_tier():
    with pytest.raises(ConfigError, match="prefill_replicas"):
        WantedReplicas(1, EngineConfig(model="m"), prefill_replicas=1)
    with pytest.raises(ConfigError, match="prefill_replicas"):
        WantedReplicas(1, EngineConfig(model="m"), prefill_replicas=-1)
