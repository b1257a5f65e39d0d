"""IDX, the file format of MNIST: two zero bytes, the type, the number of dimensions, their sizes big-endian, the data.

Described at the end of http://yann.lecun.com/exdb/mnist/. Only bytes (type 8) are read here.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import zlib
from pathlib import Path

import numpy as np

from qsparse.errors import UserError


def unpacked(path: Path) -> bytes:
    """Return the content of a file, gunzipped where its first bytes are gzip's, whatever its name.

    Raises UserError naming the file where it cannot be read or its gzip stream is damaged.
    """
    try:
        content = path.read_bytes()
        return gzip.decompress(content) if content[:2] == b"\x1f\x8b" else content
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{path} is damaged: its gzip stream does not unpack ({error})") from None
    except OSError as error:
        raise UserError(f"{path} cannot be read: {error.strerror or error}") from None


def md5(content: bytes) -> str:
    """Return the MD5 of unpacked content. It tells files apart and secures nothing, so a FIPS machine allows it."""
    return hashlib.md5(content, usedforsecurity=False).hexdigest()


def array(path: Path, content: bytes, dimensions: int) -> np.ndarray:
    """Return the read-only uint8 array that the unpacked `content` of `path` holds.

    Raises UserError naming the file where it is no IDX file of bytes with so many dimensions, is truncated or too long.
    """
    header = 4 + 4 * dimensions
    if content[:4] != bytes((0, 0, 8, dimensions)) or len(content) < header:
        raise UserError(
            f"{path} is not an IDX file of bytes in {dimensions} dimension{'s' * (dimensions > 1)}: it must begin with "
            f"'000008{dimensions:02x}' and {dimensions} size{'s' * (dimensions > 1)}, and has {len(content)} bytes "
            f"beginning with '{content[:4].hex()}'"
        )
    shape = tuple(int(size) for size in np.frombuffer(content, ">u4", dimensions, offset=4))
    announced, follow = math.prod(shape), len(content) - header
    if follow != announced:
        raise UserError(
            f"{path} is {'truncated' if follow < announced else 'too long'}: its header announces "
            f"{' x '.join(map(str, shape))} bytes, and {follow} follow"
        )
    return np.frombuffer(content, np.uint8, announced, offset=header).reshape(shape)
