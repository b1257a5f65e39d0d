"""Rows on disk that survive whatever ends the process: one finished cell is one line."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
from pathlib import Path
from typing import Any

from qsparse import checkpoint
from qsparse.errors import UserError


class Journal:
    """DIRECTORY/rows.jsonl, open for one sweep at a time.

    A line is appended by one write and is on the disk (fsync) when `append` returns. Of a line that a kill or a crash
    tore, only the last can be: it is cut off when the file is opened next, and its cell counts as not done.

    Raises UserError while another sweep holds the directory, and where the file cannot be read or written.
    """

    def __init__(self, directory: Path) -> None:
        self.path = directory / checkpoint.ROWS
        try:
            self._file = os.open(self.path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o666)
        except OSError as error:
            raise UserError(f"cannot write {self.path}: {error.strerror}") from error
        try:
            with contextlib.suppress(OSError):  # a file system without locks
                try:
                    fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError:
                    raise UserError(f"another sweep is at work in {directory}: wait for it, or give --out") from None
            self._mend()
            self.rows = checkpoint.read_rows(directory)
        except BaseException:
            os.close(self._file)
            raise

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._file)

    def append(self, row: dict[str, Any]) -> None:
        """Write `row` as the next line. Raises ValueError for NaN or infinity, OSError where the disk refuses it."""
        line = (json.dumps(row, allow_nan=False) + "\n").encode()
        if os.write(self._file, line) < len(line):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
        os.fsync(self._file)
        self.rows.append(row)

    def _mend(self) -> None:
        """Finish a last line that lacks its end only, cut one off that is torn."""
        text = self.path.read_bytes()
        last = text[text.rfind(b"\n") + 1 :]
        if not last:
            return
        try:
            whole = isinstance(checkpoint.parse_json(last), dict)
        except ValueError:
            whole = False
        if whole:
            os.write(self._file, b"\n")
        else:
            os.ftruncate(self._file, len(text) - len(last))
        os.fsync(self._file)
