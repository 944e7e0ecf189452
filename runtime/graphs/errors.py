"""What can go wrong with a captured graph, each with its own type."""


class CaptureError(RuntimeError):
    """The callable can't be captured: replays would not do what it does. The message names the op and the line."""


class PoisonError(RuntimeError):
    """With `debug_poison`: a number that no input had, from padding or from memory that nothing wrote, came out."""
