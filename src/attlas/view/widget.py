"""The viewer in the output of a notebook cell: questions and answers are messages, and no port is opened."""

from __future__ import annotations

import json
import secrets
import threading
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any

import anywidget
import traitlets

from attlas.view import bundle
from attlas.view.service import Answer, Service

_WORKER_COUNT = 2  # the kernel keeps its processors
_LOWEST_HEIGHT, _HIGHEST_HEIGHT = 240, 4000
_LONGEST_ID, _LONGEST_NAME, _MOST_FIELDS = 200, 40, 32  # longer than any that the page sends


class Viewer(anywidget.AnyWidget):
    """The page of the viewer as a notebook widget. Made by ``A.view()`` and ``atlas.view()``.

    Parameters
    ----------
    service : Service
        Who answers; it belongs to the widget from now on, and ends with it.
    height : int, default 640
        Height in CSS pixels, from 240 to 4000.
    state : mapping, optional
        Fields of the page's state to begin with, ``{"entry": 2, "head": "mean"}``.
    still : str, optional
        HTML that stands for the page where no kernel runs: in a saved notebook, and in one that was exported.

    Notes
    -----
    The page sends ``{"type": "get", "id", "name", "params"}`` and gets ``{"type": "answer", "id", "status", "kind",
    "progress", "final", "sampled"}`` with the body as one buffer. ``{"type": "cancel", "id"}`` takes a question back:
    one that has not begun is dropped, one that has stops between two tiles. Questions are answered on two threads
    of their own, so that the kernel stays free; messages are read when no cell is running.

    A notebook gets two outputs: the page, and below it the picture `still`, which the page hides once it is there.
    An exported notebook can show a widget only with a script from the web, and without a kernel it would be empty.

    Examples
    --------
    >>> import torch, attlas
    >>> from attlas.view import Service
    >>> from attlas.view.widget import Viewer
    >>> viewer = Viewer(Service(attlas.attend(torch.zeros(1, 1, 4, 8), torch.zeros(1, 1, 4, 8))))
    >>> viewer.height
    640
    >>> viewer.close()
    """

    _esm = bundle.widget_module()
    _css = bundle.styles()
    height = traitlets.Int(640).tag(sync=True)
    initial = traitlets.Dict().tag(sync=True)
    still_class = traitlets.Unicode("").tag(sync=True)  # of the element of the picture; "" where there is none

    def __init__(
        self, service: Service, height: int = 640, state: Mapping[str, Any] | None = None, *, still: str = ""
    ) -> None:
        self._service = service
        self._still = still
        self._wanted: dict[str, threading.Event] = {}  # questions by their ids, with what takes them back
        self._lock = threading.Lock()
        self._ended = False
        self._pool = ThreadPoolExecutor(_WORKER_COUNT, thread_name_prefix="attlas-view")
        still_class = f"attlas-still-{secrets.token_hex(8)}" if still else ""
        height = min(_HIGHEST_HEIGHT, max(_LOWEST_HEIGHT, height))
        super().__init__(height=height, initial=dict(state or {}), still_class=still_class)
        self.on_msg(self._take_message)
        if self.comm is not None:
            self.comm.on_close(lambda _: self.close())

    def close(self) -> None:
        """Take the page away, drop what is being computed, and end the service. Closing twice is no error."""
        with self._lock:
            ended, self._ended = self._ended, True
            for taken_back in self._wanted.values():
                taken_back.set()
            self._wanted.clear()
        if not ended:
            self._pool.shutdown(wait=False, cancel_futures=True)
            self._service.close()
        super().close()

    def _ipython_display_(self, **options: Any) -> None:
        """Put out the page, and the picture as an output of its own: exporters take the page of one that has both."""
        publish: Any = import_module("IPython.display").publish_display_data
        page = super()._repr_mimebundle_(**options)
        if page is not None:
            publish(*page)
        if self._still:
            picture = f"<div class='{self.still_class}'>{self._still}</div>"
            publish({"text/plain": "picture of the attention", "text/html": picture})

    def _repr_mimebundle_(self, **options: Any) -> tuple[dict[str, Any], dict[str, Any]] | None:
        """Return what the notebook shows; without a running kernel, a still picture."""
        bundle = super()._repr_mimebundle_(**options)
        if bundle is not None and self._still:
            bundle[0]["text/html"] = self._still
        return bundle

    def _take_message(self, _: object, content: Any, buffers: Sequence[Any]) -> None:
        """Take a message of the page."""
        if not isinstance(content, dict) or not isinstance(name := content.get("id"), str) or len(name) > _LONGEST_ID:
            return
        if content.get("type") == "cancel":
            with self._lock:
                taken_back = self._wanted.pop(name, None)
            if taken_back is not None:
                # An event: what computes the answer looks at it, and stops.
                taken_back.set()
        elif content.get("type") == "get":
            self._answer_in_thread(name, content.get("name"), content.get("params"))

    def _answer_in_thread(self, name: str, question: object, params: object) -> None:
        """Have a question answered on another thread."""
        if not _is_question(question, params):
            self._send_answer(name, Answer("json", b'{"error": "the message is no question"}', final=False, status=400))
            return
        taken_back = threading.Event()
        with self._lock:
            if self._ended or name in self._wanted:
                return
            self._wanted[name] = taken_back
            self._pool.submit(self._answer_unless_taken_back, name, question, params, taken_back)

    def _answer_unless_taken_back(self, name: str, question: Any, params: Any, taken_back: threading.Event) -> None:
        """Answer a question, unless it was taken back before or meanwhile."""
        if taken_back.is_set():
            return
        answer = self._service.answer(question, params, wanted=lambda: not taken_back.is_set())
        with self._lock:
            waits = self._wanted.pop(name, None) is not None
        if waits:
            self._send_answer(name, answer)

    def _send_answer(self, name: str, answer: Answer) -> None:
        """Send an answer to the page, its body as bytes."""
        content = {"type": "answer", "id": name} | vars(answer)
        body = content.pop("body")
        if answer.status != 200:
            content["error"] = json.loads(body)["error"]
        self.send(content, [body])


def _is_question(question: object, params: object) -> bool:
    """Return whether a message has the form of a question: a name, and a few texts by name."""
    return (
        isinstance(question, str)
        and len(question) <= _LONGEST_NAME
        and isinstance(params, dict)
        and len(params) <= _MOST_FIELDS
        and all(isinstance(field, str) and isinstance(value, str) for field, value in params.items())
    )
