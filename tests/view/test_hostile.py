"""Who is let in, and a thousand requests that no browser sends: each gets its status, and the viewer goes on."""

import contextlib
import http.client
import logging
import random
import re
import socket
import struct
from collections import Counter
from collections.abc import Callable, Iterator
from importlib.metadata import version
from urllib.parse import quote, urlsplit

import pytest
import torch

import attlas
from attlas.view import Server, Service

STARLETTE = tuple(int(part) for part in version("starlette").split(".")[:2])
TILE = "api/tile?entry=0&head=0&level=0&y=0&x=0"


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


def send(viewer: Server, raw: bytes) -> int:
    """Send bytes on a connection of their own, say that there are no more, and return the status that comes back."""
    with socket.create_connection(("127.0.0.1", viewer.port), timeout=20) as connection:
        received = bytearray()
        with contextlib.suppress(ConnectionError):  # closed with bytes of ours unread: what came before is the answer
            connection.sendall(raw)
            while part := connection.recv(65_536):
                received += part
    assert b"Traceback" not in received
    assert b'File "' not in received
    return int(received.split()[1])


def request(target: str, *lines: str, method: str = "GET", host: str = "localhost:1", version: str = "1.1") -> bytes:
    head = [f"{method} {target} HTTP/{version}", *([f"Host: {host}"] if host else []), *lines, "Connection: close"]
    return "\r\n".join([*head, "", ""]).encode("latin-1")


# A maker returns the bytes and the statuses that are right for them.
Case = tuple[bytes, set[int]]
Maker = Callable[[random.Random, str], Case]


def wrong_token(dice: random.Random, token: str) -> Case:
    near = list(token)
    near[dice.randrange(len(near))] = dice.choice("!*'()") if dice.random() < 0.5 else "%2b"
    other = dice.choice(["", "api", "".join(near), token[:-1], token + "A", token.swapcase() + "x", "." * 32, "static"])
    return request(f"/{other}/{dice.choice(['', TILE, 'main.js', 'api/info'])}"), {404}


def traversal(dice: random.Random, token: str) -> Case:
    ups = ["../", "..%2f", "%2e%2e/", "%2e%2e%2f", "..\\", "..%5c", "....//", "%252e%252e/", "/"]
    up = dice.choice(ups + ["..%00/"] * (STARLETTE >= (1, 8)))  # before, it answers a null byte with 500
    goal = dice.choice(
        ["etc/passwd", "server.py", "proc/self/environ", "windows/win.ini", "attlas/errors.py", "app.py"]
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


def missing(dice: random.Random, token: str) -> Case:
    query = dice.choice(
        ["", "&&&", "=", "%", "%zz=1&%zz=2", "entry=%ff", "a=1&" * 40, "entry=0&head=0&level=0&y=0", "?"]
    )
    return request(f"/{token}/api/{dice.choice(['tile', 'row', 'cell'])}?{query}"), {400}


def unknown_question(dice: random.Random, token: str) -> Case:
    name = dice.choice(
        ["__init__", "answer", "close", "_tile", "TILE", "tile.json", "info%20", "a" * 900, "source", "tiles"]
    )
    return request(f"/{token}/api/{name}"), {404}


def wrong_host(dice: random.Random, token: str) -> Case:
    host = dice.choice(
        ["evil.example", "127.0.0.1.evil.example:80", "127.0.0.2", "0.0.0.0", "localhost.evil", "[::2]:1", "a" * 300,
         "evil.example:8750", "localhost.", "127.0.0.1@evil.example", ""]
    )  # fmt: skip
    return request(f"/{token}/{dice.choice(['', TILE])}", host=host), {400}


def wrong_origin(dice: random.Random, token: str) -> Case:
    line = dice.choice(
        ["Origin: http://evil.example", "Origin: null", "Origin: http://localhost:2", "Origin: https://localhost:1",
         "Origin: http://127.0.0.1:1", "Sec-Fetch-Site: cross-site", "Sec-Fetch-Site: same-site", "Sec-Fetch-Site: odd"]
    )  # fmt: skip
    return request(f"/{token}/{dice.choice(['', TILE, 'main.js'])}", line), {403}


def wrong_method(dice: random.Random, token: str) -> Case:
    method = dice.choice(["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "PROPFIND"])
    size = dice.randint(0, 5000)
    asked = request(f"/{token}/{dice.choice(['', 'api/info'])}", f"Content-Length: {size}", method=method)
    return asked + b"x" * size, {403 if method == "POST" else 405}  # a POST must say that the page itself sends it


def no_http(dice: random.Random, token: str) -> Case:
    raw = bytes(dice.randrange(256) for _ in range(dice.randint(1, 400))) + b"\r\n\r\n"
    start = dice.choice([b"", b"GET ", b"\x16\x03\x01\x02\x00\x01", b"SSH-2.0-x\r\n", b"\xff\xfe", b"\x00" * 9])
    return start + b"\x01" + raw, {400}


MAKERS: tuple[tuple[Maker, int], ...] = (
    (wrong_token, 100), (traversal, 150), (fuzzed_path, 100), (wrong_numbers, 200), (missing, 60),
    (unknown_question, 40), (wrong_host, 80), (wrong_origin, 80), (wrong_method, 60), (no_http, 60),
)  # fmt: skip


def test_requests_that_no_browser_sends(viewer: Server, logged: list[logging.LogRecord]) -> None:
    dice, token = random.Random(20_000), token_of(viewer)
    cases = [(maker.__name__, *maker(dice, token)) for maker, count in MAKERS for _ in range(count)]
    dice.shuffle(cases)
    wrong = []
    for name, raw, right in cases:
        status = send(viewer, raw)
        if status not in right:
            wrong.append(f"{name}: {raw[:120]!r} was answered {status}, not {right}")
    assert not wrong, f"{Counter(line.partition(':')[0] for line in wrong)}\n" + "\n".join(wrong[:20])
    assert send(viewer, request(f"/{token}/{TILE}")) == 200
    assert not logged, [record.getMessage() for record in logged[:3]]


@pytest.mark.parametrize("method", ["GET", "POST"])
@pytest.mark.parametrize("sent", [0, 7])
def test_a_request_that_is_given_up_leaves_no_traceback(
    viewer: Server, logged: list[logging.LogRecord], method: str, sent: int
) -> None:
    lines = ["Content-Type: application/json", f"Origin: http://localhost:{viewer.port}", "Content-Length: 900"]
    raw = request(f"/{token_of(viewer)}/api/bookmarks", *lines, method=method, host=f"localhost:{viewer.port}")
    with socket.create_connection(("127.0.0.1", viewer.port), timeout=20) as connection:
        connection.sendall(raw + b"x" * sent)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))  # closed at once
    # The loop of the server meets both in this order: once this one is answered, the other one is over.
    assert send(viewer, request(f"/{token_of(viewer)}/{TILE}")) == 200
    assert not logged, [record.getMessage() for record in logged[:3]]


# ------------------------------------------------------------------------------------------------- who is let in


def ask(viewer: Server, path: str = "", url: str = "", **headers: str) -> http.client.HTTPResponse:
    parts = urlsplit(url or viewer.url)
    connection = http.client.HTTPConnection(parts.hostname, parts.port, timeout=20)
    named = {name.replace("_", "-"): text for name, text in headers.items()}
    connection.request("GET", parts.path + path, headers=named)
    answer = connection.getresponse()
    answer.read()
    connection.close()
    return answer


def test_tokens_are_long_and_never_the_same(viewer: Server) -> None:
    others = [Server(viewer, port=0) for _ in range(3)]
    tokens = {token_of(each) for each in (viewer, *others)}
    for other in others:
        other.stop()
    assert len(tokens) == 4
    assert all(re.fullmatch(r"[\w-]{32}", token) for token in tokens)  # 192 bits


@pytest.mark.parametrize("host", ["127.0.0.1:8750", "localhost:8750", "127.0.0.1", "localhost:9000", "[::1]:22"])
def test_hosts_that_mean_this_machine(viewer: Server, host: str) -> None:
    if host.startswith("[") and STARLETTE < (1, 0):
        pytest.skip("starlette before 1.0 refuses each host with colons")
    assert ask(viewer, Host=host).status == 200


def test_a_page_of_the_same_origin_is_answered(viewer: Server) -> None:
    assert ask(viewer, TILE, Host="localhost:9000", Origin="http://localhost:9000").status == 200
    assert ask(viewer, TILE, Sec_Fetch_Site="same-origin", Sec_Fetch_Mode="cors", Sec_Fetch_Dest="empty").status == 200


def test_a_link_on_another_page_opens_the_viewer_and_a_frame_does_not(viewer: Server) -> None:
    from_elsewhere = {"Sec_Fetch_Site": "cross-site", "Sec_Fetch_Mode": "navigate"}
    assert ask(viewer, **from_elsewhere, Sec_Fetch_Dest="document").status == 200
    assert ask(viewer, **from_elsewhere, Sec_Fetch_Dest="iframe").status == 403
    assert ask(viewer, Sec_Fetch_Site="cross-site", Sec_Fetch_Mode="no-cors", Sec_Fetch_Dest="script").status == 403


@pytest.mark.parametrize("path", ["", "main.js", "api/info", "api/nothing", "nothing.js", "../server.py"])
@pytest.mark.parametrize("headers", [{}, {"Host": "evil.example"}, {"Origin": "null"}])
def test_every_answer_carries_the_policy(viewer: Server, path: str, headers: dict[str, str]) -> None:
    found = ask(viewer, path, **headers).headers
    assert found["content-security-policy"].startswith(
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'"
    )
    assert "frame-ancestors 'none'" in found["content-security-policy"]
    assert "unsafe" not in found["content-security-policy"]
    assert found["x-content-type-options"] == "nosniff"
    assert found["referrer-policy"] == "no-referrer"
    assert found["cross-origin-opener-policy"] == found["cross-origin-resource-policy"] == "same-origin"


def test_a_ticket_leads_to_the_page_once(viewer: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    first = viewer.once()
    assert ask(viewer, url=first, Host="evil.example").status == 400
    found = ask(viewer, url=first)
    assert (found.status, found.headers["location"]) == (303, f"/{token_of(viewer)}/")
    assert ask(viewer, url=first).status == 404
    monkeypatch.setattr("attlas.view.server._TICKET_SECONDS", -1.0)  # it has expired
    assert ask(viewer, url=viewer.once()).status == 404
