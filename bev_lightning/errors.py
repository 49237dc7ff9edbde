"""The one exception that is shown to the user as a sentence instead of a traceback."""


class InputError(ValueError):
    """Something the user gave is wrong: a file, a key, a value.

    The message is one sentence that names it, says what was found and what to do; verbs print it
    and exit with 2.
    """
