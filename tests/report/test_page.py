"""The page as a person meets it, in a headless Chromium: it opens, sorts, filters, shows settings, and fits a phone."""

from __future__ import annotations

import json
import random
import re

import pytest

from qsparse.errors import UserError
from qsparse.report.page import environments, html

BATCHES = ("1", "64", "1024", "10000")


def row(variant, accuracy=0.97, us=100.0, size=200_000, run="runs/1", **fields):
    latency = {batch: us * (1 + place) for place, batch in enumerate(BATCHES)}
    return {
        "op": "mlp", "run": run, "variant": variant, "peer": None, "sizes": [784, 256, 10], "dtype": "float32",
        "activations": None, "granularity": None, "calibration": None, "method": None, "format": "dense",
        "density": None, "accuracy": accuracy, "accuracy_change": 100 * (accuracy - 0.97), "agreement": 0.99,
        "latency_us": latency, "latency_us_p10": {b: 0.9 * u for b, u in latency.items()},
        "latency_us_p90": {b: 1.1 * u for b, u in latency.items()}, "speedup": {b: 100 / us for b in BATCHES},
        "weight_bytes": size, "kernel": "gemm:cpu", "device": "cpu", "gpu": None, "cpu": "a CPU", "threads": 2,
        "torch": "2.0", "simulated": False, "seed": 0, "date": "2026-01-01T00:00:00+00:00", **fields,
    }  # fmt: skip


ROWS = [
    row("baseline", 0.97, 100, 800_000),
    row("int8", 0.969, 50, 200_000, dtype="int8", granularity="channel", method="absmax"),
    row("csr-0.1", 0.955, 210, 160_000, format="csr", density=0.1),
    row("csr-0.02", 0.90, 40, 30_000, format="csr", density=0.02),
    row("</script><b id=bad>", 0.80, 90, 100_000),
    {**row("int4-sim", 0.96, dtype="int4", simulated=True), "latency_us": None, "speedup": None, "weight_bytes": None},
]
KERNELS = [
    {
        "op": "gemm", "tier": "sm90", "dtype": "float16", "shape": [m, m, m], "density": None, "us": us,
        "peer": "cublas", "peer_us": 0.9 * us, "ratio": 0.9, "tflops": 2e-6 * m**3 / us, "gbps": 6e-3 * m * m / us,
        "ceiling_tflops": 700.0, "ceiling_gbps": 4000.0, "gpu": "NVIDIA H200",
    }
    for m, us in ((512, 5.0), (4096, 210.0))
]  # fmt: skip


@pytest.fixture
def opened(browser, tmp_path):
    """A function that writes a page of some rows and opens it; a console error or a request fails the test."""
    faults, contexts = [], []

    def load(page, path):
        page.on(
            "console", lambda message: faults.append(message.text) if message.type in ("error", "warning") else None
        )
        page.on("pageerror", lambda error: faults.append(str(error)))
        page.on("request", lambda request: faults.append(request.url) if not own(request.url) else None)
        page.goto(path.as_uri())
        page.wait_for_selector("#latency .main-svg")

    def own(url):
        return url.startswith(("file://", "data:", "blob:"))

    def open_page(rows=ROWS, width=1200, scheme="light", **options):
        path = html(rows, tmp_path / "report.html", **options)
        contexts.append(browser.new_context(viewport={"width": width, "height": 800}, color_scheme=scheme))
        page = contexts[-1].new_page()
        load(page, path)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert faults == []


def column(page, head):
    """The texts of a column of the visible rows, from the top."""
    place = page.locator("#rows thead th").all_inner_texts().index(head)
    return page.evaluate(
        "place => [...document.querySelectorAll('#rows tbody tr')].map(row => row.cells[place].textContent)",
        place,
    )


def until(page, expression):
    """Wait until JavaScript gives true (the page forbids the evaluation that playwright would wait by)."""
    for _ in range(100):
        if page.evaluate(expression):
            return
        page.wait_for_timeout(50)
    pytest.fail(f"never true: {expression}")


def filtered(page, text, count):
    page.fill("#filter", text)
    page.wait_for_timeout(200)  # the page waits for the next key, too
    until(page, f"document.getElementById('count').textContent.startsWith('{count} of ')")


def test_it_opens_with_all_rows(opened):
    page = opened()
    assert column(page, "variant") == [one["variant"] for one in ROWS]
    assert page.locator("#bad").count() == 0
    assert page.locator("#crossover-section").is_visible()
    assert not page.locator("#roofline-section").is_visible()
    assert page.locator("#environment tbody tr").count() == 1
    assert "6 rows of 1 run" in page.inner_text("#summary")


def test_a_head_sorts_both_ways_and_what_is_missing_comes_last(opened):
    page = opened()
    head = page.get_by_role("button", name="batch 1024", exact=True)
    head.click()
    up = column(page, "variant")
    assert up == ["csr-0.02", "int8", "</script><b id=bad>", "baseline", "csr-0.1", "int4-sim"]
    assert page.locator("th[aria-sort=ascending]").inner_text() == "batch 1024"
    head.click()
    assert column(page, "variant") == [*up[-2::-1], "int4-sim"]
    assert page.locator("th[aria-sort]").get_attribute("aria-sort") == "descending"
    page.get_by_role("button", name="variant", exact=True).press("Enter")  # by the keyboard, too
    assert column(page, "variant")[0] == "</script><b id=bad>"


FILTERS = {
    "csr": ["csr-0.1", "csr-0.02"],
    "CSR accuracy>95": ["csr-0.1"],
    "density<0.05": ["csr-0.02"],
    "dtype=int8": ["int8"],
    "batch1024<200": ["int8", "csr-0.02"],
    "simulated": ["int4-sim"],
    "nothing-has-this": [],
    "accuracy>": [],
    "": [one["variant"] for one in ROWS],
}


def test_a_filter_filters_the_table_and_the_plots(opened):
    page = opened()
    for text, left in FILTERS.items():
        filtered(page, text, len(left))
        assert column(page, "variant") == left
        drawn = [one for one in ROWS if one["variant"] in left and one["weight_bytes"]]
        assert page.locator("#bytes .scatterlayer .point").count() == len(drawn)


def test_hover_shows_the_settings(opened):
    page = opened()
    filtered(page, "dtype=int8", 1)
    box = page.locator("#latency .scatterlayer .point").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    hover = page.locator("#latency .hovertext").text_content()
    for said in ("int8", "run runs/1", "granularity channel", "method absmax", "96.90 %", "150 µs"):
        assert said in hover


def test_the_batch_is_chosen(opened):
    page = opened()
    assert page.input_value("#batch") == "1024"
    page.select_option("#batch", "1")
    assert "batch 1" in page.text_content("#latency .gtitle")
    assert "csr-0.02 of runs/1, 90.00 %, 40.0 µs" in page.get_attribute("#latency", "aria-label")


def test_plots_are_told_in_words(opened):
    page = opened(kernels=KERNELS)
    for place in ("latency", "bytes", "crossover", "roofline"):
        assert page.get_attribute(f"#{place}", "role") == "img"
        assert len(page.get_attribute(f"#{place}", "aria-label")) > 40
    # On the front: what no other row beats in both.
    said = page.get_attribute("#latency", "aria-label")
    assert "int8" in said
    assert "csr-0.1 " not in said
    page.locator("summary").click()
    assert "csr-0.02 of runs/1" in page.inner_text("#fronts")


def test_the_roofline_shows_kernels_and_library(opened):
    page = opened(kernels=KERNELS)
    assert page.locator("#roofline .scatterlayer .point").count() == 2 * len(KERNELS)
    assert "of 700 " in page.get_attribute("#roofline", "aria-label")


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_it_fits_a_phone_light_and_dark(opened, scheme):
    page = opened(width=360, scheme=scheme, kernels=KERNELS)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    paper, ink, axis = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color,"
        " getComputedStyle(document.querySelector('#latency .xtitle')).fill]"
    )
    brightness = [sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in (paper, ink, axis)]
    assert (
        (brightness[0] > 600 > 200 > brightness[1])
        if scheme == "light"
        else (brightness[0] < 200 < 600 < brightness[1])
    )
    assert brightness[2] == brightness[1]


def test_a_change_of_the_scheme_redraws(opened):
    page = opened()
    before = page.evaluate("getComputedStyle(document.querySelector('#bytes .xtitle')).fill")
    page.emulate_media(color_scheme="dark")
    until(page, f"getComputedStyle(document.querySelector('#bytes .xtitle')).fill !== '{before}'")


def test_two_thousand_rows(opened, tmp_path):
    chance = random.Random(0)
    rows = [
        row(
            f"csr-{n}",
            chance.random(),
            10 + 1000 * chance.random(),
            chance.randint(1, 10**6),
            f"runs/{n % 7}",
            density=0.1,
        )
        for n in range(2000)
    ]
    page = opened(rows)
    assert (tmp_path / "report.html").stat().st_size < 15e6
    took = page.evaluate(
        "() => { const start = performance.now(); document.querySelector('#rows th:nth-child(3) button').click();"
        " document.body.offsetHeight; return performance.now() - start; }"
    )
    first = column(page, "accuracy")
    page.get_by_role("button", name="Show all 2,000 rows").click()
    accuracies = [float(text.removesuffix(" %")) for text in column(page, "accuracy")]
    assert accuracies == sorted(accuracies)
    assert len(accuracies) == 2000
    assert [float(text.removesuffix(" %")) for text in first] == accuracies[: len(first)]
    assert took < 1000  # milliseconds, layout included: what the page promises


def test_what_a_row_says_stays_text(tmp_path):
    page = html(ROWS, tmp_path / "p.html", notes=["<!-- </script> -->"]).read_text()
    data = re.search(r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL)[1]
    assert json.loads(data)["notes"] == ["<!-- </script> -->"]
    assert json.loads(data)["rows"][4]["variant"] == "</script><b id=bad>"
    assert [file.name for file in tmp_path.iterdir()] == ["p.html"]


def test_environments_are_told_apart():
    rows = [row("a"), row("b", date="2026-01-03"), row("c", torch="3.0")]
    found = environments(rows)
    assert [(place["torch"], place["rows"]) for place in found] == [("2.0", "2"), ("3.0", "1")]
    assert found[0]["dates"] == "2026-01-01T00:00:00+00:00 to 2026-01-03"


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    with pytest.raises(UserError, match="nowhere"):
        html(ROWS, tmp_path / "nowhere" / "p.html")
