"""Who is let in: the guard alone, without a server."""

import re
import secrets

import pytest

from attlas.view import guard
from attlas.view.guard import Guard, Refusal, Request

TOKEN = "t0ken"
HOST = (b"host", b"127.0.0.1:8750")


def ask(target: str, *headers: tuple[bytes, bytes], method: str = "GET", query: str = "", door: Guard | None = None):
    given = headers if any(name == b"host" for name, _ in headers) else (HOST, *headers)
    return (door or Guard(TOKEN)).admit(Request(method, target.encode(), query.encode(), given))


def status(*given: object, **more: object) -> int:
    found = ask(*given, **more)
    return found.status if isinstance(found, Refusal) else 200


def test_paths_lose_the_token() -> None:
    assert ask("/t0ken/") == "/"
    assert ask("/t0ken/api/info") == "/api/info"
    assert ask("/t0ken/main.js") == "/main.js"
    found = ask("/t0ken")
    assert isinstance(found, Refusal)
    assert (found.status, found.location) == (308, "/t0ken/")


@pytest.mark.parametrize(
    "target", ["/", "", "*", "//t0ken/", "/T0KEN/", "/t0ke/", "/t0kens/", "/t0ken%2f", "/api/info", "/%740ken/",
               "/t0ken;/", "/../t0ken/", "/./t0ken/", "t0ken", "http://127.0.0.1:8750/t0ken/"]
)  # fmt: skip
def test_other_paths_lead_nowhere(target: str) -> None:
    assert status(target) == 404


def test_tokens_are_long_and_never_the_same() -> None:
    tokens = {Guard().token for _ in range(50)}
    assert len(tokens) == 50
    assert all(re.fullmatch(r"[\w-]{32}", token) for token in tokens)  # 192 bits


def test_the_token_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []

    def compare(a: bytes, b: bytes) -> bool:
        seen.append((a, b))
        return a == b

    monkeypatch.setattr(secrets, "compare_digest", compare)
    assert status("/wrong/") == 404
    assert status("/t0ken/") == 200
    assert seen == [(b"wrong", b"t0ken"), (b"t0ken", b"t0ken")]


def test_a_ticket_leads_to_the_page_once(monkeypatch: pytest.MonkeyPatch) -> None:
    door = Guard(TOKEN)
    ticket, late = door.ticket(), door.ticket()
    assert len({ticket, late, TOKEN}) == 3
    assert status(f"/{ticket}", method="HEAD", door=door) == 404  # looking does not use it up
    assert status(f"/{ticket}/api/info", door=door) == 404
    found = ask(f"/{ticket}", door=door)
    assert isinstance(found, Refusal)
    assert (found.status, found.location) == (303, "/t0ken/")
    assert status(f"/{ticket}", door=door) == 404
    now = guard.time.monotonic()
    monkeypatch.setattr(guard.time, "monotonic", lambda: now + 61.0)
    assert status(f"/{late}", door=door) == 404


@pytest.mark.parametrize("host", ["127.0.0.1:8750", "localhost:8750", "127.0.0.1", "localhost:9000", "[::1]:22"])
def test_hosts_that_mean_this_machine(host: str) -> None:
    assert status("/t0ken/", (b"host", host.encode())) == 200


@pytest.mark.parametrize(
    "host", ["", "evil.example", "evil.example:8750", "127.0.0.1.evil.example", "127.0.0.1:", "127.0.0.1:x",
             "127.0.0.2", "localhost.", "localhost:8750:1", "0.0.0.0:8750", "127.0.0.1@evil.example", "::1",
             "127.0.0.1:123456", "localhost:٣"]
)  # fmt: skip
def test_other_hosts_are_refused(host: str) -> None:
    assert status("/t0ken/", (b"host", host.encode())) == 421


def test_a_host_must_be_named_once() -> None:
    assert Guard(TOKEN).admit(Request("GET", b"/t0ken/", b"", ())).status == 421
    assert status("/t0ken/", HOST, HOST) == 421


@pytest.mark.parametrize(
    ("origin", "expected"),
    [("http://127.0.0.1:8750", 200), ("http://localhost:8750", 403), ("https://127.0.0.1:8750", 403), ("null", 403),
     ("http://127.0.0.1:8751", 403), ("http://evil.example", 403), ("", 403)],
)  # fmt: skip
def test_origins(origin: str, expected: int) -> None:
    assert status("/t0ken/api/info", HOST, (b"origin", origin.encode())) == expected


@pytest.mark.parametrize("target", ["/t0ken/", "/t0ken/api/info", "/t0ken/main.js"])
@pytest.mark.parametrize("site", ["same-origin", "none", "same-site", "cross-site", "odd"])
def test_sites(target: str, site: str) -> None:
    expected = 200 if site in ("same-origin", "none") else 403
    fetch = (b"sec-fetch-site", site.encode())
    assert status(target, fetch) == expected
    assert status(target, fetch, (b"sec-fetch-mode", b"no-cors"), (b"sec-fetch-dest", b"script")) == expected
    frame = (fetch, (b"sec-fetch-mode", b"navigate"), (b"sec-fetch-dest", b"iframe"))
    assert status(target, *frame) == expected
    # A link on another page leads to the viewer's page, and to nothing else of it.
    link = (fetch, (b"sec-fetch-mode", b"navigate"), (b"sec-fetch-dest", b"document"))
    assert status(target, *link) == (200 if target == "/t0ken/" else expected)


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "OPTIONS", "CONNECT", "TRACE", "get", "BREW"])
def test_other_methods_are_refused(method: str) -> None:
    assert status("/t0ken/", method=method) == 405


def test_bodies_are_refused() -> None:
    assert status("/t0ken/", HOST, (b"content-length", b"3")) == 413
    assert status("/t0ken/", HOST, (b"transfer-encoding", b"chunked")) == 413
    assert status("/t0ken/", HOST, (b"content-length", b"0")) == 200


def test_long_requests_are_refused() -> None:
    assert status("/t0ken/" + "a" * 4090) == 414
    assert status("/t0ken/", query="a" * 4090) == 414
    assert status("/t0ken/" + "a" * 2000, query="a" * 2000) == 200
    assert status("/t0ken/", HOST, (b"cookie", b"a" * 17_000)) == 431
    assert status("/t0ken/", HOST, *((b"a", b"") for _ in range(100))) == 431


def test_every_answer_is_told_how_to_be_read() -> None:
    found = {name.decode(): value.decode() for name, value in guard.HEADERS}
    assert found["content-security-policy"].startswith(
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'"
    )
    assert "unsafe" not in found["content-security-policy"]
    assert found["x-content-type-options"] == "nosniff"
    assert found["referrer-policy"] == "no-referrer"
    assert found["cross-origin-opener-policy"] == found["cross-origin-resource-policy"] == "same-origin"
