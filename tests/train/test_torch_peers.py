"""PyTorch's own training as a peer: the CUDA graph takes the steps that the eager peer takes, epoch after epoch."""

import pytest
import torch

from qsparse import data
from qsparse.data import Split
from qsparse.models import MLP
from qsparse.train.config import TrainConfig
from qsparse.train.torch_peers import EagerTorch, GraphedBfloat16, GraphedTorch

SIZES, IMAGES, BATCH, EPOCHS = (784, 16, 10), 150, 32, 2  # the last batch is not whole
RATES = [0.1, 0.08, 0.06, 0.04, 0.02]


class EagerBfloat16(EagerTorch):
    _bfloat16 = True


def overwrite_freed_memory(device: torch.device) -> None:
    """Write ones, which as places are there and wrong, wherever the allocator has what nobody keeps."""
    held = [torch.ones(2**i, dtype=torch.int64, device=device) for i in range(18) for _ in range(32)]
    torch.cuda.synchronize()
    del held


@pytest.mark.gpu
@pytest.mark.parametrize(("graphed", "eager"), [(GraphedTorch, EagerTorch), (GraphedBfloat16, EagerBfloat16)])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_a_graph_reads_no_memory_that_others_may_write(graphed, eager, momentum):
    device = torch.device("cuda")
    generator = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (IMAGES, SIZES[0]), dtype=torch.uint8, generator=generator)
    train = Split(images, torch.randint(0, SIZES[-1], (IMAGES,), generator=generator)).to(device)
    config = TrainConfig(hidden=SIZES[1:-1], epochs=EPOCHS, batch_size=BATCH, momentum=momentum, seed=5)
    ours = graphed(MLP(SIZES, seed=5).to(device), config, {}, {})
    peer = eager(MLP(SIZES, seed=5).to(device), config, {}, {})
    for epoch in range(EPOCHS):
        losses = ours.epoch(train, epoch, RATES)
        batches = data.order(IMAGES, seed=config.seed, epoch=epoch).to(device).split(BATCH)
        steps = zip(batches, RATES, strict=True)
        expected = [peer.step(train.images[rows], train.labels[rows], rate).item() for rows, rate in steps]
        torch.testing.assert_close(losses, torch.tensor(expected), rtol=1e-3, atol=0)
        overwrite_freed_memory(device)
    with pytest.raises(ValueError, match="captured with another split"):
        ours.epoch(Split(train.images.clone(), train.labels), EPOCHS, RATES)
