"""The one exception for bad input: a single line that says what, where, and what to do."""


class InputError(ValueError):
    """Something the user gave cannot be used. The command line prints it on one line and exits with status 2."""
