"""Kernels against the libraries that a user would call instead: correct first, then time, then one row each.

shapes.py says what is run, peers/ holds the other libraries' calls (one file a library), harness.py checks and times
them side by side and assembles the rows, gemm.py is the benchmark of the dense product, tables.py shows it, tune.py
picks configurations, command.py is `qsparse bench`.
"""
