"""Rows (from qsparse.measure, or read back from rows.jsonl) in; a table or a picture out."""

from qsparse.report.plot import png
from qsparse.report.rows import flaw, newest
from qsparse.report.table import show, table

__all__ = ["flaw", "newest", "png", "show", "table"]
