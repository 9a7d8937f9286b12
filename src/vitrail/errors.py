"""The errors a person can mend, each one sentence that says what to do."""


class UserError(ValueError):
    """Wrong input or environment: shown as one sentence, without a traceback.

    The command line exits with 2 when it comes before the first step, and with 1 for a RunFailed afterwards.
    """


class RunFailed(UserError):
    """A run that had begun could not go on."""
