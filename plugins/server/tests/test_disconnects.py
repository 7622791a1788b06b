"""Work that ends when the client of its request leaves: `unless_disconnected`."""

from __future__ import annotations

import asyncio

import pytest
from starlette.requests import ClientDisconnect
from toolkit_lm_server.route import unless_disconnected

pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


class Client:
    """A client that stays until `leave`."""

    def __init__(self, error: Exception | None = None) -> None:
        """`error`: raised in place of telling that it has left."""
        self._left = asyncio.Event()
        self._error = error
        self.leave = self._left.set

    async def receive(self) -> dict[str, str]:
        await self._left.wait()
        if self._error is not None:
            raise self._error
        return {"type": "http.disconnect"}


class Work:
    """Work that takes until it is cancelled, or until `finish`."""

    def __init__(self) -> None:
        self._finished = asyncio.Event()
        self.begun = asyncio.Event()
        self.has_ended = False
        self.finish = self._finished.set

    async def run(self, error: BaseException | None = None) -> int:
        try:
            self.begun.set()
            await self._finished.wait()
            if error is not None:
                raise error
            return 7
        finally:
            # The end of an answer takes its time, too.
            await asyncio.sleep(0)
            self.has_ended = True


async def test_work_of_a_client_that_stays():
    client = Client()
    work = Work()
    work.finish()
    before = asyncio.all_tasks()
    assert await unless_disconnected(client.receive, work.run()) == 7
    await asyncio.sleep(0)
    assert asyncio.all_tasks() == before, "nobody listens any more"
    current = asyncio.current_task()
    assert current is not None
    assert not current.cancelling()


@pytest.mark.parametrize("error", [None, RuntimeError("no connection")])
async def test_the_work_has_ended_when_the_client_has_left(error):
    client = Client(error)
    work = Work()
    asking = asyncio.create_task(unless_disconnected(client.receive, work.run()))
    await work.begun.wait()
    client.leave()
    with pytest.raises(ClientDisconnect):
        await asking
    assert work.has_ended
    assert not asking.cancelled()


async def test_the_callers_end_is_no_disconnect():
    client = Client()
    work = Work()
    asking = asyncio.create_task(unless_disconnected(client.receive, work.run()))
    await work.begun.wait()
    asking.cancel()
    with pytest.raises(asyncio.CancelledError):
        await asking
    assert work.has_ended


@pytest.mark.parametrize("error", [TimeoutError("late"), ValueError("wrong")])
async def test_errors_of_the_work_stay_what_they_are(error):
    client = Client()
    work = Work()
    work.finish()
    with pytest.raises(type(error), match=str(error)):
        await unless_disconnected(client.receive, work.run(error))


async def test_an_error_on_the_way_out_is_a_disconnect():
    client = Client()
    begun = asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            raise ValueError("cannot clean up")

    asking = asyncio.create_task(unless_disconnected(client.receive, work()))
    await begun.wait()
    client.leave()
    with pytest.raises(ClientDisconnect):
        await asking
