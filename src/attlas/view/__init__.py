"""The viewer: a matrix of any size in the browser, every number exact."""

from attlas.view.server import Server, serve
from attlas.view.service import Answer, Service

__all__ = ["Answer", "Server", "Service", "serve"]
