"""What MkDocs adds to the pages of this folder: the README, the commands' help, the experiments with their figures."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

import typer
from mkdocs.structure.files import File, Files
from typer.testing import CliRunner

from qsparse import cli

ROOT = Path(__file__).resolve().parents[1]
EXPERIMENTS = sorted(path.parent for path in ROOT.glob("experiments/*/README.md"))


def on_files(files: Files, config: Any) -> Files:
    """Each experiment's answer is a page, and its figures lie beside it."""
    for directory in EXPERIMENTS:
        place = f"experiments/{directory.name}"
        files.append(File.generated(config, f"{place}/README.md", content=turned(directory / "README.md", place)))
        for figure in directory.glob("*.png"):
            files.append(File.generated(config, f"{place}/{figure.name}", abs_src_path=str(figure)))
    return files


def turned(source: Path, folder: str = "") -> str:
    """A file of the checkout as a page in this folder of the manual: links lead to the manual's pages.

    A link to what is no page, such as a source, is left as its words and its place.
    """

    def link(match: re.Match[str]) -> str:
        words, (target, mark, anchor) = match["words"], match["target"].partition("#")
        if "://" in target or not target:
            return match[0]
        place = (source.parent / target).resolve().relative_to(ROOT)
        if (page := page_of(place)) is None:
            return f"{words[1:-1]} (`{place}`)"
        return f"{words}({os.path.relpath(page, folder or '.')}{mark}{anchor})"

    return re.sub(r"(?P<words>!?\[[^\]]*\])\((?P<target>[^)\s]+)\)", link, source.read_text())


def page_of(place: Path) -> Path | None:
    """Where a place of the checkout stands in the manual."""
    if place.parts[0] == "docs":
        return place.relative_to("docs")
    if ROOT / place in EXPERIMENTS:
        return place / "README.md"
    if place.parts[0] == "experiments" and (place.name == "README.md" or place.suffix == ".png"):
        return place
    return {"CONTRIBUTING.md": Path("contributing.md"), "CHANGELOG.md": Path("changelog.md")}.get(str(place))


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Fill in what stands in the code; a link out of this folder, to an experiment, leads to its page."""
    markdown = re.sub(r"\]\(((?:\.\./)*)\.\./experiments/", r"](\1experiments/", markdown)
    texts = {"readme": readme, "commands": commands, "experiments": experiments}
    for place, text in texts.items():
        if f"<!-- {place} -->" in markdown:
            markdown = markdown.replace(f"<!-- {place} -->", text())
    return markdown


def readme() -> str:
    """The front page."""
    return turned(ROOT / "README.md")


def experiments() -> str:
    """A link to each experiment's page."""
    return "\n".join(f"- [{title(each)}](experiments/{each.name}/README.md)" for each in EXPERIMENTS)


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
