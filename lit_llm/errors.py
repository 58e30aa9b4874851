"""The one kind of error that is the user's to mend."""

from __future__ import annotations


class UserError(ValueError):
    """A mistake in what the user gave: an option, a file, a size.

    The message is one line that names the thing and the way out. The command line prints it without a traceback and
    exits with code 2.
    """
