"""The viewer: a matrix of any size in the browser, every number exact."""

from attlas.view.corpus import CorpusService
from attlas.view.corpus_offline import export_corpus
from attlas.view.live import export_live
from attlas.view.notebook import show
from attlas.view.offline import export
from attlas.view.server import Server, serve
from attlas.view.service import Answer, Service
from attlas.view.still import preview

__all__ = [
    "Answer",
    "CorpusService",
    "Server",
    "Service",
    "export",
    "export_corpus",
    "export_live",
    "preview",
    "serve",
    "show",
]
