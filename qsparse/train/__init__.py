"""Training: batches and a model in, weights out.

config.py holds what a run is made of and checks it (without importing torch), fit.py the loop, run.py a whole run with
its directory and checkpoints, progress.py what a terminal shows of it.
"""

from qsparse.train.config import TrainConfig

__all__ = ["TrainConfig"]
