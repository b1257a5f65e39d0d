"""What a terminal shows of a training: a bar while an epoch runs, a line when it is done."""

from __future__ import annotations

import os
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from qsparse.train.fit import EpochEnd, Progress


def say(console: Console | None, sentence: str, style: str | None = None) -> None:
    """Print a sentence on `console` as it is, when there is one: a path's [brackets] are not markup."""
    if console is not None:
        console.print(sentence, style=style, markup=False, highlight=False, soft_wrap=True)


def shortest(path: str | Path) -> Path:
    """Return `path`, or the same place seen from the current directory where that is shorter to read."""
    return Path(min(str(path), os.path.relpath(path), key=len))


class Display:
    """A context that draws on `console` what `fit` reports to `progress` and `epoch_end`.

    Off a terminal the bar is left out and the lines stay. Where several trainings follow each other, `of` says whose
    the epochs are.
    """

    def __init__(self, console: Console, epochs: int, of: str = "") -> None:
        self._epochs, self._of = epochs, f"{of}: " if of else ""
        self._bar = Bar(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("loss {task.fields[loss]:.4f}  {task.fields[speed]:,.0f} images/s"),
            TimeRemainingColumn(),
            console=console,
            transient=True,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, loss=0.0, speed=0.0, visible=False)

    def __enter__(self) -> Display:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def progress(self, now: Progress) -> None:
        """Move the bar."""
        self._bar.update(
            self._task,
            description=f"{self._of}epoch {now.epoch}/{self._epochs}",
            completed=now.step,
            total=now.steps,
            loss=now.loss,
            speed=now.images_per_second,
            visible=True,
        )

    def epoch_end(self, end: EpochEnd) -> None:
        """Print the epoch's line."""
        metrics = end.metrics[-1]
        seconds = metrics["seconds"]
        validation = metrics["validation_accuracy"]
        held_out = "" if validation is None else f"  validation {validation:.2%}"
        say(
            self._bar.console,
            f"{self._of}epoch {end.epoch}/{self._epochs}  loss {metrics['loss']:.4f}{held_out}"
            f"  test {metrics['test_accuracy']:.2%}  {metrics['images_per_second']:,.0f} images/s"
            f"  {seconds:{'#.2g' if seconds < 1 else '.1f'}} s",
        )
