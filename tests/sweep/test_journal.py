"""The journal: what was appended is there, whatever stands at the end of the file."""

from __future__ import annotations

import json

import pytest

from qsparse.errors import UserError
from qsparse.sweep.journal import Journal

ROWS = [{"cell": {"train": {"seed": seed}}, "accuracy": 0.5} for seed in range(3)]


def written(directory, rows=ROWS):
    with Journal(directory) as journal:
        for row in rows:
            journal.append(row)
    return directory / "rows.jsonl"


def test_what_is_appended_is_read_again(tmp_path):
    written(tmp_path)
    with Journal(tmp_path) as journal:
        assert journal.rows == ROWS


@pytest.mark.parametrize("cut", range(1, len(json.dumps(ROWS[-1])) + 2))
def test_a_torn_last_line_is_mended_at_every_byte(tmp_path, cut):
    file = written(tmp_path)
    file.write_bytes(file.read_bytes()[:-cut])
    with Journal(tmp_path) as journal:
        assert journal.rows == (ROWS if cut == 1 else ROWS[:-1])  # without its newline alone it is whole
        journal.append({"after": 1})
    assert [json.loads(line) for line in file.read_text().splitlines()] == [
        *(ROWS if cut == 1 else ROWS[:-1]),
        {"after": 1},
    ]


def test_a_tail_of_zeros_is_cut_off(tmp_path):
    file = written(tmp_path)
    file.write_bytes(file.read_bytes() + bytes(7))
    with Journal(tmp_path) as journal:
        assert journal.rows == ROWS


def test_one_sweep_at_a_time(tmp_path):
    with Journal(tmp_path), pytest.raises(UserError, match="another sweep"):
        Journal(tmp_path)
    with Journal(tmp_path) as journal:
        assert journal.rows == []


def test_a_broken_line_in_the_middle_is_named(tmp_path):
    file = written(tmp_path)
    file.write_text("half\n" + file.read_text())
    with pytest.raises(UserError, match="line 1"):
        Journal(tmp_path)


def test_no_file_holds_nan(tmp_path):
    with Journal(tmp_path) as journal, pytest.raises(ValueError, match="JSON"):
        journal.append({"accuracy": float("nan")})
    assert (tmp_path / "rows.jsonl").read_bytes() == b""
