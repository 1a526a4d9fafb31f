"""Calls to the Hub with our patience, and what failures mean to a user (docs/hub.md 3).

`patiently` tries again after 429, 5xx, time-outs and broken connections; `translate` gives each
exception of the client one sentence and one exit code.

The client raises `httpx` errors in 1.x and `httpx2` ones in 2.x, and its xet part the builtin
`ConnectionError`, so transport errors are known by their module's root and neither library is
imported. Try: `patiently(api.whoami, Context())`.
"""

from __future__ import annotations

import errno
import itertools
import re
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeVar

from rlfe.errors import (
    NetworkError,
    NotAllowedError,
    NotFoundError,
    QuotaError,
    RequestError,
    RlfeError,
)

TRANSPORT = ("httpx", "httpx2", "httpcore", "requests", "urllib3", "ssl")
LOGIN = "Log in with `hf auth login`, or set HF_TOKEN to a token with write access."
TRIES = 5
FIRST_WAIT_SECONDS = 0.5  # doubled after each try
STORE_SECONDS = 60.0  # the xet store's client is patient itself: no other try after so long
COUNTDOWN_SECONDS = 60.0  # between two lines about a long wait
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class Patience:
    """How long a call is tried. `say` gets a line for every wait; `sleep` waits.

    `for_quota`: also wait for the hourly commit limit. `store_seconds`: what the xet store's client
    gave up after its own tries is tried again only so long after the call began (by `clock`).
    """

    tries: int = TRIES
    store_seconds: float = STORE_SECONDS
    for_quota: bool = False
    say: Callable[[str], None] = lambda text: None
    sleep: Callable[[float], None] = time.sleep
    clock: Callable[[], float] = time.monotonic


USUAL = Patience()


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """Who and where, for the message. `Context(repo_id="org/x", account="alice")`"""

    repo_id: str = ""
    account: str = ""


class ConflictError(Exception):
    """Somebody committed since the listing (412): re-read, merge, try again. Never shown."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """How one failed call goes on. `wait_seconds` is None when trying again is useless.

    `is_quota`: the hourly commit limit, which is waited for only when asked to. `is_store`: the
    client has tried several times before it said so.
    """

    error: Exception
    wait_seconds: float | None = None
    is_quota: bool = False
    is_store: bool = False


def patiently(
    make: Callable[[], Result],
    context: Context,
    patience: Patience = Patience(),
    *,
    landed: Callable[[], Result | None] = lambda: None,
) -> Result:
    """`make()`, tried again as long as that can help.

    `landed` is asked before another try whether the call succeeded in spite of the error.
    Raises the `RlfeError` that fits, or `ConflictError` for a 412.
    """
    start = patience.clock()
    for number in itertools.count(1):
        try:
            return make()
        except Exception as error:
            if not is_from_client(error):
                raise
            failure = translate(error, context)
            found = landed() if failure.wait_seconds is not None else None
            if found is not None:
                return found
            if failure.is_store and patience.clock() - start >= patience.store_seconds:
                raise failure.error from error
            _pause(failure, number, error, patience)
    raise AssertionError("unreachable: the last failure raises")


def _pause(failure: Failure, number: int, cause: Exception, patience: Patience) -> None:
    waits = failure.is_quota and patience.for_quota
    last = number >= patience.tries and not waits
    if failure.wait_seconds is None or last or (failure.is_quota and not waits):
        raise failure.error from cause
    left = max(failure.wait_seconds, FIRST_WAIT_SECONDS * 2 ** (number - 1))
    while left > 0:
        patience.say(f"{failure.error.args[0]}; trying again in {left:.3g} s")
        patience.sleep(min(left, COUNTDOWN_SECONDS))
        left -= COUNTDOWN_SECONDS


def is_from_client(error: BaseException) -> bool:
    """Whether an exception comes from the Hub's client or the transport below it."""
    from huggingface_hub.errors import HfHubHTTPError, HFValidationError

    root = _root(error)
    if isinstance(error, RlfeError | ConflictError):
        return False
    known = isinstance(error, HfHubHTTPError | HFValidationError | OSError)
    is_xet = isinstance(error, RuntimeError) and _xet_words(str(error))
    is_card = isinstance(error, ValueError) and "metadata" in str(error).lower()
    return known or root in (*TRANSPORT, "huggingface_hub", "hf_xet") or is_xet or is_card


def translate(error: Exception, context: Context) -> Failure:
    """What a failed call means and whether it is worth another try."""
    from huggingface_hub import errors as hub

    if isinstance(error, hub.OfflineModeIsEnabled):
        return Failure(error=NetworkError(
            "the Hub cannot be reached: HF_HUB_OFFLINE=1 is set", hint="Unset it and try again."
        ))  # fmt: skip
    if isinstance(error, hub.HFValidationError):
        return Failure(error=RequestError(f"not a repository name: {error}"))
    if isinstance(error, hub.LocalTokenNotFoundError):
        return Failure(error=NotAllowedError("not logged in to the Hub", hint=LOGIN))
    if isinstance(error, hub.HfHubHTTPError):
        return _http_failure(error, context)
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return Failure(error=_disk_full(error))
    if isinstance(error, ValueError) and not isinstance(error, OSError):
        return Failure(error=RequestError(f"the Hub refused the card: {error}"))
    return _transport_failure(error, context)


def _http_failure(error: Any, context: Context) -> Failure:
    from huggingface_hub import errors as hub

    status = error.response.status_code if error.response is not None else 0
    where, who = context.repo_id or "the Hub", context.account or "this account"
    if isinstance(error, hub.GatedRepoError):  # a subclass of the next: first
        return Failure(error=NotAllowedError(
            f"{where} is gated and {who} has no access",
            hint=f"Request access at its page: {_endpoint()}/{context.repo_id}",
        ))  # fmt: skip
    if isinstance(error, hub.RepositoryNotFoundError):
        return Failure(error=NotFoundError(
            f"{where} was not found, or is not visible to {who}",
            hint="Check the name with the Hub's page, and the token with `hf auth whoami`.",
        ))  # fmt: skip
    if isinstance(error, hub.RevisionNotFoundError):
        return Failure(error=NotFoundError(f"{where} has no such revision"))
    if isinstance(error, hub.EntryNotFoundError):
        return Failure(error=NotFoundError(f"{where} has no such file: {_first_line(error)}"))
    return _status_failure(error, status, where, who)


def _status_failure(error: Any, status: int, where: str, who: str) -> Failure:
    text = _first_line(error)
    if status == 401:
        return Failure(
            error=NotAllowedError("not logged in to the Hub, or the token is invalid", hint=LOGIN)
        )
    words = str(error).lower()
    if status == 403 and any(word in words for word in ("storage", "quota", "billing")):
        hint = "Free some space or ask for more; what is there already is not sent again."
        return Failure(error=QuotaError(f"storage quota: {text}", hint=hint))
    if status == 403:
        return Failure(error=NotAllowedError(
            f"account {who} may read but not write {where}",
            hint="Use a token with write access, or ask an admin of the organisation.",
        ))  # fmt: skip
    if status == 412:
        return Failure(error=ConflictError(text))
    if status == 429:
        return _rate_failure(error, text)
    if status >= 500 or status == 408:
        failed = NetworkError(f"the Hub answered {status}: {text}", hint="Try again later.")
        return Failure(error=failed, wait_seconds=0.0)
    return Failure(error=RlfeError(f"the Hub answered {status}: {text}"))


def _rate_failure(error: Any, text: str) -> Failure:
    """429: wait as told. The commit limit (128 an hour) is told apart by its words."""
    words = str(error).lower()
    is_quota = "commit" in words and "hour" in words
    told = re.search(r"\bt=(\d+)", error.response.headers.get("RateLimit", ""))
    seconds = float(told[1]) if told else (3600.0 if is_quota else 30.0)
    what = "the limit of 128 commits an hour is reached" if is_quota else f"rate limit: {text}"
    hint = "Add --wait to wait for it, or --checkpoints-per-commit for fewer commits."
    return Failure(
        error=QuotaError(what, hint=hint if is_quota else "Try again in a few minutes."),
        wait_seconds=seconds, is_quota=is_quota,
    )  # fmt: skip


def _transport_failure(error: Exception, context: Context) -> Failure:
    if isinstance(error, ConnectionError | RuntimeError) and "401" in str(error):
        return Failure(error=NotAllowedError(
            f"the store refused the token while writing {context.repo_id}", hint=LOGIN
        ))  # fmt: skip
    if isinstance(error, ConnectionError | RuntimeError) and "403 Forbidden" in str(error):
        return Failure(error=NotAllowedError(  # the store's client swallows the Hub's own words
            f"the Hub lets nothing be written to {context.repo_id} (403): no right to write, or "
            "its storage is full",
            hint="Use a token with write access, or free some space at the repository's owner.",
        ))  # fmt: skip
    if "no space left" in str(error).lower():
        return Failure(error=_disk_full(error))
    failed = NetworkError(
        f"no connection to {_endpoint()}: {_first_line(error)}",
        hint="Check the network and run the same command again: nothing is sent twice.",
    )
    is_store = type(error) in (ConnectionError, RuntimeError) or _root(error) == "hf_xet"
    return Failure(error=failed, wait_seconds=0.0, is_store=is_store)


def _root(error: BaseException) -> str:
    return type(error).__module__.split(".")[0]


def _disk_full(error: Exception) -> RlfeError:
    return RlfeError(
        f"disk full: {_first_line(error)}",
        hint="Free some space (the client's caches lie in HF_HOME) and run the same command again.",
    )


def _xet_words(text: str) -> bool:
    low = text.lower()
    return any(word in low for word in ("xet", "cas ", "cas:", "data processing", "no space left"))


def _first_line(error: Exception) -> str:
    """The server's own words without the request's id and address."""
    served = str(getattr(error, "server_message", None) or "")
    lines = [line.strip() for line in (served or str(error)).splitlines() if line.strip()]
    return (lines[0] if lines else type(error).__name__)[:200]


def _endpoint() -> str:
    from huggingface_hub import constants

    return str(constants.ENDPOINT)
