"""The one exception that a command turns into a sentence."""


class UserError(Exception):
    """A mistake that the user can mend.

    The message is one clear sentence: what came, what is allowed, and what to do. The command line prints it on
    standard error and exits with code 2. The library faces (`qsparse.kernels`, `qsparse.nn`) raise TypeError and
    ValueError instead.
    """
