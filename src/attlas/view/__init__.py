"""The viewer: a matrix of any size in the browser, every number exact."""

from attlas.view.service import Answer, Service

__all__ = ["Answer", "Service"]
