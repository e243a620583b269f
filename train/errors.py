"""How a training run can end badly without its user's input being at fault."""


class RunFailure(RuntimeError):
    """A run could not go on: the disk is full, a checkpoint could not be written, the loss is not finite.

    Command lines print the message without a traceback and exit with status 1.
    """
