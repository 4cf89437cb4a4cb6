"""Functions of other threads on the event loop."""

from __future__ import annotations

import asyncio
import functools
import threading

import pytest

from cpmcu.serving.waker import Waker


def test_one_wake_up_calls_all_functions_in_order():
    async def run() -> tuple[list[int], int]:
        loop, found, wakes = asyncio.get_running_loop(), [], 0
        waker, last = Waker(loop), asyncio.Event()
        own = waker._run

        def counted() -> None:
            nonlocal wakes
            wakes += 1
            own()

        waker._run = counted

        def add() -> None:
            for i in range(100):
                waker.add(functools.partial(found.append, i))
            waker.add(last.set)

        thread = threading.Thread(target=add)
        thread.start()
        thread.join()  # the loop does not run meanwhile
        await last.wait()
        return found, wakes

    assert asyncio.run(run()) == (list(range(100)), 1)


def test_a_function_that_fails_does_not_stop_the_others(caplog):
    async def run() -> None:
        waker, last = Waker(asyncio.get_running_loop()), asyncio.Event()
        waker.add(lambda: 1 // 0)
        waker.add(last.set)
        await asyncio.wait_for(last.wait(), 60)

    asyncio.run(run())
    assert "could not be passed on" in caplog.text


def test_a_closed_loop_is_an_error_each_time():
    loop = asyncio.new_event_loop()
    waker = Waker(loop)
    loop.close()
    for _ in range(2):
        with pytest.raises(RuntimeError, match="closed"):
            waker.add(lambda: None)
