"""Two thousand requests that no browser sends: each gets its status, none leaves a trace, and the viewer goes on."""

import gc
import logging
import random
import resource
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from urllib.parse import quote, urlsplit

import pytest
import torch

import attlas
from attlas.view import Server, Service, connections

TILE = "api/tile?entry=0&head=0&level=0&y=0&x=0"
OK, DEAF = {200}, {None}


@pytest.fixture(scope="module")
def viewer() -> Iterator[Server]:
    generator = torch.Generator().manual_seed(3)
    q, k = (torch.randn(1, 2, 600, 8, generator=generator) for _ in range(2))
    service = Service(attlas.attend(q, k, mask=attlas.Causal()), tokens=["x"] * 600)
    with Server(service, port=0) as found:
        yield found
    service.close()


def token_of(viewer: Server) -> str:
    return urlsplit(viewer.url).path.strip("/")


def send(viewer: Server, raw: bytes, *, timeout: float = 20.0) -> list[int | None]:
    """Send bytes on a connection of their own, say that there are no more, and return the statuses that come back."""
    with socket.create_connection(("127.0.0.1", viewer.port), timeout=timeout) as connection:
        received = bytearray()
        try:
            connection.sendall(raw)
            while part := connection.recv(65_536):
                received += part
        except ConnectionError:  # closed with bytes of ours unread: what came before is the answer
            pass
    return statuses(bytes(received))


def statuses(received: bytes) -> list[int | None]:
    """Return the status of each answer, which must be whole; one None where there is none."""
    found: list[int | None] = []
    while received:
        head, blank, rest = received.partition(b"\r\n\r\n")
        assert blank, received[:80]
        lines = head.split(b"\r\n")
        assert lines[0].startswith(b"HTTP/1.1 "), lines[0]
        found.append(int(lines[0].split()[1]))
        headers = dict(line.lower().split(b": ", 1) for line in lines[1:])
        size = 0 if found[-1] == 304 else int(headers[b"content-length"])
        body, received = rest[:size], rest[size:]
        assert b"Traceback" not in body
        assert b'File "' not in body
        assert len(body) == size
    return found or [None]


def request(
    target: str, *lines: str, method: str = "GET", host: str = "localhost:1", version: str = "1.1", close: bool = True
) -> bytes:
    head = [f"{method} {target} HTTP/{version}", *([f"Host: {host}"] if host else []), *lines]
    head += ["Connection: close"] if close else []
    return "\r\n".join([*head, "", ""]).encode("latin-1")


def shown(case: bytes) -> str:
    return repr(case[:120])


# A maker returns the bytes and the statuses that are right for them.
Case = tuple[bytes, set[int | None]]
Maker = Callable[[random.Random, str], Case]


def wrong_token(dice: random.Random, token: str) -> Case:
    near = list(token)
    near[dice.randrange(len(near))] = dice.choice("!*'()") if dice.random() < 0.5 else "%41"
    other = dice.choice(["", "api", "".join(near), token[:-1], token + "A", token.swapcase() + "x", "." * 32, "static"])
    return request(f"/{other}/{dice.choice(['', TILE, 'main.js', 'api/info'])}"), {404}


def traversal(dice: random.Random, token: str) -> Case:
    up = dice.choice(["../", "..%2f", "%2e%2e/", "%2e%2e%2f", "..\\", "..%5c", "....//", "%252e%252e/", "..%00/", "/"])
    goal = dice.choice(
        ["etc/passwd", "server.py", "proc/self/environ", "windows/win.ini", "attlas/errors.py", "guard.py"]
    )
    return request(f"/{token}/{dice.choice(['', 'api/', 'static/'])}{up * dice.randint(1, 9)}{goal}"), {404}


def fuzzed_path(dice: random.Random, token: str) -> Case:
    raw = bytes(dice.randrange(1, 256) for _ in range(dice.randint(1, 60)))
    return request(f"/{token}/{dice.choice(['', 'api/'])}x{quote(raw)}"), {404}


def wrong_numbers(dice: random.Random, token: str) -> Case:
    wrong = ["-1", "1e9", "99999999", "9" * 400, "NaN", "inf", "0x10", "1.5", "", " 1", "٣", "1_0", "+1", "None", "[]",
             "true", "18446744073709551616", "-0", "\x00", "%s%n", "${7*7}", "<script>", "1;2", "'"]  # fmt: skip
    name, keys = dice.choice(
        [("tile", "entry head level y x"), ("row", "entry head i"), ("column", "entry head j"),
         ("cell", "entry head i j"), ("region", "entry head r0 r1 c0 c1"), ("top", "entry head k"),
         ("tokens", "start stop"),
         ("thumbnail", "entry head size"), ("track", "entry head name"), ("search", "limit")]
    )  # fmt: skip
    given = dict.fromkeys(keys.split(), "0")
    key = dice.choice(list(given))
    given[key] = dice.choice(wrong)
    query = "&".join(f"{key}={quote(value)}" for key, value in given.items())
    return request(f"/{token}/api/{name}?{query}"), {400, 404}


def missing_or_doubled(dice: random.Random, token: str) -> Case:
    query = dice.choice(
        [
            "",
            "entry=0&entry=1",
            "&&&",
            "=",
            "%",
            "%zz=1&%zz=2",
            "entry=%ff",
            "a=1&" * 40,
            "entry=0&head=0&level=0&y=0",
            "?",
        ]
    )
    return request(f"/{token}/api/{dice.choice(['tile', 'row', 'cell'])}?{query}"), {400}


def unknown_question(dice: random.Random, token: str) -> Case:
    name = dice.choice(
        ["__init__", "answer", "close", "_tile", "TILE", "tile.json", "info%20", "a" * 900, "source", "tiles"]
    )
    return request(f"/{token}/api/{name}"), {404}


def wrong_host(dice: random.Random, token: str) -> Case:
    host = dice.choice(
        ["evil.example", "127.0.0.1.evil.example:80", "127.0.0.2", "0.0.0.0", "localhost.evil", "[::2]:1", "a" * 300]
    )
    return request(f"/{token}/{dice.choice(['', TILE])}", host=host), {421}


def no_host(dice: random.Random, token: str) -> Case:
    if dice.random() < 0.5:
        return request(f"/{token}/", host=""), {400}
    return request(f"/{token}/", host="", version="1.0"), {421}


def wrong_origin(dice: random.Random, token: str) -> Case:
    line = dice.choice(
        ["Origin: http://evil.example", "Origin: null", "Origin: http://localhost:2", "Origin: https://localhost:1",
         "Sec-Fetch-Site: cross-site", "Sec-Fetch-Site: same-site"]
    )  # fmt: skip
    return request(f"/{token}/{TILE}", line), {403}


def wrong_method(dice: random.Random, token: str) -> Case:
    method = dice.choice(["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND", "A" * 200, "gEt"])
    return request(f"/{token}/", method=method), {405}


def body(dice: random.Random, token: str) -> Case:
    size = dice.randint(1, 5000)
    if dice.random() < 0.5:
        return request(f"/{token}/", f"Content-Length: {size}") + b"x" * size, {413}
    chunk = b"%x\r\n%s\r\n0\r\n\r\n" % (size, b"y" * size)
    return request(f"/{token}/", "Transfer-Encoding: chunked") + chunk, {413}


def smuggling(dice: random.Random, token: str) -> Case:
    lines = dice.choice(
        [("Content-Length: 5", "Content-Length: 6"), ("Content-Length: -1",), ("Content-Length: 1e3",),
         ("Content-Length: 4", "Transfer-Encoding: chunked"), ("Transfer-Encoding: gzip, chunked",),
         ("Transfer-Encoding: \x0bchunked",), ("Host: evil.example",), ("X : 1",), (" folded",)]
    )  # fmt: skip
    # Some of it is no HTTP; what is has a body or a second host, and neither is taken.
    return request(f"/{token}/", *lines), {400, 413, 421, 501}


def long_address(dice: random.Random, token: str) -> Case:
    size = dice.randint(4200, 9000)
    part = dice.choice(["{}", "api/tile?x={}", "api/{}"])
    return request(f"/{token}/{part.format('a' * size)}"), {414}


def long_headers(dice: random.Random, token: str) -> Case:
    lines = dice.choice(
        [[f"X: {'a' * dice.randint(17_000, 30_000)}"], [f"X{i}: {i}" for i in range(dice.randint(101, 900))]]
    )
    return request(f"/{token}/", *lines), {431}


def endless_line(dice: random.Random, token: str) -> Case:
    return b"GET /" + b"a" * dice.choice([40_000, 70_000, 200_000]), {431, None}


def garbage(dice: random.Random, token: str) -> Case:
    raw = bytes(dice.randrange(256) for _ in range(dice.randint(1, 400))) + b"\r\n\r\n"
    start = dice.choice([b"", b"GET ", b"\x16\x03\x01\x02\x00\x01", b"SSH-2.0-x\r\n", b"\xff\xfe", b"\x00" * 9])
    return start + b"\x01" + raw, {400}


def not_http(dice: random.Random, token: str) -> Case:
    line = dice.choice(
        ["GET", "GET /", f"GET /{token}/ HTTP/1.1 x", "GET  / HTTP/1.1", "HTTP/1.1 200 OK",
         "GET / HTTP/1.1\0",
         f"GET /{token}/\tx HTTP/1.1", f"GET /{token}/\u00e9 HTTP/1.1", ": 1"]
    )  # fmt: skip
    return f"{line}\r\nHost: localhost\r\n\r\n".encode("latin-1"), {400}


def other_version(dice: random.Random, token: str) -> Case:
    if dice.random() < 0.5:
        return b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes(dice.randrange(256) for _ in range(30)), {505}
    return request(f"/{token}/", version=dice.choice(["2.0", "0.9", "9.9", "3.0"])), {505}


def truncated(dice: random.Random, token: str) -> Case:
    whole = request(f"/{token}/{TILE}")
    return whole[: dice.randint(0, len(whole) - 1)], DEAF


def pipelined(dice: random.Random, token: str) -> Case:
    good = request(f"/{token}/{dice.choice(['api/info', TILE])}", close=False)
    return good * dice.randint(1, 6) + b"\x00garbage\r\n\r\n", {200, 400}


def upgrade(dice: random.Random, token: str) -> Case:
    protocol = dice.choice(["websocket", "h2c", "\xff"])
    lines = (f"Upgrade: {protocol}", "Sec-WebSocket-Key: AAAA", "Sec-WebSocket-Version: 13")
    return request(f"/{token}/api/info", *lines, "Connection: upgrade", close=False)[
        :-2
    ] + b"Connection: close\r\n\r\n", OK


def odd_but_right(dice: random.Random, token: str) -> Case:
    line = dice.choice(
        ['If-None-Match: "', "If-None-Match: ,,,*,", "Range: bytes=0-1", "Accept-Encoding: gzip;q=0",
         "Cookie: \xff\xfe",
         "X-Forwarded-For: 1.2.3.4", "X-Forwarded-Host: evil.example", "Forwarded: host=evil.example", "Expect: x"]
    )  # fmt: skip
    return request(f"/{token}/{dice.choice(['api/info', TILE])}", line), OK


MAKERS: tuple[tuple[Maker, int], ...] = (
    (wrong_token, 160), (traversal, 220), (fuzzed_path, 160), (wrong_numbers, 280), (missing_or_doubled, 120),
    (unknown_question, 60), (wrong_host, 100), (no_host, 40), (wrong_origin, 100), (wrong_method, 80), (body, 80),
    (smuggling, 120), (long_address, 80), (long_headers, 60), (endless_line, 20), (garbage, 100), (not_http, 60),
    (other_version, 40), (pipelined, 80), (upgrade, 30), (odd_but_right, 60),
)  # fmt: skip


def half_closed(viewer: Server, raw: bytes) -> list[int | None]:
    """Send bytes and end the sending half, as a client does that dies."""
    with socket.create_connection(("127.0.0.1", viewer.port), timeout=20) as connection:
        connection.sendall(raw)
        connection.shutdown(socket.SHUT_WR)
        received = bytearray()
        while part := connection.recv(65_536):
            received += part
    return statuses(bytes(received))


def good(viewer: Server) -> None:
    assert send(viewer, request(f"/{token_of(viewer)}/{TILE}")) == [200]


def usage() -> tuple[int, int, int]:
    """Return threads, open files, and the peak of memory in bytes."""
    folder = Path("/proc/self/fd")
    files = len(list(folder.iterdir())) if folder.is_dir() else 0
    return threading.active_count(), files, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def test_two_thousand_requests_that_no_browser_sends(viewer: Server, logged: list[logging.LogRecord]) -> None:
    dice, token = random.Random(20_000), token_of(viewer)
    cases = [(maker.__name__, *maker(dice, token)) for maker, count in MAKERS for _ in range(count)]
    dice.shuffle(cases)
    cut = [("truncated", *truncated(dice, token)) for _ in range(120)]
    assert len(cases) + len(cut) >= 2000
    good(viewer)
    with ThreadPoolExecutor(8) as pool:
        # The memory that the first hundred need is what a server takes that works.
        first = list(pool.map(lambda case: send(viewer, case[1]), cases[:100]))
        gc.collect()
        threads, files, memory = usage()
        found = first + list(pool.map(lambda case: send(viewer, case[1]), cases[100:]))
        found += list(pool.map(lambda case: half_closed(viewer, case[1]), cut))
        wrong = [
            f"{name}: {shown(raw)} was answered {answers}, not {right}"
            for (name, raw, right), answers in zip([*cases, *cut], found, strict=True)
            if not set(answers) <= right
        ]
        assert not wrong, f"{Counter(line.partition(':')[0] for line in wrong)}\n" + "\n".join(wrong[:20])
        good(viewer)
        settle(viewer)
        assert usage()[:2] == (threads, files)
    assert usage()[2] - memory < 64 << 20
    assert not logged, [record.getMessage() for record in logged[:3]]


def settle(viewer: Server) -> None:
    """Wait until every connection is closed on the server's side too."""
    until = time.monotonic() + 5
    while viewer._http.server_state.connections and time.monotonic() < until:
        time.sleep(0.01)
    assert not viewer._http.server_state.connections


def test_pipelined_requests_are_answered_in_order(viewer: Server) -> None:
    token = token_of(viewer)
    targets = [TILE, "api/nothing", "nothing.js", "api/info", "api/tile?entry=x"]
    raw = b"".join(request(f"/{token}/{target}", close=False) for target in targets)
    assert send(viewer, raw + request(f"/{token}/{TILE}")) == [200, 404, 404, 200, 400, 200]


# ------------------------------------------------------------------------------------------- clients that take time


@pytest.fixture
def hurried(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "REQUEST_SECONDS", 0.8)
    monkeypatch.setattr(connections, "ANSWER_SECONDS", 0.8)


def connect(viewer: Server) -> socket.socket:
    return socket.create_connection(("127.0.0.1", viewer.port), timeout=10)


def everything(connection: socket.socket) -> bytes:
    received = bytearray()
    try:
        while part := connection.recv(65_536):
            received += part
    except ConnectionError:
        pass
    return bytes(received)


@pytest.mark.usefixtures("hurried")
def test_slow_clients_are_told_so_and_left(viewer: Server, logged: list[logging.LogRecord]) -> None:
    waiting = [connect(viewer) for _ in range(20)]
    for number, connection in enumerate(waiting):
        connection.sendall(request(f"/{token_of(viewer)}/")[: number * 2])
    begun = time.monotonic()
    assert {status for connection in waiting for status in statuses(everything(connection))} == {408}
    assert time.monotonic() - begun < 8
    for connection in waiting:
        connection.close()
    settle(viewer)
    good(viewer)
    assert not logged


@pytest.mark.usefixtures("hurried")
def test_bytes_one_by_one_do_not_stretch_the_time(viewer: Server) -> None:
    with connect(viewer) as connection:
        begun = time.monotonic()
        with pytest.raises(ConnectionError):
            for letter in request(f"/{token_of(viewer)}/") * 20:
                connection.sendall(bytes([letter]))
                time.sleep(0.02)
        assert time.monotonic() - begun < 8


@pytest.mark.usefixtures("hurried")
def test_a_second_request_has_its_own_time(viewer: Server) -> None:
    whole = request(f"/{token_of(viewer)}/api/info", close=False)
    with connect(viewer) as connection:
        for _ in range(3):
            connection.sendall(whole)
            received = b""
            while not received.endswith(b"}"):  # head and body may come apart
                received += connection.recv(65_536)
            assert statuses(received) == [200]
            time.sleep(0.4)
        connection.sendall(whole[:30])
        assert statuses(everything(connection)) == [408]


@pytest.mark.usefixtures("hurried")
def test_clients_that_read_nothing_are_left(viewer: Server) -> None:
    stuck = []
    for _ in range(4):
        connection = socket.socket()
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        connection.connect(("127.0.0.1", viewer.port))
        connection.sendall(request(f"/{token_of(viewer)}/{TILE}", close=False) * 100)
        stuck.append(connection)
    good(viewer)
    settle(viewer)
    for connection in stuck:
        connection.close()
    good(viewer)


def test_connections_that_idle_are_closed(viewer: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    with connect(viewer) as connection:
        monkeypatch.setattr(viewer._http.config, "timeout_keep_alive", 0.2)
    with connect(viewer) as connection:
        connection.sendall(request(f"/{token_of(viewer)}/api/info", close=False))
        assert statuses(everything(connection)) == [200]


def test_there_is_an_end_to_connections(viewer: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(connections, "MOST", 10)
    settle(viewer)
    held = [connect(viewer) for _ in range(10)]
    time.sleep(0.1)
    for _ in range(5):
        with connect(viewer) as connection:
            assert statuses(everything(connection)) == [503]
    for connection in held:
        connection.close()
    settle(viewer)
    good(viewer)
