"""The way from the engine's thread: one wake-up a step, in order, and a queue that is never longer than it
may be.
"""

import asyncio
import random
import threading

import pytest

from jaxflow.request import Delta, Event, Finished, FinishReason, Started, Timings, Usage
from serving.frontend import event_queue
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

            call_soon = loop.call_soon

        board = EventRouter(Counting())  # type: ignore[arg-type]
        streams = {name: EventQueue(100, lambda: None) for name in "abc"}
        for name, stream in streams.items():
            board.connect(name, stream)
        steps: list[list[Event]] = [[delta(name, step) for name in "abc"] for step in range(5)]
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
        steps: list[list[Event]] = [[delta("a", token)] for token in range(50)]
        found: list[Event] = []
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


# ---- events that a reader does not need to wake for


def test_a_waiting_reader_sleeps_while_the_direct_way_takes_the_events():
    async def scenario():
        queue, taken, free = EventQueue(100, lambda: None), [], True

        def direct(events: list) -> bool:
            if free:
                taken.extend(events)
            return free

        queue.direct = direct
        queue.put([delta("a", 0)])  # no reader waits, so the events keep their order in the queue
        assert await queue.take() == [delta("a", 0)] and not taken
        taking = asyncio.create_task(queue.take())
        await asyncio.sleep(0)
        assert not queue.put([delta("a", 1)])
        await asyncio.sleep(0)
        assert taken == [delta("a", 1)] and not taking.done()
        free = False
        assert queue.put([delta("a", 2)])
        free = True
        queue.put([delta("a", 3)])  # not before the unread ones
        assert await taking == [delta("a", 2), delta("a", 3)] and taken == [delta("a", 1)]

    asyncio.run(scenario())


def test_an_error_of_the_direct_way_reaches_only_its_own_reader():
    async def scenario():
        board = EventRouter(asyncio.get_running_loop())
        bad, good = EventQueue(100, lambda: None), EventQueue(100, lambda: None)

        def fail(events: list) -> bool:
            raise ValueError("a token without a text")

        bad.direct = fail
        board.connect("bad", bad)
        board.connect("good", good)
        reading = asyncio.create_task(bad.take())
        await asyncio.sleep(0)
        board.post([delta("bad", 1), delta("good", 2)])
        assert await good.take() == [delta("good", 2)]
        with pytest.raises(ValueError, match="a token without a text"):
            await reading

    asyncio.run(scenario())


def test_a_queue_that_fails_takes_no_events_from_the_others():
    async def scenario():
        board = EventRouter(asyncio.get_running_loop())

        def overflow() -> None:
            raise RuntimeError("the time limit has passed")

        board.connect("bad", EventQueue(0, overflow))
        board.connect("good", good := EventQueue(100, lambda: None))
        for token in range(3):
            board.post([delta("bad", token), delta("good", token)])
            assert await good.take() == [delta("good", token)]

    asyncio.run(scenario())


# ---- the slices of a step


@pytest.mark.parametrize("wakes", [1, 3, 1000])
@pytest.mark.parametrize("slice_s", [0.0, 10.0])
def test_slices_deliver_every_event_once_and_in_order(monkeypatch, wakes, slice_s):
    monkeypatch.setattr(event_queue, "SLICE_WAKES", wakes)
    monkeypatch.setattr(event_queue, "SLICE_S", slice_s)
    draw = random.Random(wakes)

    async def scenario():
        board = EventRouter(asyncio.get_running_loop())
        names = [f"r{i}" for i in range(20)]
        queues = {name: EventQueue(10_000, lambda: None) for name in names}
        sent: dict[str, list] = {name: [] for name in names}
        got: dict[str, list] = {name: [] for name in names}

        async def read(name: str) -> None:
            while not (got[name] and isinstance(got[name][-1], Finished)):
                got[name] += await queues[name].take()

        def direct_to(found: list):
            def direct(events: list) -> bool:
                if type(events[-1]) is not Delta:
                    return False
                found.extend(events)
                return True

            return direct

        for name, queue in queues.items():
            board.connect(name, queue)
            if draw.random() < 0.5:
                queue.direct = direct_to(got[name])
        reading = [asyncio.create_task(read(name)) for name in names]
        left = dict.fromkeys(names, 12)
        while left:
            step = []
            for name in draw.sample(list(left), draw.randint(1, len(left))):
                if not sent[name]:
                    step.append(Started(name, 1, 0, 0))
                step.append(delta(name, left[name]))
                left[name] -= 1
                if not left[name]:
                    del left[name]
                    step.append(Finished(name, 0, FinishReason.LENGTH, Usage(1, 0, 4), Timings(0, 0, 0, 0)))
            for event in step:
                sent[event.request_id].append(event)
            board.post(step)
            if draw.random() < 0.3:
                await asyncio.sleep(0)
        await asyncio.gather(*reading)
        assert got == sent

    asyncio.run(scenario())


def test_first_tokens_and_new_work_come_before_the_rest_of_a_step(monkeypatch):
    monkeypatch.setattr(event_queue, "SLICE_WAKES", 1)

    async def scenario():
        loop = asyncio.get_running_loop()
        board, order = EventRouter(loop), []

        async def read(name: str, queue: EventQueue) -> None:
            await queue.take()
            order.append(name)

        tasks = []
        for name in ("a", "b", "c", "d", "new"):
            queue = EventQueue(100, lambda: None)
            board.connect(name, queue)
            tasks.append(asyncio.create_task(read(name, queue)))
        await asyncio.sleep(0)
        board.post([*(delta(name, 1) for name in "abcd"), Started("new", 1, 0, 0), delta("new", 1)])
        await asyncio.sleep(0)
        loop.call_soon(order.append, "other work")
        await asyncio.gather(*tasks)
        assert order[0] == "new" and order.index("other work") < order.index("d")
        assert [name for name in order if name in "abcd"] == list("abcd")

    asyncio.run(scenario())
