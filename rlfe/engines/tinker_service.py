"""A connection to whatever speaks the Tinker API: the Tinker service, or a server of one's own.

What: opening it, which models it trains, waiting for replies with a watch on whether anything
still answers, and what its refusals mean. Retries are the client package's own. `TINKER_BASE_URL`
and `TINKER_API_KEY` come from the environment and are written nowhere. Not here: what is asked
(`tinker.py`, `tinker_learner.py`).
Try it: `TINKER_BASE_URL=http://localhost:8000 TINKER_API_KEY=tml-local rlfe train --engine tinker`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Hashable, Iterator, Mapping
from concurrent import futures
from contextlib import suppress
from typing import Any, TypeVar

from rlfe.errors import (
    NetworkError,
    NotAllowedError,
    NotFoundError,
    QuotaError,
    RequestError,
    RlfeError,
)
from rlfe.suggestions import nearest

URL, KEY = "TINKER_BASE_URL", "TINKER_API_KEY"
DEFAULT_URL = "https://tinker.thinkingmachines.dev/services/tinker-prod"  # the client package's
TIMEOUT_SECONDS = 3600  # without a reply to one request
SILENT_SECONDS = 60  # in which nothing answers at that address any more
PAUSE_SECONDS = 5  # between two looks at whether something does
PING_SECONDS = 10
# What they log is raised as well, or is the client's own bookkeeping.
QUIET = ("tinker.lib.telemetry", "tinker.lib.retry_handler")
RESUME = "Start it again, or wait until it answers, and go on with --resume."

T = TypeVar("T")
Key = TypeVar("Key", bound=Hashable)


class Service:
    """One session at a server.

    Args:
        timeout_seconds: How long one request may take before the run ends.
        silent_seconds: How long nothing may answer at the address while a reply is waited for.

    Raises:
        NotAllowedError: No key, or the server refuses it. NetworkError: Nothing answers.
        NotFoundError: What answers is no Tinker API.
    """

    def __init__(
        self,
        *,
        timeout_seconds: float = TIMEOUT_SECONDS,
        silent_seconds: float = SILENT_SECONDS,
        pause_seconds: float = PAUSE_SECONDS,
    ) -> None:
        self._timeout, self._silent, self._pause = timeout_seconds, silent_seconds, pause_seconds
        self._url, key = settings(os.environ)
        if not self.answers():
            raise NetworkError(
                f"nothing answers at {shown(self._url)} ({URL})",
                hint="Check the address and the network, and whether the server is running.",
            )
        import tinker

        for name in QUIET:
            logging.getLogger(name).setLevel(logging.CRITICAL)
        named: dict[str, Any] = {"base_url": self._url, "api_key": key}
        self.client: Any = self.call(lambda: tinker.ServiceClient(**named), OPENING)
        self.rest: Any = self.call(lambda: _rest(tinker, self.client, named), OPENING)

    def answers(self) -> bool:
        """Whether anything speaks HTTP at the address, whatever it says."""
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/healthz", timeout=PING_SECONDS):
                return True
        except urllib.error.HTTPError:
            return True
        except (OSError, ValueError):
            return False

    def models(self) -> tuple[str, ...]:
        """Names of the models that it trains."""
        found = self.call(lambda: self.rest.get_server_capabilities(), OPENING)
        if hasattr(found, "result"):
            found = self.wait(found, OPENING)
        return tuple(
            model.model_name
            for model in found.supported_models
            if model.model_name and getattr(model, "trainable", None) is not False
        )

    def need_model(self, name: str) -> None:
        """NotFoundError if the server does not train this model."""
        known = self.models()
        if name in known:
            return
        close = nearest(name, known)
        more = f"the nearest is {close}" if close else f"it has {', '.join(known[:5]) or 'none'}"
        raise NotFoundError(
            f"the service at {shown(self._url)} does not train {name}; {more}",
            hint="Set model.path, or service.model if the service knows it by another name.",
        )

    def sampling_client(self, **source: str) -> Any:
        """A client for `model_path` (a saved snapshot) or `base_model`."""
        phase = f"opening {next(iter(source.values()))} for sampling"
        found = self.call(lambda: self.client.create_sampling_client(**source), phase)
        return self.wait(found, phase) if hasattr(found, "result") else found

    def path_of(self, sampling_client: Any) -> str | None:
        """The snapshot that a sampling client draws from, as the server tells it."""
        session = sampling_client._sampling_session_id  # the client has no public name for it
        phase = "asking which weights the sampler holds"
        found: str | None = self.wait(self.rest.get_sampler(session), phase).model_path
        return found

    def call(self, ask: Callable[[], T], phase: str) -> T:
        """The result of a blocking call of the client, waited for like a reply."""
        found: T = self.wait(_in_background(ask), phase)
        return found

    def wait(self, future: Any, phase: str) -> Any:
        """The result of a future.

        Raises:
            RlfeError: The server refused, failed, fell silent or took too long; names the phase.
        """
        return next(self.finished({"only": future}, phase))[1]

    def finished(self, waiting: Mapping[Key, Any], phase: str) -> Iterator[tuple[Key, Any]]:
        """Yield (key, result) as the futures finish; errors as in `wait`."""
        left = {_inner(future): key for key, future in waiting.items()}
        last_reply = last_sign = time.monotonic()
        while left:
            done, _ = futures.wait(left, self._pause, return_when=futures.FIRST_COMPLETED)
            now = time.monotonic()
            for future in done:
                last_reply = last_sign = now
                yield left.pop(future), self._result(future, phase)
            if done:
                continue
            last_sign = time.monotonic() if self.answers() else last_sign
            if now - last_sign >= self._silent:
                raise NetworkError(
                    f"the service at {shown(self._url)} was lost while {phase}: nothing has "
                    f"answered for {now - last_sign:.0f} s",
                    hint=RESUME,
                )
            if now - last_reply >= self._timeout:
                raise NetworkError(
                    f"the service gave no reply within {self._timeout:g} s while {phase}",
                    hint="Raise service.timeout_seconds if it is only slow; go on with --resume.",
                )

    def close(self) -> None:
        """End the session, if the server still listens: everything that counts is saved."""
        if hasattr(self.client, "close"):  # older clients end it with the process
            with suppress(Exception):
                self.client.close("success").result(timeout=PING_SECONDS)

    def _result(self, future: futures.Future[Any], phase: str) -> Any:
        try:
            return future.result()
        except RlfeError:
            raise
        except Exception as error:
            if isinstance(error, MISTAKES):
                raise
            raise translated(error, phase, self._url) from error


MISTAKES = (AttributeError, NameError, TypeError)  # ours, not the server's
OPENING = "opening a session"


def settings(environment: Mapping[str, str]) -> tuple[str, str]:
    """(address, key) from the environment.

    Raises:
        NotAllowedError: There is no key. RequestError: The address is none.
    """
    url = (environment.get(URL) or DEFAULT_URL).rstrip("/")
    if urllib.parse.urlsplit(url).scheme not in ("http", "https"):
        raise RequestError(
            f'{URL} = "{shown(url)}" is no address', hint="It begins with http:// or https://."
        )
    key = environment.get(KEY)
    if not key:
        raise NotAllowedError(
            f"{KEY} is not set", hint="The engine takes the service's key from the environment."
        )
    return url, key


def shown(url: str) -> str:
    """An address without a user or password in it."""
    parts = urllib.parse.urlsplit(url)
    return urllib.parse.urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2]))


def translated(error: BaseException, phase: str, url: str) -> RlfeError:
    """The client's exception as ours: what happened, in which phase, what to do."""
    import tinker

    cause = _status_error(error)
    text = f"while {phase}: {reason(cause)}"
    place = shown(url)
    no_key = type(cause) is tinker.TinkerError and "api_key" in text  # not even sent
    if no_key or isinstance(cause, tinker.AuthenticationError | tinker.PermissionDeniedError):
        return NotAllowedError(f"the service at {place} refuses the key in {KEY} ({text})")
    failed = tinker.APIConnectionError | tinker.RateLimitError | tinker.InternalServerError
    if phase == OPENING and not isinstance(cause, failed):
        return NotFoundError(
            f"what answers at {place} is no Tinker API ({text})",
            hint=f"Check {URL}; without it the Tinker service itself is asked.",
        )
    if isinstance(cause, tinker.NotFoundError):
        return NotFoundError(
            f"the service does not have it ({text})",
            hint="It keeps snapshots for a while only; start the run again with --overwrite.",
        )
    if isinstance(cause, tinker.RateLimitError):
        return QuotaError(f"the service takes no more requests ({text})", hint=RESUME)
    if isinstance(cause, tinker.APIConnectionError | tinker.InternalServerError):
        return NetworkError(f"the service failed ({text})", hint=RESUME)
    return RlfeError(
        f"the service refused ({text})",
        hint="A server that is older than the client needs an older client (docs/tinker.md).",
    )


def reason(error: BaseException) -> str:
    """The first line of an error, or its name."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _status_error(error: BaseException) -> BaseException:
    """The HTTP error under an exception that was raised because of it."""
    import tinker

    seen: BaseException | None = error
    while seen is not None and not isinstance(seen, tinker.APIError):
        seen = seen.__cause__
    return error if seen is None else seen


def _rest(package: Any, client: Any, named: Mapping[str, str]) -> Any:
    """What lists models and files; clients before 0.3x make it from the service client."""
    if hasattr(package, "RestClient"):
        return package.RestClient(**named)
    made = client.create_rest_client()
    made.get_server_capabilities = client.get_server_capabilities
    return made


def _inner(future: Any) -> futures.Future[Any]:
    """The `concurrent.futures` one inside the client's futures."""
    found = future if type(future) is futures.Future else future.future()
    assert isinstance(found, futures.Future)
    return found


def _in_background(ask: Callable[[], T]) -> futures.Future[T]:
    """A call in a thread that does not keep the process alive."""
    future: futures.Future[T] = futures.Future()

    def work() -> None:
        try:
            future.set_result(ask())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=work, daemon=True, name="rlfe-tinker").start()
    return future
