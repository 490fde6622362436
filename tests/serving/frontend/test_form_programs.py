"""The programs that draw the tokens of a form, as a served model compiles them."""

import asyncio
import types

import pytest

from serving.frontend.served_model import ServedModel


def test_a_failed_compilation_is_tried_again_by_the_next_request():
    faults = [MemoryError("no memory for the compiler")]

    def prepare_masks():
        if faults:
            raise faults.pop()

    driver = types.SimpleNamespace(prepare_masks=prepare_masks)
    model = types.SimpleNamespace(_masks=None, llm=types.SimpleNamespace(driver=driver))

    async def ask():
        with pytest.raises(MemoryError):
            await ServedModel._prepare_masks(model, None)  # type: ignore[arg-type]
        await ServedModel._prepare_masks(model, None)  # type: ignore[arg-type]

    asyncio.run(ask())
    assert model._masks.exception() is None
