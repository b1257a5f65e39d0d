import matplotlib.image
import numpy as np
import pytest

from qsparse.errors import UserError
from qsparse.report import png
from qsparse.report.plot import _COLOURS

SIZE = {1: (1800, 817), 3: (1800, 817)}  # pixels: width, height of a legend of one line


def make_row(variant, accuracy, microseconds, weight_bytes, **fields):
    latency = {"1": microseconds / 3, "1024": microseconds}
    return {
        "run": "runs/3", "variant": variant, "peer": None, "device": "cpu", "gpu": None, "accuracy": accuracy,
        "latency_us": latency,
        "latency_us_p10": {batch: 0.97 * us for batch, us in latency.items()},
        "latency_us_p90": {batch: 1.05 * us for batch, us in latency.items()},
        "weight_bytes": weight_bytes, **fields,
    }  # fmt: skip


ROWS = [
    make_row("baseline", 0.978, 900, 814_120),
    make_row("int8", 0.977, 450, 205_392),
    make_row("csr-0.1", 0.961, 1300, 164_744),
]


def picture(rows, path, **options):
    assert png(rows, path, **options) == path
    assert [file.name for file in path.parent.iterdir()] == [path.name]  # no temporary file stays
    return np.rint(255 * matplotlib.image.imread(path)[..., :3]).astype(int)


def halves(image):
    """The two panels, without the legend below them."""
    height, width, _ = image.shape
    return image[: height - 150, : width // 2], image[: height - 150, width // 2 :]


def pixels_of(image, colour):
    return int((image == [int(colour[i : i + 2], 16) for i in (1, 3, 5)]).all(axis=2).sum())


@pytest.mark.parametrize("rows", [ROWS[:1], ROWS])
def test_two_panels_show_each_row(rows, tmp_path):
    image = picture(rows, tmp_path / "p.png")
    assert image.shape[1::-1] == SIZE[len(rows)]
    for panel in halves(image):
        assert pixels_of(panel, "#000000") > 200
        for colour in _COLOURS[: len(rows) - 1]:
            assert pixels_of(panel, colour) > 100
    assert all(pixels_of(image, colour) == 0 for colour in _COLOURS[len(rows) - 1 : -1])
    assert (halves(image)[0] != halves(image)[1]).any()


def test_left_is_latency_and_right_is_bytes(tmp_path):
    left, right = halves(picture(ROWS, tmp_path / "p.png"))
    slower = [ROWS[0], make_row("int8", 0.977, 2000, 205_392), ROWS[2]]
    slower_left, slower_right = halves(picture(slower, tmp_path / "p.png"))
    assert (slower_left != left).any()
    assert (slower_right == right).all()
    larger = [ROWS[0], make_row("int8", 0.977, 450, 405_392), ROWS[2]]
    larger_left, larger_right = halves(picture(larger, tmp_path / "p.png"))
    assert (larger_left == left).all()
    assert (larger_right != right).any()


def test_positions_are_in_order(tmp_path):
    """int8 is the fastest of the three, csr the smallest and the least accurate."""

    def centre(panel, colour):
        rgb = [int(colour[i : i + 2], 16) for i in (1, 3, 5)]
        ys, xs = np.nonzero((panel == rgb).all(axis=2))
        return xs.mean(), ys.mean()

    left, right = halves(picture(ROWS, tmp_path / "p.png"))
    int8, csr = _COLOURS[:2]
    assert centre(left, int8)[0] < centre(left, csr)[0]
    assert centre(right, csr)[0] < centre(right, int8)[0]
    for panel in (left, right):
        assert centre(panel, int8)[1] < centre(panel, csr)[1]  # higher up: more accurate


def test_the_batch_chooses_the_latency(tmp_path):
    rows = [ROWS[0], ROWS[1] | {"latency_us": {"1": 5000.0, "1024": 450.0}}]
    left, right = halves(picture(rows, tmp_path / "p.png"))
    other_left, other_right = halves(picture(rows, tmp_path / "p.png", batch=1))
    assert (left != other_left).any()
    assert (right == other_right).all()


def test_twelve_rows_of_two_runs_and_devices(tmp_path):
    rows = [make_row(f"v{i}", 0.9 + i / 200, 100.0 * (i + 1), 10_000 * (i + 1), run=f"runs/{i % 2}") for i in range(11)]
    rows += [make_row("torch_fp16_graph", 0.97, 24, 407_060, peer="torch_fp16_graph", device="cuda", gpu="NVIDIA H200")]
    image = picture(rows, tmp_path / "p.png")
    assert image.shape[0] > SIZE[1][1]  # the legend needs more lines; the panels do not pay for it
    for panel in (image[: image.shape[0] - 300, :900], image[: image.shape[0] - 300, 900:]):
        assert all(pixels_of(panel, colour) > 20 for colour in _COLOURS)


def test_points_on_one_another_are_all_seen(tmp_path):
    rows = [make_row(name, 0.97, 100, 1000) for name in ("a", "b", "c")]
    for panel in halves(picture(rows, tmp_path / "p.png")):
        assert all(pixels_of(panel, colour) > 10 for colour in _COLOURS[:3])


def test_rows_without_latency_still_show_their_bytes(tmp_path):
    row = make_row("int8", 0.97, 100, 1000) | {"latency_us": {}}
    left, right = halves(picture([row], tmp_path / "p.png"))
    assert pixels_of(left, _COLOURS[0]) == 0
    assert pixels_of(right, _COLOURS[0]) > 100


def test_nothing_to_plot_and_nowhere_to_write(tmp_path):
    with pytest.raises(UserError, match="nothing to plot"):
        png([{"variant": "int8"}], tmp_path / "p.png")
    with pytest.raises(UserError, match=r"Cannot write the picture .*missing/p\.png: No such file"):
        png(ROWS, tmp_path / "missing" / "p.png")
    (tmp_path / "folder.png").mkdir()
    with pytest.raises(UserError, match="Cannot write the picture"):
        png(ROWS, tmp_path / "folder.png")
    assert [file.name for file in tmp_path.iterdir()] == ["folder.png"]
    with pytest.raises(UserError, match=r"Cannot write the picture .*: File name too long"):
        png(ROWS, tmp_path / f"{'x' * 250}.png")


@pytest.mark.parametrize("name", ["$^$", r"$\\foo$", "_x"])
def test_a_name_is_neither_a_formula_nor_hidden(name, tmp_path):
    plain = picture([make_row("int8", 0.97, 100, 1000)], tmp_path / "p.png")
    named = picture([make_row(name, 0.97, 100, 1000)], tmp_path / "p.png")
    assert (plain[-60:] != 255).any()
    assert (named[-60:] != 255).any()
