"""`python -m qsparse` is `qsparse`."""

from qsparse.cli import main

if __name__ == "__main__":
    main()
