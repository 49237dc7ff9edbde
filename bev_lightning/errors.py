"""The one exception that is shown to the user as a sentence instead of a traceback."""


class InputError(ValueError):
    """Wrong input of the user: a file, a key, a value.

    The message is one sentence with the input, the error and the fix; verbs print it and exit
    with 2.
    """
