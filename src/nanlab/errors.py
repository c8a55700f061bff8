"""The one exception for bad input: a single line that says what, where, and what to do."""

from collections.abc import Mapping


class InputError(ValueError):
    """Something the user gave cannot be used. The command line prints it on one line and exits with status 2."""


def refuse(call: str, wrong: Mapping[str, bool]) -> None:
    """Raise `InputError` with the first text of a table that is true of what ``call`` was given."""
    for text, so in wrong.items():
        if so:
            raise InputError(f"{call}: {text}")
