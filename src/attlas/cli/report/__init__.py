"""The report: one HTML file that needs nothing else, from a reading."""

from attlas.cli.report.page import page

__all__ = ["page"]
