"""The grid: every combination once, a network's baseline before its cells, and refusals that name the option."""

from __future__ import annotations

import pytest

from qsparse.errors import UserError
from qsparse.sweep import grid


def read(tmp_path, text):
    file = tmp_path / "sweep.toml"
    file.write_text(text)
    return grid.read(file)


def test_every_combination_once(tmp_path):
    plan = read(
        tmp_path,
        """
        [train]
        hidden = [16, [8, 8], 0]
        seed = [0, 1]
        [[quantize]]
        dtype = ["int8", "fp16", "int8"]
        [[sparsify]]
        density = [0.5, 0.1]
        format = ["csr", "coo"]
        [measure]
        batches = [1]
        """,
    )
    assert len(plan.cells) == 3 * 2 * (1 + 2 + 4)
    assert len({cell.key for cell in plan.cells}) == len(plan.cells)
    assert [cell.train["hidden"] for cell in plan.cells if cell.kind == "baseline"][::2] == [[16], [8, 8], []]
    assert plan.measuring == {"batches": [1]}
    seen = set()
    for cell in plan.cells:
        if cell.kind == "baseline":
            seen.add(cell.network)
        assert cell.network in seen
    assert len(seen) == 6


def test_a_network_needs_no_table(tmp_path):
    assert [cell.settings for cell in read(tmp_path, "quantize = {dtype = 'int8'}").cells] == [
        {"train": {}},
        {"train": {}, "quantize": {"dtype": "int8"}},
    ]


def test_a_range_is_one_value(tmp_path):
    cells = read(tmp_path, "[quantize]\nrange = [0, 6]\n").cells
    assert cells[1].options == {"range": [0, 6]}
    cells = read(tmp_path, "[quantize]\nrange = [[0, 6], [0, 8]]\n").cells
    assert [cell.options["range"] for cell in cells[1:]] == [[0, 6], [0, 8]]


def test_a_range_of_weights_is_one_value_too(tmp_path):
    cells = read(tmp_path, "[quantize]\nweight_range = [-1, 1]\n").cells
    assert [cell.options["weight_range"] for cell in cells[1:]] == [[-1, 1]]


@pytest.mark.parametrize("train", ["hidden = '../../x'", "seed = '/../x'", f"hidden = [{[4] * 200}]"])
def test_no_setting_leads_out_of_the_networks_directory(tmp_path, train):
    name = read(tmp_path, f"[train]\n{train}\n").cells[0].network
    assert "/" not in name
    assert len(name) < 128


def test_the_order_of_settings_does_not_count(tmp_path):
    one = read(tmp_path, "[quantize]\ndtype = 'int4'\nsimulate = true\n").cells[1]
    other = read(tmp_path, "[quantize]\nsimulate = true\ndtype = 'int4'\n").cells[1]
    assert one.key == other.key


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ("[quantise]", "quantise"),
        ("[quantize]\nbits = 8", "bits"),
        ("[train]\ndevice = 'cpu'", "device"),
        ("[sparsify]\ndensity = []", "density"),
        ("quantize = 'int8'", "quantize"),
        ("[measure]\nbatches = [0]", "batches"),
        ("[measure]\nbatches = [true]", "batches"),
        ("[measure]\nbatches = [2147483648]", "batches"),
        ("[measure]\nbudget_s = 0", "budget_s"),
        ("[measure]\nbudget_s = inf", "budget_s"),
        ("[measure]\nbudget_s = true", "budget_s"),
        ("[[measure]]\nbatches = [1]\n[[measure]]\nbatches = [4]", "2 tables"),
        ("a = " + "[" * 50_000, "nested too deeply"),
        ("[train", "TOML"),
        ("[train]\nseed = 2026-11-30", r"\[train\] seed holds a date"),
        ("[quantize]\npercentile = nan", r"\[quantize\] percentile holds a date, NaN"),
    ],
)
def test_refusals_name_what_is_wrong(tmp_path, text, named):
    with pytest.raises(UserError, match=named):
        read(tmp_path, text)


def test_a_missing_file_is_named(tmp_path):
    with pytest.raises(UserError, match=r"nowhere\.toml"):
        grid.read(tmp_path / "nowhere.toml")


@pytest.mark.parametrize(
    ("table", "option"),
    [
        ("[sparsify]\ndensity = 0.1\nauto = 'time'", "--auto"),
        ("[sparsify]\ndensity = 0.1\npruner = ['magnitude', 'random']\nsamples = 64", "--samples"),
        ("[[quantize]]\ndtype = ['int8', 'fp8']\ngroup = [32, 64]", "--group"),
    ],
)
def test_an_option_without_effect_in_any_cell_is_refused(tmp_path, table, option):
    with pytest.raises(UserError, match=rf"sweep.toml: \[(quantize|sparsify)\] {option} has no effect here"):
        read(tmp_path, table)


def test_an_option_with_an_effect_in_some_cells_is_not(tmp_path):
    text = "[sparsify]\ndensity = 0.1\nformat = ['csr', 'auto']\nauto = 'time'\nfinetune_epochs = [0, 2]\nlr = 0.1\n"
    assert len(read(tmp_path, text).cells) == 1 + 4
