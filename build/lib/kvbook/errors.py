"""The one error that a user is meant to read."""


class UserError(Exception):
    """Input that cannot be used; its message is one line that says what to do.

    The command line prints the message alone and exits with status 2; a notebook shows it without a traceback.
    """

    def _render_traceback_(self) -> list[str]:
        # IPython calls this hook instead of printing its own traceback: the reader needs the line, not our stack.
        return [f"{type(self).__name__}: {self}"]
