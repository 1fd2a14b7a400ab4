"""The viewer over HTTP: right answers, caching, clients that go away, and a clean start and end."""

import gc
import http.client
import json
import logging
import os
import random
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode, urlsplit

import numpy as np
import pytest
import torch
from tests.messages import refusal

import attlas
from attlas.errors import PortError, ShapeError
from attlas.view import Answer, Server, Service, serve
from attlas.view import server as module

M, N, HEADS = 900, 1300, 3
CODE_ERROR = 2.0 ** (32 / 65532) - 1 + 1e-6  # half a step of the codes, and rounding


@pytest.fixture(scope="module")
def matrix() -> attlas.AttentionMatrix:
    generator = torch.Generator().manual_seed(7)
    q, k = torch.randn(1, HEADS, M, 16, generator=generator), torch.randn(1, HEADS, N, 16, generator=generator)
    return attlas.attend(3.0 * q, k, mask=attlas.Causal())


@pytest.fixture(scope="module")
def dense(matrix: attlas.AttentionMatrix) -> np.ndarray:
    return matrix.to_dense()[0].double().numpy()


@pytest.fixture(scope="module")
def viewer(matrix: attlas.AttentionMatrix) -> Iterator[Server]:
    service = Service(matrix, tokens=[f" t{i}" for i in range(N)])
    with Server(service, port=0) as found:
        yield found
    service.close()


class Client:
    """One connection that stays open, as a browser's."""

    def __init__(self, viewer: Server) -> None:
        parts = urlsplit(viewer.url)
        self.base = parts.path
        self.connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=60)

    def get(self, path: str, method: str = "GET", headers: Mapping[str, str] = {}, **parameters: object):
        query = f"?{urlencode(parameters)}" if parameters else ""
        self.connection.request(method, f"{self.base}{path}{query}", headers=dict(headers))
        answer = self.connection.getresponse()
        answer.content = answer.read()
        return answer

    def tile(self, **parameters: object) -> np.ndarray:
        answer = self.get("api/tile", **parameters)
        assert answer.status == 200, answer.content
        return np.frombuffer(answer.content, "<u2").reshape(256, 256)


@contextmanager
def connected(viewer: Server) -> Iterator[Client]:
    found = Client(viewer)
    yield found
    found.connection.close()


@pytest.fixture
def client(viewer: Server) -> Iterator[Client]:
    with connected(viewer) as found:
        yield found


def weights(codes: np.ndarray) -> np.ndarray:
    return np.where(codes < 2, 0.0, 2.0 ** (-64 + 64 * (codes.astype(np.float64) - 2) / 65532))


def pooled(dense: np.ndarray, head: int, level: int, y: int, x: int) -> np.ndarray:
    """Return the means of a tile's blocks over their allowed cells, from the dense matrix."""
    side = 256 << level
    rows, columns = np.arange(M), np.arange(N)
    allowed = columns[None] <= rows[:, None] + N - M
    sums, cells = np.zeros((side, side)), np.zeros((side, side))
    part = (slice(y * side, (y + 1) * side), slice(x * side, (x + 1) * side))
    height, width = dense[head][part].shape
    sums[:height, :width], cells[:height, :width] = dense[head][part], allowed[part]
    blocks = (256, 1 << level, 256, 1 << level)
    total, count = (t.reshape(blocks).sum((1, 3)) for t in (sums, cells))
    return np.where(count > 0, total / np.maximum(count, 1), -1.0)  # -1 where nothing may attend


def check_tile(codes: np.ndarray, wanted: np.ndarray) -> None:
    np.testing.assert_array_equal(codes == 0, wanted < 0)
    np.testing.assert_allclose(weights(codes), wanted.clip(0), rtol=CODE_ERROR + 1e-4, atol=2.0**-64)


# ---------------------------------------------------------------------------------------------------------- answers


def test_the_page_and_its_files(client: Client) -> None:
    page = client.get("")
    assert page.status == 200
    assert page.headers["content-type"] == "text/html; charset=utf-8"
    assert client.get("index.html").content == page.content
    head = client.get("", method="HEAD")
    assert (head.status, head.content, head.headers["content-length"]) == (200, b"", str(len(page.content)))
    module = client.get("main.js")
    assert (module.status, module.headers["content-type"]) == (200, "text/javascript; charset=utf-8")
    for path in ("nothing.js", "api/", "../server.py", "%2e%2e/server.py", "static/main.js"):
        assert client.get(path).status == 404, path


def test_info_is_json(client: Client) -> None:
    found = client.get("api/info")
    assert found.headers["content-type"] == "application/json"
    info = json.loads(found.content)
    assert [(e["m"], e["n"]) for e in info["entries"]] == [(M, N)]
    assert found.headers["cache-control"] == "no-store"
    assert client.get("api/info", v=info["key"]).headers["cache-control"] == "no-store"  # bookmarks may change
    named = client.get("api/row", entry=0, head=0, i=0, v=info["key"])
    assert (named.headers["content-type"], named.headers["attlas-progress"]) == ("application/octet-stream", "1")
    assert named.headers["cache-control"] == "private, max-age=31536000, immutable"


def test_the_address_ends_in_a_slash(viewer: Server, client: Client) -> None:
    client.base = client.base.removesuffix("/")
    found = client.get("")
    assert (found.status, found.headers["location"]) == (307, viewer.url)


def test_eight_clients_that_pan_at_once_get_right_answers(viewer: Server, dense: np.ndarray) -> None:
    def pan(seed: int) -> int:
        client, random_ = Client(viewer), random.Random(seed)
        head, level, y, x = seed % HEADS, 1, 1, 1
        for _ in range(10):
            level = min(max(level + random_.choice((-1, 0, 0, 1)), 0), 2)
            y = min(max(y + random_.choice((-1, 0, 1)), 0), -(-M // (256 << level)) - 1)
            x = min(max(x + random_.choice((-1, 0, 1)), 0), -(-N // (256 << level)) - 1)
            side = 256 << level
            seen = {"r0": y * side, "r1": min((y + 1) * side, M), "c0": x * side, "c1": min((x + 1) * side, N)}
            assert client.get("api/focus", entry=0, head=head, level=level, **seen).status == 200
            codes = client.tile(entry=0, head=head, level=level, y=y, x=x, pool="mean")
            check_tile(codes, pooled(dense, head, level, y, x))
            i = random_.randrange(M)
            row = np.frombuffer(client.get("api/row", entry=0, head=head, i=i).content, "<f4")
            np.testing.assert_allclose(row, dense[head, i], rtol=1e-4, atol=1e-9)
        client.connection.close()
        return 25

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(pan, range(8))) == [25] * 8


# ----------------------------------------------------------------------------------------- clients that go, and ends


class Slow:
    """A service whose tiles take until somebody gives up or says so."""

    def __init__(self) -> None:
        self.busy = threading.Semaphore(0)
        self.gave_up = threading.Semaphore(0)
        self.go = threading.Event()
        self.asked: list[dict[str, str]] = []

    def answer(self, name: str, parameters: Mapping[str, str], wanted: Callable[[], bool]) -> Answer:
        self.asked.append(dict(parameters))
        if name == "broken":
            raise ZeroDivisionError("a fault")
        if name == "tile":
            self.busy.release()
            while not self.go.is_set():
                if not wanted():
                    self.gave_up.release()
                    return Answer("json", b"{}", 1.0, False, 499)
                time.sleep(0.002)
        if name == "pending":
            return Answer("binary", b"1234", 0.25, False, 200, sampled=True)
        return Answer("json", b"{}")


@pytest.fixture
def slow() -> Slow:
    return Slow()


@pytest.fixture
def slow_viewer(slow: Slow) -> Iterator[Server]:
    with Server(slow, port=0) as found:
        yield found


@pytest.fixture
def slow_client(slow_viewer: Server) -> Iterator[Client]:
    with connected(slow_viewer) as found:
        yield found


def test_what_is_not_final_is_not_kept(slow: Slow, slow_client: Client) -> None:
    found = slow_client.get("api/pending", v="key", i=3, text="a b\u65e5")
    assert slow.asked == [{"v": "key", "i": "3", "text": "a b\u65e5"}]  # the key goes with the question
    assert (found.status, found.content) == (200, b"1234")
    assert found.headers["attlas-progress"] == "0.25"
    assert found.headers["attlas-sampled"] == "1"
    assert found.headers["cache-control"] == "no-store"


def test_a_fault_of_the_service_is_answered_and_logged(slow_client: Client, logged: list[logging.LogRecord]) -> None:
    found = slow_client.get("api/broken")
    assert (found.status, json.loads(found.content)) == (500, {"error": "the viewer failed: ZeroDivisionError"})
    assert found.headers["x-content-type-options"] == "nosniff"
    assert slow_client.get("api/row").status == 200
    assert [record.exc_info[0] for record in logged if record.exc_info] == [ZeroDivisionError]


def test_a_request_that_is_given_up_stops(slow: Slow, slow_viewer: Server) -> None:
    for _ in range(20):
        client = Client(slow_viewer)
        client.connection.request("GET", f"{client.base}api/tile")
        assert slow.busy.acquire(timeout=5)
        client.connection.close()
        assert slow.gave_up.acquire(timeout=5)
    with connected(slow_viewer) as client:
        assert client.get("api/row").status == 200


def test_requests_that_are_given_up_do_not_hold_up_others(slow: Slow, slow_viewer: Server) -> None:
    clients = [Client(slow_viewer) for _ in range(60)]  # more than there are threads
    for number, client in enumerate(clients):
        client.connection.request("GET", f"{client.base}api/tile?id={number}")
    assert slow.busy.acquire(timeout=5)
    for client in clients:
        client.connection.close()
    begun = time.monotonic()
    with connected(slow_viewer) as other:
        assert other.get("api/row").status == 200
    assert time.monotonic() - begun < 5


def test_it_stops_under_load(slow: Slow) -> None:
    viewer = Server(slow, port=0)
    viewer.start()
    clients = [Client(viewer) for _ in range(16)]
    for client in clients:
        client.connection.request("GET", f"{client.base}api/tile")
    assert slow.busy.acquire(timeout=5)
    begun = time.monotonic()
    viewer.stop()
    assert time.monotonic() - begun < 3
    answers = []
    for client in clients:
        try:
            answers.append(client.connection.getresponse().status)
        except (http.client.HTTPException, OSError):  # one that had not been taken yet
            answers.append(None)
        client.connection.close()
    assert set(answers) <= {503, None}
    assert answers.count(503) >= 4
    with pytest.raises(OSError):
        socket.create_connection(("127.0.0.1", viewer.port), timeout=1).close()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # uvicorn forgets that connection
def test_it_stops_while_a_client_reads_nothing(matrix: attlas.AttentionMatrix) -> None:
    service = Service(matrix)
    other = Server(service, port=0)
    other.start()
    base = urlsplit(other.url).path
    with socket.create_connection(("127.0.0.1", other.port)) as stuck:
        line = f"GET {base}api/tile?entry=0&head=0&level=0&y=0&x=0 HTTP/1.1\r\nHost: localhost\r\n\r\n"
        stuck.sendall(line.encode() * 40)
        time.sleep(0.2)
        begun = time.monotonic()
        other.stop()
        assert time.monotonic() - begun < 4
    service.close()
    del other
    gc.collect()


@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
def test_it_ends_at_a_signal(name: str, slow: Slow, request: pytest.FixtureRequest) -> None:
    number = getattr(signal, name, None)
    if number is None or os.name != "posix":
        pytest.skip(f"no {name} here")
    # A shell's background job ignores some of them, and nohup others; what is ignored would never end it.
    request.addfinalizer(partial(signal.signal, number, signal.signal(number, lambda *_: None)))
    handlers = [signal.getsignal(known) for known in (signal.SIGINT, signal.SIGTERM, number)]
    viewer = Server(slow, port=0)

    def ask_and_end() -> None:
        with connected(viewer) as client:
            client.get("api/row")
        os.kill(os.getpid(), number)

    thread = threading.Thread(target=ask_and_end)
    thread.start()
    viewer.run()  # here, in the main thread, as the command line does
    thread.join()
    assert slow.asked == [{}]
    assert [signal.getsignal(known) for known in (signal.SIGINT, signal.SIGTERM, number)] == handlers


def test_a_server_that_never_ran_leaves_nothing(slow: Slow) -> None:
    viewer = Server(slow, port=0)
    viewer.stop()
    Server(slow, port=viewer.port).stop()


# ---------------------------------------------------------------------------------------------------------- refusals


def test_it_listens_on_this_machine_only(viewer: Server) -> None:
    assert viewer.url.startswith(f"http://127.0.0.1:{viewer.port}/")
    assert viewer._socket.getsockname()[0] == "127.0.0.1"


def test_the_next_free_port_is_taken(slow: Slow) -> None:
    first, second = Server(slow), Server(slow)
    try:
        assert first.port != second.port
        assert 8750 <= first.port < second.port < 8800
        assert refusal(PortError, lambda: Server(slow, port=first.port)) == f"view: port {first.port} is taken"
    finally:
        first.stop()
        second.stop()
    Server(slow, port=first.port).stop()  # a port that was just left can be taken again


@pytest.mark.parametrize("port", [-1, 65_536])
def test_ports_that_are_none(port: int, slow: Slow) -> None:
    with pytest.raises(ShapeError, match=f"(?s)the port must be between 0 and 65535.*found: port {port}"):
        Server(slow, port=port)


def test_serve_says_its_address_once(
    matrix: attlas.AttentionMatrix, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen, opened = [], threading.Event()

    def open_page(url: str) -> bool:
        seen.append(url)
        opened.set()
        return True

    monkeypatch.setenv("BROWSER", "true")
    monkeypatch.setattr(module.webbrowser, "open", open_page)
    monkeypatch.setattr(module.Server, "run", lambda self: (opened.wait(5), self.stop()))
    serve(matrix, port=0)
    out = capsys.readouterr().out
    assert out.count("http://127.0.0.1:") == 1
    assert len(seen) == 1
    token = urlsplit(out.strip()).path.strip("/")
    assert token not in seen[0]  # other users see the command line of a browser
    serve(matrix, port=0, browser=False, announce=seen.append)
    assert len(seen) == 2  # the address, and no browser
    assert capsys.readouterr().out == ""


def test_browsers(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("BROWSER", "DISPLAY", "WAYLAND_DISPLAY"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(module.sys, "platform", "linux")
    assert not module.has_browser()
    monkeypatch.setenv("DISPLAY", ":0")
    monkeypatch.setattr(module.webbrowser, "get", object)
    assert module.has_browser()

    def none() -> None:
        raise module.webbrowser.Error("no browser")

    monkeypatch.setattr(module.webbrowser, "get", none)
    assert not module.has_browser()
    monkeypatch.setattr(module.webbrowser, "open", lambda url: none())
    module._open_in_browser("http://127.0.0.1:1/")  # says nothing where there is none
    monkeypatch.setattr(module.sys, "platform", "darwin")
    assert module.has_browser()


def test_nothing_is_left_after_many_servers(slow: Slow) -> None:
    others = set(threading.enumerate())  # of tests before this one

    def left() -> tuple[int, int]:
        until = time.monotonic() + 5  # threads that answered are told to end, and not waited for
        while any("AnyIO" in thread.name for thread in {*threading.enumerate()} - others) and time.monotonic() < until:
            time.sleep(0.01)
        return len(list(Path("/proc/self/fd").iterdir())), len({*threading.enumerate()} - others)

    if not Path("/proc/self/fd").is_dir():
        pytest.skip("the system does not list open files")
    before: Any = None
    for number in range(6):
        with Server(slow, port=0) as found, connected(found) as client:
            assert client.get("api/row").status == 200
        if number == 1:
            before = left()
    assert left() == before
