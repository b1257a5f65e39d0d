"""The one exception that a command turns into a sentence."""

from collections.abc import Iterable, Mapping


class UserError(Exception):
    """A mistake that the user can mend.

    The message is one clear sentence: what came, what is allowed, and what to do. The command line prints it on
    standard error and exits with code 2. The library faces (`qsparse.kernels`, `qsparse.nn`) raise TypeError and
    ValueError instead.
    """


def refuse_idle(combinations: Iterable[Mapping[str, str]], where: str = "") -> None:
    """Raise UserError for an option that has no effect in any of the combinations of options.

    combinations: of each, the options without effect in it, each with what it belongs to, as "--format auto".
    """
    first, *others = combinations
    for option, owner in first.items():
        if all(option in other for other in others):
            raise UserError(f"{where}--{option.replace('_', '-')} has no effect here: it is of {owner}")
