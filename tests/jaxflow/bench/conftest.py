"""Fixtures of the tests of commands."""

import contextlib

import pytest
from small_engine import ENGINE, MODEL

from jaxflow.bench.__main__ import main
from jaxflow.llm import LLM


@pytest.fixture(scope="module")
def llm():
    with LLM(MODEL, progress=False, **ENGINE) as llm:
        yield llm


@pytest.fixture
def bench(llm, no_flags, monkeypatch):
    """The command line over the shared engine, in this process."""
    monkeypatch.setattr(LLM, "from_config", classmethod(lambda cls, config, **_: contextlib.nullcontext(llm)))
    return lambda *arguments: main(["bench", *arguments])
