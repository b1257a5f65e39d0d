"""Training steps against their oracle: every shape of network, a batch that ends early, the same bits twice."""

import itertools

import numpy as np
import pytest
import torch

from qsparse import kernels
from qsparse.kernels import _load
from qsparse.kernels import _train_mlp_grid_sm90 as grid
from qsparse.kernels import _train_mlp_host as host
from qsparse.kernels import _train_mlp_sm80 as sm80
from qsparse.kernels import _train_mlp_sm90 as sm90
from qsparse.kernels import _train_mlp_two_sm90 as two
from qsparse.oracles.train_mlp import train_mlp as oracle

RECIPES = [{}, {"weight_decay": 0.01}, {"momentum": 0.5, "weight_decay": 0.1}]
PIXELS = {"scale": 1 / (255 * 0.3081), "shift": -0.1307 / 0.3081}


@pytest.fixture
def problem(integers, normal):
    """``problem(sizes, rows, batch, momentum)``: arguments, without a mask, and options of a call, on the CPU."""

    def draw(sizes: tuple[int, ...], rows: int, batch: int, momentum: float = 0.0, images: int = 200):
        ink = integers(0, 256, images, sizes[0], dtype=torch.uint8)
        pixels = torch.where(integers(0, 5, images, sizes[0]) == 0, ink, 0)  # as digits: mostly background
        parameters = [(normal(n, k) / k**0.5, 0.1 * normal(n)) for k, n in itertools.pairwise(sizes)]
        flat = torch.cat([part.flatten() for layer in parameters for part in layer])
        steps = -(-rows // batch)
        return (
            pixels,
            integers(0, sizes[-1], images, dtype=torch.int64),
            integers(0, images, rows, dtype=torch.int64),
            0.02 + 0.01 * normal(steps).abs(),
            flat,
            0.01 * normal(len(flat)) if momentum else None,
            None,
        ), {"sizes": sizes, "batch": batch, "momentum": momentum, **PIXELS}

    return draw


def to(arguments: tuple, device) -> list:
    return [None if value is None else value.to(device, copy=True) for value in arguments]


def train(given: list, options: dict, **more) -> torch.Tensor:
    """The call; a tier that cannot have this network skips the test."""
    try:
        return kernels.train_mlp(*given, **options, **more)
    except ValueError as error:
        if "is not possible for these arguments" not in str(error):
            raise
        pytest.skip(str(error))


def check(arguments, options, place, to_numpy, tolerance, **more) -> None:
    """Run, and compare losses, the way of the parameters and their velocities with the oracle's."""
    losses, parameters, velocities = oracle(*map(to_numpy, arguments), **options)
    device, more = place["device"], {**more, "tier": place["tier"]}
    given = to(arguments, device)
    found = train(given, options, **more)
    pairs = [(found, losses), (given[4].double().cpu() - arguments[4], parameters - to_numpy(arguments[4]))]
    if given[5] is not None:
        pairs.append((given[5], velocities))
    for ours, reference in pairs:
        ours = to_numpy(ours)
        assert ours.shape == reference.shape
        assert np.linalg.norm(reference) > 0
        assert np.linalg.norm(ours - reference) < tolerance * np.linalg.norm(reference)


ON_GPUS = [pytest.param(tier, marks=pytest.mark.gpu) for tier in ("sm90", "sm80", "simt")]


@pytest.fixture(params=["cpu", *ON_GPUS])
def place(request) -> dict:
    """Where to run, and by which tier."""
    if request.param == "cpu":
        return {"device": torch.device("cpu"), "tier": None}
    device, order = torch.device("cuda", 0), ("simt", "sm80", "sm90")
    best = kernels.train_mlp.tier(device)
    if order.index(request.param) > order.index(best):
        pytest.skip(f"the best tier of this card is {best}")
    return {"device": device, "tier": request.param}


SMALL = [((784, 256, 10), 64), ((784, 1, 10), 10), ((784, 37, 16), 33), ((784, 250, 2), 64), ((784, 16, 3), 2)]
GRID = [((784, 300, 10), 128), ((784, 300, 200, 130, 16), 100), ((784, 700, 400, 3), 70), ((13, 7, 9, 2), 33)]
ANY = [((784, 10), 32), ((784, 48, 33, 20, 10), 32), ((13, 7, 9, 3), 7), ((784, 300, 10), 128), ((784, 64, 10), 1000)]
CASES = [
    *(("cpu", *case) for case in (*SMALL, *ANY, ((20, 30, 17), 30))),
    *(pytest.param("sm90", *case, marks=pytest.mark.gpu) for case in (*SMALL, *GRID)),
    *(pytest.param("sm80", *case, marks=pytest.mark.gpu) for case in (*SMALL[:3], *ANY)),
    *(pytest.param("simt", *case, marks=pytest.mark.gpu) for case in (SMALL[0], ANY[1], ((20, 30, 17), 30))),
]


@pytest.mark.parametrize(("place", "sizes", "batch"), CASES, indirect=["place"], ids=str)
def test_matches_the_oracle(place, sizes, batch, problem, to_numpy):
    for recipe in RECIPES:
        momentum = recipe.get("momentum", 0.0)
        arguments, options = problem(sizes, batch, batch, momentum)
        # The parameters' own rounding is 1.5e-5 of the way that they take in one step.
        check(arguments, {**options, **recipe}, place, to_numpy, tolerance=2e-5)
        # Over more steps an output that rounds to the other side of the ReLU's kink moves other weights.
        arguments, options = problem(sizes, 4 * batch + max(batch // 4, 1), batch, momentum)
        check(arguments, {**options, **recipe}, place, to_numpy, tolerance=1e-2)


@pytest.mark.parametrize("place", ON_GPUS[:1], indirect=True)
@pytest.mark.parametrize(
    ("sizes", "batch"),
    [((784, 320, 160, 10), 64), ((784, 512, 33, 16), 60), ((784, 40, 30, 10), 33), ((784, 1, 1, 3), 2)],
    ids=str,
)
def test_two_hidden_layers_in_one_cluster(place, sizes, batch, problem, to_numpy):
    for rows, recipe in ((batch, {}), (4 * batch + 1, {"weight_decay": 0.1})):
        arguments, options = problem(sizes, rows, batch)
        with _load.launched() as seen:
            check(arguments, {**options, **recipe}, place, to_numpy, tolerance=5e-2, precision="high")
        assert seen == ["train_mlp_two_sm90.cu:train_mlp_two_sm90"]


@pytest.mark.parametrize("place", ON_GPUS[:2], indirect=True)
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_rounded_operands_are_as_near_as_11_bits_allow(place, momentum, problem, to_numpy):
    arguments, options = problem((784, 256, 10), 64, 64, momentum)
    check(arguments, options, place, to_numpy, tolerance=5e-2, precision="high")
    with pytest.raises(AssertionError):  # it does round
        check(arguments, options, place, to_numpy, tolerance=2e-5, precision="high")
    check(arguments, options, place, to_numpy, tolerance=2e-1, precision="bfloat16")
    with pytest.raises(AssertionError):
        check(arguments, options, place, to_numpy, tolerance=1e-3, precision="bfloat16")


@pytest.mark.gpu
@pytest.mark.parametrize(("sizes", "batch"), [((784, 256, 10), 64), ((784, 320, 160, 10), 64), ((784, 1000, 10), 500)])
def test_two_runs_have_the_same_bits(sizes, batch, problem):
    for precision in ("highest", "high", "bfloat16"):
        arguments, options = problem(sizes, 64 * 100 + 5, batch, 0.9)
        first, second = to(arguments, "cuda"), to(arguments, "cuda")
        losses = [kernels.train_mlp(*each, **options, precision=precision) for each in (first, second)]
        assert torch.equal(*losses)
        assert torch.equal(first[4], second[4])
        assert torch.equal(first[5], second[5])


@pytest.mark.parametrize("sizes", [(784, 64, 10), (784, 40, 30, 10)], ids=str)
def test_two_calls_are_one(place, sizes, problem):
    """Nothing is kept but what the arguments hold: so a run that was interrupted goes on with the same bits."""
    arguments, options = problem(sizes, 64 * 6, 64, 0.9)
    whole, halves = to(arguments, place["device"]), to(arguments, place["device"])
    losses = train(whole, options, tier=place["tier"])
    images, labels, order, rates, *state = halves
    parts = [
        train([images, labels, order[part], rates[steps], *state], options, tier=place["tier"])
        for part, steps in ((slice(0, 192), slice(0, 3)), (slice(192, None), slice(3, None)))
    ]
    assert torch.equal(torch.cat(parts), losses)
    assert torch.equal(whole[4], halves[4])
    assert torch.equal(whole[5], halves[5])


@pytest.mark.parametrize("recipe", RECIPES[1:], ids=str)
def test_masked_parameters_stay_exactly_zero(place, recipe, problem, to_numpy):
    arguments, options = problem((784, 24, 16, 10), 200, 64, recipe.get("momentum", 0.0))
    options = {**options, **recipe}
    mask = arguments[4] > 0.01
    check((*arguments[:6], mask), options, place, to_numpy, tolerance=1e-2)
    given = to((*arguments[:6], mask), place["device"])
    train(given, options, tier=place["tier"])
    for value in given[4:6]:
        if value is not None:
            assert (value[~given[6]] == 0).all()
            assert (value[given[6]] != 0).all()


def test_one_image_again_and_again_is_learnt(place, problem):
    arguments, options = problem((784, 32, 10), 40, 1)
    images, labels, order, *rest = to(arguments, place["device"])
    losses = train([images, labels, order * 0 + 3, *rest], options, tier=place["tier"])
    assert losses[-1] < 0.1 * losses[0]


@pytest.mark.parametrize(
    ("sizes", "precision"),
    [((784, 32, 1), "highest"), ((784, 300, 1), "high"), ((784, 40, 30, 1), "high"), ((784, 300, 200, 1), "highest")],
    ids=str,
)
def test_a_single_class_has_nothing_to_learn(place, sizes, precision, problem):
    arguments, options = problem(sizes, 130, 60)
    given = to(arguments, place["device"])
    losses = train(given, options, precision=precision, tier=place["tier"])
    assert (losses == 0).all()
    assert torch.equal(given[4].cpu(), arguments[4])


def test_no_rows_change_nothing(place, problem):
    arguments, options = problem((784, 32, 10), 0, 8)
    given = to(arguments, place["device"])
    assert train(given, options, tier=place["tier"]).shape == (0,)
    assert torch.equal(given[4].cpu(), arguments[4])


def test_a_label_that_is_none_gives_nan_in_its_row(place, problem):
    arguments, options = problem((784, 32, 10), 20, 20)
    for bad in (10, -1, 2**32 + 1):
        given = to(arguments, place["device"])
        given[2] = torch.arange(20, device=place["device"])
        given[1][7] = bad
        assert train(given, options, tier=place["tier"]).isnan().nonzero().flatten().tolist() == [7]


@pytest.mark.parametrize("layer", [0, 1])
def test_nan_in_one_weight_reaches_the_losses(place, layer, problem):
    arguments, options = problem((784, 32, 10), 20, 20)
    arguments[4][[5, 784 * 32 + 32 + 3][layer]] = torch.nan
    assert train(to(arguments, place["device"]), options, tier=place["tier"]).isnan().all()


@pytest.mark.parametrize("sizes", [(784, 64, 10), (784, 9, 8, 1)], ids=str)
@pytest.mark.parametrize("batch", [1, 64])
@pytest.mark.parametrize("parts", [1, 2])
def test_what_tiles_read_beyond_the_weights_is_scratch_memory(sizes, batch, parts):
    table, scratch = host.layers(sizes, batch, parts, sm80.SPARE, 0, torch.device("cpu"))
    for inputs, outputs, _, copy, *_ in table.tolist()[:-1]:
        lines = (parts - 1) * outputs + host.line(outputs, sm80.SPARE)  # the kernel's product of the last part
        assert copy + lines * host.line(inputs, sm80.SPARE) <= scratch


@pytest.mark.gpu
def test_the_tiers_are_those_that_are_said():
    images, labels = torch.zeros(9, 784, dtype=torch.uint8, device="cuda"), torch.zeros(9, dtype=torch.int64).cuda()
    best = kernels.train_mlp.tier("cuda:0")

    def launched(sizes, batch, mask=False, **more) -> list[str]:
        count = sum(n * (k + 1) for k, n in itertools.pairwise(sizes))
        alive = torch.ones(count, dtype=torch.bool, device="cuda") if mask else None
        rates = torch.zeros(-(-9 // batch), device="cuda")
        given = images, labels, torch.arange(9).cuda(), rates, torch.zeros(count, device="cuda"), None, alive
        with _load.launched() as seen:
            kernels.train_mlp(*given, sizes=sizes, batch=batch, **more)
        return seen

    if best == "sm90":
        assert launched((784, 256, 10), 64) == ["train_mlp_sm90.cu:train_mlp_sm90<2, false>"]
        assert launched((784, 7, 16), 2, precision="high") == ["train_mlp_sm90.cu:train_mlp_sm90<1, false>"]
        assert launched((784, 257, 10), 64) == ["train_mlp_grid_sm90.cu:train_mlp_grid_sm90<2, false>"]
        assert launched((784, 9, 8, 10), 64, precision="high") == ["train_mlp_two_sm90.cu:train_mlp_two_sm90"]
    if best != "simt":
        for sizes, batch, mask in [
            ((784, 9, 8, 10), 1025, 0),
            ((784, 3000, 10), 65, 0),
            ((784, 10), 8, 0),
            ((784, 9, 10), 8, 1),
        ]:
            assert launched(sizes, batch, mask) == ["train_mlp_sm80.cu:train_mlp_sm80<2, false>"]
    assert len(launched((784, 20, 17), 4)) > 3


@pytest.mark.gpu
def test_a_device_that_forms_no_clusters_of_that_size_takes_the_next_tier(problem, monkeypatch):
    if kernels.train_mlp.tier("cuda:0") != "sm90":
        pytest.skip("this card has no clusters")
    arguments, options = problem((784, 32, 10), 20, 20)
    assert sm90.fits(0, "highest", False)
    few = _load.prepare(0, sm90.SOURCE, sm90.INSTANCES[0], "P" * 13 + "iiiiffiff", 16, 256, 200 * 1024, cluster=17)
    assert not few.fits()
    for each in (sm90, two, grid):
        monkeypatch.setattr(each, "fits", lambda *_: False)
    with _load.launched() as seen:
        kernels.train_mlp(*to(arguments, "cuda"), **options)
    assert [label.partition(":")[0] for label in seen] == [sm80.SOURCE]


def test_refuses_what_does_not_fit(device, problem):
    arguments, options = problem((20, 8, 3), 12, 4, 0.9)
    images, labels, order, rates, parameters, velocities, _ = to(arguments, device)

    def call(*given, **changed):
        whole = given + (images, labels, order, rates, parameters, velocities)[len(given) :]
        kernels.train_mlp(*whole, **{**options, **changed})

    with pytest.raises(TypeError, match=r"^images must be uint8, got float32"):
        call(images.float())
    with pytest.raises(ValueError, match=r"^labels must have shape \(200,\), got \(3,\)"):
        call(images, labels[:3])
    with pytest.raises(TypeError, match=r"^order must be int64, got int32"):
        call(images, labels, order.int())
    with pytest.raises(ValueError, match=r"^rates must have shape \(3,\), got \(2,\)"):
        call(images, labels, order, rates[:2])
    with pytest.raises(ValueError, match=r"^parameters must have shape \(195,\), got \(194,\)"):
        call(images, labels, order, rates, parameters[:-1])
    with pytest.raises(ValueError, match=r"^parameters is changed in place and must be contiguous"):
        call(images, labels, order, rates, torch.zeros(390, device=device)[::2])
    with pytest.raises(ValueError, match=r"^momentum is 0\.9, so velocities are needed"):
        call(images, labels, order, rates, parameters, None)
    with pytest.raises(TypeError, match=r"^mask must be bool, got float32"):
        call(mask=parameters)
    with pytest.raises(ValueError, match=r"^sizes must be two widths or more, the first one that of images \(20\)"):
        call(sizes=(21, 8, 3))
    with pytest.raises(ValueError, match=r"^batch must be at least 1, got 0"):
        call(batch=0)
    with pytest.raises(ValueError, match=r"^precision must be one of highest, high, bfloat16, got 'tf32'"):
        call(precision="tf32")
    with pytest.raises(ValueError, match=r"^tier 'sm90' is not possible for these arguments on"):
        call(mask=torch.zeros(195, dtype=torch.bool, device=device), tier="sm90")  # no kernel for Hopper takes a mask
