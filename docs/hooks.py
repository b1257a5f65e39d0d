"""What MkDocs adds to the pages of this folder: the commands' help, and the experiments with their figures."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File, Files
from typer.testing import CliRunner

from qsparse import cli, kernels, nn

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS = sorted(path.parent for path in ROOT.glob("experiments/*/README.md"))


def on_files(files: Files, config: Any) -> Files:
    """Each experiment's answer is a page, and its figures lie beside it."""
    for directory in EXPERIMENTS:
        place = f"experiments/{directory.name}"
        files.append(File.generated(config, f"{place}/README.md", content=answer(directory)))
        for figure in directory.glob("*.png"):
            files.append(File.generated(config, f"{place}/{figure.name}", abs_src_path=str(figure)))
    return files


def answer(directory: Path) -> str:
    """An experiment's README without the links that lead out of it, into the checkout: their places stay readable."""
    text = (directory / "README.md").read_text()

    def link(match: re.Match[str]) -> str:
        words, target = match["words"], match["target"]
        if "://" in target or target.startswith("#") or (target.endswith(".png") and (directory / target).exists()):
            return match[0]
        place = (directory / target).resolve().relative_to(ROOT)
        return f"{words} (`{place}`)"

    return re.sub(r"(?<!!)\[(?P<words>[^\]]*)\]\((?P<target>[^)\s]+)\)", link, text)


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in what stands in the code."""
    for place, text in (("commands", commands), ("experiments", experiments), ("kernels", faces), ("layers", layers)):
        if f"<!-- {place} -->" in markdown:
            markdown = markdown.replace(f"<!-- {place} -->", text())
    return markdown


def experiments() -> str:
    """A link to each experiment's page."""
    return "\n".join(f"- [{title(each)}](experiments/{each.name}/README.md)" for each in EXPERIMENTS)


def faces() -> str:
    """The reference of each kernel's face."""
    return "\n\n".join(f"::: qsparse.kernels.{name}.{name}" for name in kernels.FACES)


def layers() -> str:
    """The reference of each layer."""
    kinds = (value for name, value in vars(nn).items() if name in nn.__all__ and isinstance(value, type))
    return "\n\n".join(f"::: {kind.__module__}.{kind.__qualname__}" for kind in kinds)


def title(directory: Path) -> str:
    """The first line of an experiment's answer."""
    return (directory / "README.md").read_text().splitlines()[0].removeprefix("# ")


def commands() -> str:
    """The help of every command, as it prints it."""
    parts = []
    for path in _leaves(typer.main.get_command(cli.app)):
        shown = CliRunner().invoke(cli.app, [*path, "--help"], prog_name="qsparse", terminal_width=100)
        parts.append(f"## qsparse {' '.join(path)}\n\n```text\n{shown.stdout.strip()}\n```")
    return "\n\n".join(parts)


def _leaves(command: Any, path: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    subcommands = getattr(command, "commands", None)
    if subcommands is None:
        return [path]
    return [leaf for name, sub in subcommands.items() for leaf in _leaves(sub, (*path, name))]
