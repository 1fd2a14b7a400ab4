"""The comm between a notebook's page and its kernel, played."""

from __future__ import annotations

import threading
from typing import Any

__all__ = ["FakeComm"]


class FakeComm:
    """Plays the kernel's side of a comm: keeps what is sent."""

    made: list[FakeComm]

    def __init__(self, **opened: Any) -> None:
        self.comm_id, self.kernel, self.sent, self.closed = "played", object(), [], False
        self.arrived = threading.Condition()
        self.made.append(self)

    def send(self, data: Any = None, metadata: Any = None, buffers: Any = None) -> None:
        with self.arrived:
            self.sent.append((data, buffers))
            self.arrived.notify_all()

    def open(self, *given: Any, **named: Any) -> None:
        pass

    def close(self, *given: Any, **named: Any) -> None:
        self.closed = True

    def on_msg(self, hear: Any) -> None:
        self.hear = hear

    def on_close(self, hear: Any) -> None:
        self.gone = hear

    def answers(self) -> list[tuple[Any, Any]]:
        return [(data["content"], buffers) for data, buffers in self.sent if data.get("method") == "custom"]

    def page_says(self, content: Any) -> None:
        self.hear({"content": {"data": {"method": "custom", "content": content}}, "buffers": []})

    def answer_to(self, name: str) -> tuple[Any, bytes]:
        with self.arrived:
            found = self.arrived.wait_for(lambda: [a for a in self.answers() if a[0]["id"] == name], timeout=10)
        assert len(found) == 1
        return found[0][0], bytes(found[0][1][0])
