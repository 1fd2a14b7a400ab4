"""Who may ask: what every request must pass before anything looks at what it asks for."""

from __future__ import annotations

import secrets
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["HEADERS", "Guard", "Refusal", "Request"]

LONGEST_TARGET = 4096  # bytes of path and query; the page's own requests have under 300
LONGEST_HEADERS = 16_384  # bytes of all names and values
MOST_HEADERS = 100
_TICKET_SECONDS = 60.0
_LOOPBACK = ("127.0.0.1", "localhost", "[::1]")

# What every answer carries. The page may load its own files and nothing else, run no inline script, sit in no frame,
# and tell no other page where it was; other pages may not load anything of it.
HEADERS = (
    (
        b"content-security-policy",
        b"default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' blob: data:; connect-src 'self'; "
        b"base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    ),
    (b"x-content-type-options", b"nosniff"),
    (b"referrer-policy", b"no-referrer"),
    (b"cross-origin-opener-policy", b"same-origin"),
    (b"cross-origin-resource-policy", b"same-origin"),
)


@dataclass(frozen=True)
class Request:
    """What a request says of itself, as it came over the wire.

    Parameters
    ----------
    method : str
        As it was sent.
    target : bytes
        Path, not decoded.
    query : bytes
        What stands after the question mark.
    headers : sequence of (bytes, bytes)
        Names in small letters, and values.
    version : str
        Of HTTP.
    """

    method: str
    target: bytes
    query: bytes
    headers: Sequence[tuple[bytes, bytes]]
    version: str = "1.1"

    def values(self, name: bytes) -> list[str]:
        """Return every value of a header, in the order they came."""
        return [value.decode("latin-1").strip() for key, value in self.headers if key == name]


@dataclass(frozen=True)
class Refusal:
    """Why a request is not answered.

    Parameters
    ----------
    status : int
        HTTP status.
    text : str
        One line for a person who reads it.
    location : str
        Where to go instead; empty for nowhere.
    """

    status: int
    text: str
    location: str = ""


class Guard:
    """Let in requests of the page that this server sent, and nobody else's.

    Parameters
    ----------
    token : str, optional
        First segment of every path; the default is 192 random bits.

    Notes
    -----
    The server listens on the loopback interface only, so that a request comes from this machine: from another
    user, another program, or a page of the web in the user's own browser. The token keeps out whoever was not
    told the address; the name in ``Host`` a page whose domain was pointed at 127.0.0.1 (DNS rebinding);
    ``Origin`` and ``Sec-Fetch-Site`` pages of other origins. Any port may stand in ``Host``: the user may have
    forwarded one over SSH.

    The address that is given to a browser stands in its command line, where other users can read it. It
    therefore holds a ticket that leads to the page once, and not the token.
    """

    def __init__(self, token: str | None = None) -> None:
        self.token = secrets.token_urlsafe(24) if token is None else token
        self._token = self.token.encode("ascii")
        self._lock = threading.Lock()
        self._tickets: dict[bytes, float] = {}

    def ticket(self) -> str:
        """Return a path that leads to the page once, within a minute."""
        found = secrets.token_urlsafe(24)
        with self._lock:
            self._tickets[found.encode("ascii")] = time.monotonic() + _TICKET_SECONDS
        return found

    def admit(self, request: Request) -> str | Refusal:
        """Return what a request asks for, the path after the token; or why it is not answered."""
        refusal = _unfit(request) or _foreign(request)
        if refusal is not None:
            return refusal
        first, slash, rest = request.target.removeprefix(b"/").partition(b"/")
        if not secrets.compare_digest(first, self._token) or not request.target.startswith(b"/"):
            return self._stranger(request, first, slash + rest)
        if not slash:
            return Refusal(308, "The page's address ends in a slash.", f"/{self.token}/")
        if not rest and _navigates(request):
            return "/"
        return _embedded(request) or "/" + rest.decode("ascii", "replace")

    def _stranger(self, request: Request, first: bytes, rest: bytes) -> Refusal:
        """Answer a request without the token: a ticket leads to the page, anything else nowhere."""
        now = time.monotonic()
        with self._lock:
            self._tickets = {ticket: until for ticket, until in self._tickets.items() if until > now}
            known = next((ticket for ticket in self._tickets if secrets.compare_digest(first, ticket)), None)
            if known is not None and not rest and request.method == "GET":
                del self._tickets[known]
                return Refusal(303, "The page is there.", f"/{self.token}/")
        return Refusal(404, "There is nothing here. Open the whole address that attlas has printed.")


def _unfit(request: Request) -> Refusal | None:
    """Refuse what no page of ours sends: another version, too long, another method, a body."""
    if request.version not in ("1.0", "1.1"):
        return Refusal(505, "HTTP/1.1 is spoken here.")
    if len(request.target) + len(request.query) > LONGEST_TARGET:
        return Refusal(414, "The address is too long.")
    size = sum(len(name) + len(value) for name, value in request.headers)
    if size > LONGEST_HEADERS or len(request.headers) > MOST_HEADERS:
        return Refusal(431, "There are too many headers.")
    if request.method not in ("GET", "HEAD"):
        return Refusal(405, "Only GET and HEAD are answered.")
    if request.values(b"transfer-encoding") or any(value != "0" for value in request.values(b"content-length")):
        return Refusal(413, "A request must not have a body.")
    return None


def _foreign(request: Request) -> Refusal | None:
    """Refuse what was meant for another host, and what a page of another origin sends."""
    hosts = request.values(b"host")
    if len(hosts) != 1 or not _is_loopback(hosts[0]):
        return Refusal(421, "This is a viewer on 127.0.0.1, and no other host.")
    if any(origin != f"http://{hosts[0]}" for origin in request.values(b"origin")):
        return Refusal(403, "Pages of other origins are not answered.")
    return None


def _is_loopback(host: str) -> bool:
    """Tell whether a Host header names the loopback interface, with any port."""
    for name in _LOOPBACK:
        rest = host.removeprefix(name) if host.startswith(name) else "?"
        if not rest or (rest[0] == ":" and rest[1:].isascii() and rest[1:].isdecimal() and len(rest) <= 6):
            return True
    return False


def _embedded(request: Request) -> Refusal | None:
    """Refuse what a browser says another site asks for."""
    if any(site not in ("same-origin", "none") for site in request.values(b"sec-fetch-site")):
        return Refusal(403, "Pages of other sites are not answered.")
    return None


def _navigates(request: Request) -> bool:
    """Tell whether a person goes to a page, by a link on any site: that shows it, and tells the other site nothing."""
    return request.values(b"sec-fetch-mode") == ["navigate"] and request.values(b"sec-fetch-dest") == ["document"]
