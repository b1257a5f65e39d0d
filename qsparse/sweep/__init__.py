"""A TOML grid in, a row for each of its cells out: grid.py reads it, run.py hands the cells to processes of worker.py,
and journal.py keeps what they found.
"""
