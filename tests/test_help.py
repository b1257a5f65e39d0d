"""The help of every command ends with an example that parses, and a shell can complete what it names."""

from __future__ import annotations

import shlex

import pytest
import typer
from typer.testing import CliRunner

from qsparse import __version__, cli

COMPLETE = {"_QSPARSE_COMPLETE": "complete_bash"}


def leaves(command, path=()):
    """Each command, with the words that name it."""
    for name, sub in getattr(command, "commands", {}).items():
        yield from leaves(sub, (*path, name)) if hasattr(sub, "commands") else [((*path, name), sub)]


COMMANDS = dict(leaves(typer.main.get_command(cli.app)))


@pytest.mark.parametrize("path", COMMANDS, ids=" ".join)
def test_help_ends_with_an_example_that_parses(path):
    result = CliRunner().invoke(cli.app, [*path, "--help"], terminal_width=100)
    assert result.exit_code == 0
    last = result.stdout.rstrip().splitlines()[-1].strip()
    assert last.startswith(f"Example: qsparse {' '.join(path)}")
    arguments = shlex.split(last.removeprefix("Example: "))[1 + len(path) :]
    COMMANDS[path].make_context("qsparse", arguments)


def test_the_version():
    assert CliRunner().invoke(cli.app, ["--version"]).stdout == f"qsparse {__version__}\n"


@pytest.mark.parametrize(
    ("line", "offered"),
    [
        ("qsparse s", {"sensitivity", "search", "sweep", "sparsify"}),
        ("qsparse report --ht", {"--html"}),
        ("qsparse report --title '' --ht", {"--html"}),
    ],
)
def test_a_shell_completes(line, offered):
    words = {"COMP_WORDS": line, "COMP_CWORD": str(len(line.split()) - 1)}
    result = CliRunner().invoke(cli.app, [], env=COMPLETE | words, prog_name="qsparse")
    assert set(result.stdout.split()) == offered


def test_completion_is_offered():
    assert "--install-completion" in CliRunner().invoke(cli.app, ["--help"]).stdout
