"""Daemon threads for blocking functions.

``asyncio.to_thread`` is not suitable: hanging tools could occupy all of its few threads, and a
closing event loop waits for these threads. This module's threads are daemons, unlimited in number,
and reused.
"""

import asyncio
import threading
from collections.abc import Callable
from contextlib import suppress
from contextvars import copy_context
from queue import SimpleQueue
from typing import TypeVar

T = TypeVar("T")

Job = Callable[[], None]

_idle: list["SimpleQueue[Job]"] = []  # inboxes of idle threads


async def run_in_thread(function: Callable[[], T]) -> T:
    """Call ``function`` in a thread, with the caller's context variables.

    After a cancellation this coroutine returns at once; ``function`` still runs to its end, and its
    result is dropped.
    """
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()
    context = copy_context()

    def job() -> None:
        try:
            result = context.run(function)
        except Exception as error:
            _notify(loop, _fail, future, error)
        except BaseException as error:  # SystemExit must not stop the event loop
            _notify(loop, _fail, future, RuntimeError(f"{type(error).__name__}: {error}"))
        else:
            _notify(loop, _succeed, future, result)

    _hand_over(job)
    return await future


def _hand_over(job: Job) -> None:
    try:
        inbox = _idle.pop()
    except IndexError:
        inbox = SimpleQueue()
        threading.Thread(target=_work, args=(inbox,), name="bottega-tool", daemon=True).start()
    inbox.put(job)


def _work(inbox: "SimpleQueue[Job]") -> None:
    while True:
        job = inbox.get()
        job()
        del job  # release the call's arguments and result
        if len(_idle) >= 32:
            return
        _idle.append(inbox)


def _notify(
    loop: asyncio.AbstractEventLoop, say: Callable[..., None], future: object, value: object
) -> None:
    with suppress(RuntimeError):  # the event loop is closed
        loop.call_soon_threadsafe(say, future, value)


def _succeed(future: "asyncio.Future[T]", result: T) -> None:
    if not future.done():
        future.set_result(result)


def _fail(future: "asyncio.Future[T]", error: Exception) -> None:
    if not future.done():
        if isinstance(error, StopIteration):  # a future does not accept StopIteration
            error = RuntimeError(f"StopIteration: {error}")
        future.set_exception(error)
