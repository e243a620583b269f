"""The exception for everything that a user can put right."""


class InputError(ValueError):
    """A file, setting or argument cannot be used.

    The message is one paragraph that names the value, the limit it breaks and the way out. Command lines print it
    without a traceback and exit with status 2.
    """
