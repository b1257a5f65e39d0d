"""PyTorch's own training on a GPU: its graph takes the steps that it takes without one."""

import pytest
import torch

from qsparse import data
from qsparse.data import Split
from qsparse.models import MLP
from qsparse.train.config import TrainConfig
from qsparse.train.torch_peers import EagerTorch, GraphedTorch

pytestmark = pytest.mark.gpu
IMAGES, BATCH = 205, 20  # the last batch of an epoch is short
RATES = [0.05] * 11


def by_steps(peer: EagerTorch, train: Split, epoch: int) -> torch.Tensor:
    batches = data.batches(train, BATCH, seed=0, epoch=epoch)
    return torch.stack([peer.step(*batch, rate) for batch, rate in zip(batches, RATES, strict=True)]).cpu()


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_replay_reads_nothing_that_was_freed(momentum):
    """Between two epochs all memory that the capture gave back is written: with zeros, which are places too."""
    whole = data.load("mnist-5k").train
    train = Split(whole.images[:IMAGES], whole.labels[:IMAGES]).to("cuda")
    config = TrainConfig(hidden=(16,), epochs=2, batch_size=BATCH, momentum=momentum)
    graphed, eager = (kind(MLP((784, 16, 10), seed=1).cuda(), config, {}, {}) for kind in (GraphedTorch, EagerTorch))
    for epoch in range(2):
        found = graphed.epoch(train, epoch, RATES)
        assert (found - by_steps(eager, train, epoch)).abs().max() < 2e-2
        sizes = (1, BATCH, len(RATES), IMAGES, 784 * 16)
        written = [torch.zeros(size, dtype=torch.int64, device="cuda") for size in sizes for _ in range(50)]
        torch.cuda.synchronize()
        del written
