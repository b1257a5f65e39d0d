import time

import pytest
import torch

from qsparse import timing


class Clock:
    """Stands in for time.perf_counter: only the calls take time."""

    def __init__(self, monkeypatch):
        self.now = 0.0
        self.log = []
        monkeypatch.setattr(time, "perf_counter", lambda: self.now)

    def call(self, name, seconds):
        def run():
            self.now += seconds
            self.log.append(name)
            return torch.tensor(len(self.log))

        return run


@pytest.fixture
def clock(monkeypatch):
    return Clock(monkeypatch)


def test_calls_alternate_and_each_is_timed_alone(clock):
    samples, outputs = timing.wall_times({"a": clock.call("a", 0.01), "b": clock.call("b", 0.03)}, budget_s=0.5)
    assert set(clock.log[::2]) == {"a"}
    assert set(clock.log[1::2]) == {"b"}
    assert samples["a"] == pytest.approx([10_000] * len(samples["a"]))
    assert samples["b"] == pytest.approx([30_000] * len(samples["a"]))
    assert int(outputs["b"]) == len(clock.log)
    assert int(outputs["a"]) == len(clock.log) - 1


@pytest.mark.parametrize(
    ("seconds", "repetitions", "most_spent"),
    [
        (0.001, 700, 0.75),  # short: until the budget is spent
        (0.05, 20, 1.05),  # 20 repetitions, although they take more than the budget
        (0.2, 8, 1.7),  # long: twice the budget ends it
        (5.0, 3, 15.1),  # very long: 3
    ],
)
def test_the_budget_bounds_the_repetitions(clock, seconds, repetitions, most_spent):
    samples, _ = timing.wall_times({"a": clock.call("a", seconds)}, budget_s=0.7)
    assert len(samples["a"]) == pytest.approx(repetitions, abs=1)
    assert sum(samples["a"]) / 1e6 <= most_spent
    assert 1 <= len(clock.log) - len(samples["a"]) <= 3  # warmed up, and not longer than need be


def test_percentiles():
    samples = [float(value) for value in range(11)]
    assert [timing.percentile(samples, percent) for percent in (0, 10, 50, 90, 100)] == [0, 1, 5, 9, 10]
    assert timing.percentile([3.0, 1.0], 50) == 2


@pytest.mark.gpu
def test_graph_replays_compute_and_are_timed():
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.randn(64, 128, device=device)
    w = torch.randn(32, 128, device=device)
    calls = {"product": lambda: x @ w.t(), "sum": lambda: x + 1}
    samples, outputs = timing.graph_times(calls, device, repetitions=60)
    for name, call in calls.items():
        assert len(samples[name]) == 60
        assert all(microseconds > 0 for microseconds in samples[name])
        torch.testing.assert_close(outputs[name], call())


@pytest.mark.gpu
def test_a_call_that_waits_is_refused_and_spoils_nothing():
    device = torch.device("cuda", torch.cuda.current_device())
    x = torch.randn(64, 128, device=device)
    with pytest.raises(RuntimeError, match="synchronizing"):
        timing.graph_times({"waits": lambda: x * float(x.sum())}, device, repetitions=5)
    assert torch.cuda.get_sync_debug_mode() == 0
    samples, outputs = timing.graph_times({"sum": lambda: x + torch.rand_like(x)}, device, repetitions=5)
    assert len(samples["sum"]) == 5
    assert float((outputs["sum"] - x).min()) >= 0
