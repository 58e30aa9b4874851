"""Errors that are told in one line."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in what the user gave: an option, a file, a size.

    The message is one line that names the thing and the way out. The command line prints it without a traceback and
    exits with code 2.
    """


class RunStopped(RuntimeError):
    """A run that can't go on, such as one whose loss is no longer finite; what was done is saved or said to be lost.

    The message is one line. The command line prints it without a traceback and exits with code 1.
    """
