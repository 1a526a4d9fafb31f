"""Errors that a user can act on. Each class knows its exit code (table in `docs/cli.md`).

An `RlfeError` message says what is wrong, which value it is, and what to do next. Programming
mistakes of ours are `assert`s and ordinary exceptions instead.
"""


class RlfeError(Exception):
    """Something failed while running (exit 1); base of the family.

    Args:
        what: What is wrong, with the value.
        hint: What to do next, in one sentence; shown on its own line.
    """

    exit_code = 1

    def __init__(self, what: str, *, hint: str = "") -> None:
        super().__init__(what)
        self.what, self.hint = what, hint

    def __str__(self) -> str:
        return f"{self.what}\n{self.hint}" if self.hint else self.what


class RequestError(RlfeError):
    """The request is wrong: an option, a key, an empty glob, a run that would be overwritten."""

    exit_code = 2


class PartialError(RlfeError):
    """Part was left out, a rule ended the run, or a stated condition is not met."""

    exit_code = 3


class NotAllowedError(RlfeError):
    """Token missing or invalid, no rights, or a gated repository."""

    exit_code = 4


class NotFoundError(RlfeError):
    """Repository, revision, subfolder or model folder not found."""

    exit_code = 5


class QuotaError(RlfeError):
    """Storage quota or rate limit."""

    exit_code = 6


class NetworkError(RlfeError):
    """The network or the service behind it did not answer."""

    exit_code = 7
