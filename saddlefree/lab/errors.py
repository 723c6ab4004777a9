"""Errors that a user can cause and mend."""


class UserError(Exception):
    """One line: what is wrong, what is allowed, what to do. The command line prints it and exits with 2."""
