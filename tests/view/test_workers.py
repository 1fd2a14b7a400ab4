"""The threads that answer: order, dropping, faults, and an end without anything left."""

import asyncio
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from types import SimpleNamespace

import pytest

from attlas.view.urgency import Focus, Urgency, distance
from attlas.view.workers import Workers

PICTURE = {"entry": "0", "head": "1", "variant": "plain"}


class Slow:
    """A service that answers what was asked, when it is told to."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.go = threading.Event()
        self.busy = threading.Semaphore(0)
        self.gave_up = 0

    def answer(self, name: str, parameters: Mapping[str, str], wanted: Callable[[], bool]) -> SimpleNamespace:
        if name == "broken":
            raise RuntimeError("a fault")
        if name == "slow":
            self.busy.release()
            while wanted() and not self.go.is_set():
                time.sleep(0.001)
            self.gave_up += not wanted()
        else:
            self.asked.append(parameters.get("id", name))
        return SimpleNamespace(status=200, name=name)


@pytest.fixture
def service() -> Slow:
    return Slow()


@pytest.fixture
def urgency() -> Urgency:
    return Urgency()


@pytest.fixture
def workers(service: Slow, urgency: Urgency) -> Iterator[Workers]:
    found = Workers(service, urgency, 1)
    yield found
    service.go.set()
    found.close()
    assert not [thread for thread in threading.enumerate() if thread.name.startswith("attlas-view-")]


def tile(y: int, x: int, level: int = 0, **more: str) -> dict[str, str]:
    return PICTURE | {"level": str(level), "y": str(y), "x": str(x), "id": f"{level}:{y},{x}"} | more


def look(r0: float, r1: float, c0: float, c1: float, level: int = 0, **more: str) -> dict[str, str]:
    return PICTURE | {"level": str(level), "r0": str(r0), "r1": str(r1), "c0": str(c0), "c1": str(c1)} | more


def test_tiles_nearest_the_focus_go_first(service: Slow, workers: Workers) -> None:
    async def ask() -> None:
        held = workers.submit("slow", {})
        assert service.busy.acquire(timeout=5)
        jobs = [workers.submit("tile", tile(y, x)) for y in range(4) for x in range(4)]
        jobs.append(workers.submit("tile", tile(0, 0, level=3)))
        jobs.append(workers.submit("thumbnail", PICTURE | {"id": "thumbnail"}))
        jobs.append(workers.submit("row", PICTURE | {"id": "row"}))
        # The focus comes when all are waiting: they are ranked when a thread is free.
        focus = workers.submit("focus", look(512, 768, 768, 1024))
        assert (await focus.answer).status == 200  # a quick one overtakes them all
        service.go.set()
        await asyncio.gather(held.answer, *(job.answer for job in jobs))

    asyncio.run(ask())
    assert service.asked[:3] == ["focus", "row", "0:2,3"]
    assert service.asked[3:5] == ["0:1,3", "0:2,2"]  # of two at one distance the older first
    assert service.asked[-3:] == ["0:0,0", "3:0,0", "thumbnail"]  # another level is a view away for each step
    assert len(service.asked) == 20


def test_distances_are_in_views() -> None:
    focus = Focus(2, row=5000.0, column=5000.0, height=1000.0, width=2000.0)
    assert distance(tile(4, 4, 2), focus) == 0.0  # 4096 to 5120 both ways
    assert distance(tile(5, 4, 2), focus) == (5120 - 5000) / 1000
    assert distance(tile(4, 5, 2), focus) == (5120 - 5000) / 2000
    assert distance(tile(3, 4, 2), focus) == (5000 - 4096) / 1000
    assert distance(tile(2, 2, 3), focus) == 1.0
    assert distance({"level": "x"}, focus) == distance(tile(10**30, 0), focus) == distance({}, focus) == float("inf")


def test_each_picture_has_its_own_focus(urgency: Urgency) -> None:
    urgency.look(look(0, 256, 0, 256))
    urgency.look(look(2560, 2816, 2560, 2816, head="2"))
    assert urgency.rank("tile", tile(0, 0)) == (2, 0.0)
    assert urgency.rank("tile", tile(10, 10, head="2")) == (2, 0.0)
    assert urgency.rank("tile", tile(10, 10))[1] > 5
    assert urgency.rank("tile", tile(0, 0, head="3"))[1] == float("inf")


@pytest.mark.parametrize("wrong", [{"r0": "x"}, {"r1": "nan"}, {"c1": "inf"}, {"level": "1.5"}, {"r0": "9"}])
def test_a_focus_that_is_none_changes_nothing(wrong: dict[str, str], urgency: Urgency) -> None:
    urgency.look(look(0, 4, 0, 4))
    urgency.look(look(0, 4, 0, 4) | wrong)
    assert urgency.rank("tile", tile(0, 0)) == (2, 0.0)
    urgency.look({})


def test_only_a_few_pictures_are_remembered(urgency: Urgency) -> None:
    for head in range(1000):
        urgency.look(look(0, 256, 0, 256, head=str(head)))
    known = [head for head in range(1000) if urgency.rank("tile", tile(0, 0, head=str(head)))[1] == 0.0]
    assert known == list(range(984, 1000))


def test_dropped_requests_are_not_computed(service: Slow, workers: Workers) -> None:
    async def ask() -> None:
        held = workers.submit("slow", {})
        assert service.busy.acquire(timeout=5)
        waiting = [workers.submit("tile", tile(0, x)) for x in range(3)]
        waiting[1].drop()
        held.drop()  # the thread looks up, and goes on with what is still wanted
        await asyncio.gather(*(job.answer for job in waiting), held.answer)
        assert waiting[1].answer.result() is None

    asyncio.run(ask())
    assert service.asked == ["0:0,0", "0:0,2"]
    assert service.gave_up == 1


def test_a_fault_is_told_and_the_thread_goes_on(service: Slow, workers: Workers) -> None:
    async def ask() -> None:
        with pytest.raises(RuntimeError, match="a fault"):
            await workers.submit("broken", {}).answer
        assert (await workers.submit("row", {}).answer).name == "row"

    asyncio.run(ask())


def test_quick_requests_do_not_wait(service: Slow, workers: Workers) -> None:
    async def ask() -> None:
        held = workers.submit("slow", {})
        assert service.busy.acquire(timeout=5)
        assert (await asyncio.wait_for(workers.submit("cell", {}).answer, 5)).name == "cell"
        assert not held.answer.done()
        service.go.set()
        await held.answer

    asyncio.run(ask())


def test_the_end_drops_everything(service: Slow, workers: Workers) -> None:
    async def ask() -> None:
        held = workers.submit("slow", {})
        assert service.busy.acquire(timeout=5)
        waiting = [workers.submit("tile", tile(0, x)) for x in range(3)]
        workers.drop()
        assert [await job.answer for job in waiting] == [None] * 3
        assert (await held.answer).status == 200  # it had begun, and was told to end
        assert await workers.submit("info", {}).answer is None

    asyncio.run(ask())
    assert service.asked == []
    assert service.gave_up == 1


def test_an_answer_that_comes_after_the_loop_is_dropped(service: Slow, workers: Workers) -> None:
    async def ask() -> None:
        workers.submit("slow", {})
        assert service.busy.acquire(timeout=5)

    asyncio.run(ask())
    service.go.set()

    async def again() -> None:
        assert (await workers.submit("row", {}).answer).name == "row"

    asyncio.run(again())
