"""The way from the engine's thread: one wake-up a step, in order, and a queue that is never longer than it
may be.
"""

import asyncio
import threading

from jaxflow.request import Delta, Finished, FinishReason, Started, Timings, Usage
from serving.frontend.event_queue import EventQueue, EventRouter


def delta(request_id: str, *tokens: int) -> Delta:
    return Delta(request_id, 0, tokens)


def test_a_step_wakes_the_event_loop_once():
    async def scenario():
        loop = asyncio.get_running_loop()
        wakeups = 0

        class Counting:
            def call_soon_threadsafe(self, *work):
                nonlocal wakeups
                wakeups += 1
                loop.call_soon_threadsafe(*work)

        board = EventRouter(Counting())
        streams = {name: EventQueue(100, lambda: None) for name in "abc"}
        for name, stream in streams.items():
            board.connect(name, stream)
        steps = [[delta(name, step) for name in "abc"] for step in range(5)]
        engine = threading.Thread(target=lambda: [board.post(events) for events in steps])
        engine.start()
        engine.join()
        for name, stream in streams.items():
            assert await stream.take() == [delta(name, step) for step in range(5)]
        assert wakeups == 5

    asyncio.run(scenario())


def test_a_disconnected_queue_gets_no_events():
    async def scenario():
        board = EventRouter(asyncio.get_running_loop())
        gone, there = EventQueue(100, lambda: None), EventQueue(100, lambda: None)
        board.connect("gone", gone)
        board.connect("there", there)
        board.disconnect("gone")
        board.disconnect("never connected")
        board.post([delta("gone", 1), delta("unknown", 2), delta("there", 3)])
        assert await there.take() == [delta("there", 3)]
        assert gone._events == []

    asyncio.run(scenario())


def test_take_waits_for_the_first_event():
    async def scenario():
        stream = EventQueue(100, lambda: None)
        taking = asyncio.create_task(stream.take())
        await asyncio.sleep(0)
        assert not taking.done()
        stream.put([delta("a", 1)])
        stream.put([delta("a", 2)])
        assert await taking == [delta("a", 1), delta("a", 2)]

    asyncio.run(scenario())


def test_too_many_tokens_overflow_once_and_hold_no_memory():
    async def scenario():
        overflows = []
        stream = EventQueue(3, lambda: overflows.append(1))
        stream.put([Started("a", 1, 0, 0), delta("a", 1, 2, 3)])
        assert not stream.overflowed
        await stream.take()  # taken events no longer count
        stream.put([delta("a", 1, 2, 3)])
        assert not overflows
        stream.put([delta("a", 4)])
        stream.put([delta("a", 5)])
        assert (stream.overflowed, overflows, stream._events) == (True, [1], [])

    asyncio.run(scenario())


def test_posting_after_the_loop_has_ended_is_harmless():
    loop = asyncio.new_event_loop()
    board = EventRouter(loop)
    loop.close()
    board.post([delta("a", 1)])


def finished() -> Finished:
    return Finished("a", 0, FinishReason.LENGTH, Usage(1, 0, 4), Timings(0.0, 0.0, 0.0, 0))


def test_a_queue_of_a_whole_answer_wakes_its_reader_once():
    async def scenario():
        queue = EventQueue(100, lambda: None, whole=True)
        taking = asyncio.create_task(queue.take())
        events = [Started("a", 1, 0, 0), *(delta("a", token) for token in range(4)), finished()]
        for event in events:
            queue.put([event])
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            assert taking.done() == (event is events[-1])
        assert taking.result() == events

    asyncio.run(scenario())


def test_a_queue_of_a_long_whole_answer_never_overflows_while_its_reader_reads():
    async def scenario():
        overflows = []
        queue = EventQueue(8, lambda: overflows.append(1), whole=True)
        steps, found = [[delta("a", token)] for token in range(50)], []
        steps.append([finished()])

        async def read() -> None:
            while not (found and isinstance(found[-1], Finished)):
                found.extend(await queue.take())

        reading = asyncio.create_task(read())
        for step in steps:
            queue.put(step)
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        await reading
        assert found == [event for step in steps for event in step] and not overflows

    asyncio.run(scenario())
