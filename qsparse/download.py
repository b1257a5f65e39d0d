"""Downloads that give up: torchvision's have no time-out, and a socket's does not cover the look-up of the name."""

from __future__ import annotations

import http.client
import queue
import tempfile
import threading
import urllib.error
import urllib.request
from pathlib import Path

from qsparse import idx
from qsparse.errors import UserError

TIMEOUT_S = 10.0
"""A download that brings nothing for so long is given up."""


def from_mirrors(mirrors: list[str], name: str, md5: str, directory: Path) -> None:
    """Fetch the file `name` into `directory`; it exists there only once its unpacked content has this MD5.

    Mirrors are tried in turn. Raises TimeoutError at the first one that stays silent (there is no network then, most
    likely), and otherwise the OSError or HTTPException of the last one.
    """
    failure: Exception = OSError(f"no mirror is known for {name}")
    for mirror in mirrors:
        with tempfile.NamedTemporaryFile(dir=directory, prefix=".partial-", delete=False) as file:
            partial = Path(file.name)
        try:
            partial.write_bytes(fetch(mirror + name))
            if idx.md5(idx.unpacked(partial)) == md5:
                partial.replace(directory / name)
                return
            failure = OSError(f"{mirror + name} is not the file that was expected: its MD5 differs")
        except TimeoutError:
            raise
        except (OSError, http.client.HTTPException) as error:
            failure = error
        except UserError:
            failure = OSError(f"{mirror + name} did not send a gzip file that unpacks")
        finally:
            partial.unlink(missing_ok=True)
    raise failure


def fetch(url: str) -> bytes:
    """Return what `url` serves. Raises TimeoutError where nothing arrives for TIMEOUT_S, not even a server's address.

    A thread reads, and this one waits: a thread that is given up ends by itself, and touches nothing of the caller's.
    """
    timeout = TIMEOUT_S
    chunks: queue.SimpleQueue[bytes | Exception] = queue.SimpleQueue()

    def read() -> None:
        try:
            # Twice the time: the queue's clock decides, and the socket's only ends the thread.
            with urllib.request.urlopen(url, timeout=2 * timeout) as response:
                while chunk := response.read1(1 << 16):
                    chunks.put(chunk)
            chunks.put(b"")
        except urllib.error.HTTPError as error:
            error.close()  # it holds the connection
            chunks.put(error)
        except Exception as error:
            chunks.put(error)

    threading.Thread(target=read, daemon=True).start()
    body = bytearray()
    while True:
        try:
            chunk = chunks.get(timeout=timeout)
        except queue.Empty:
            raise TimeoutError(f"{url} sent nothing for {timeout:g} seconds") from None
        if isinstance(chunk, Exception):
            raise chunk
        if not chunk:
            return bytes(body)
        body += chunk
