"""What the client's failures mean, and how long a call is tried."""

from __future__ import annotations

import errno
from types import SimpleNamespace

import pytest
from huggingface_hub import errors as hub

from rlfe.errors import (
    NetworkError,
    NotAllowedError,
    NotFoundError,
    QuotaError,
    RequestError,
    RlfeError,
)
from rlfe.hub_calls import ConflictError, Context, Patience, patiently, translate

HERE = Context(repo_id="org/x", account="alice")


def answer(status, **headers):
    request = SimpleNamespace(method="POST", url="http://h/api")
    return SimpleNamespace(status_code=status, headers=headers, request=request, text="", json=dict)


def http(status, text="told", kind=hub.HfHubHTTPError, **headers):
    return kind(text, response=answer(status, **headers))


@pytest.mark.parametrize(
    ("error", "meaning", "words"),
    [
        (http(401), NotAllowedError, "token is invalid"),
        (http(403), NotAllowedError, "account alice may read but not write org/x"),
        (http(403, "Private storage limit reached"), QuotaError, "storage quota: Private storage"),
        (http(403, kind=hub.GatedRepoError), NotAllowedError, "gated"),
        (http(404, kind=hub.RepositoryNotFoundError), NotFoundError, "not visible to alice"),
        (http(404, kind=hub.RevisionNotFoundError), NotFoundError, "no such revision"),
        (http(404, kind=hub.RemoteEntryNotFoundError), NotFoundError, "no such file"),
        (http(413), RlfeError, "the Hub answered 413"),
        (http(412), ConflictError, "told"),
        (hub.HFValidationError("bad"), RequestError, "not a repository name"),
        (hub.OfflineModeIsEnabled("x"), NetworkError, "HF_HUB_OFFLINE"),
        (hub.LocalTokenNotFoundError("x"), NotAllowedError, "not logged in"),
        (ValueError("Invalid metadata in README.md."), RequestError, "refused the card"),
        (ConnectionError("xet: 401 Unauthorized"), NotAllowedError, "refused the token"),
        (ConnectionError("client error (403 Forbidden)"), NotAllowedError, "storage is full"),
        (OSError(errno.ENOSPC, "No space left on device"), RlfeError, "disk full"),
        (RuntimeError("xet: No space left on device"), RlfeError, "disk full"),
    ],
)
def test_a_failure_that_no_second_try_can_help_is_told_at_once(error, meaning, words):
    failure = translate(error, HERE)
    assert type(failure.error) is meaning
    assert words in str(failure.error)
    assert failure.wait_seconds is None


@pytest.mark.parametrize(
    "error",
    [http(500), http(503), http(408), ConnectionError("reset"), TimeoutError("slow")],
)
def test_a_failure_of_the_network_is_tried_again_and_ends_with_exit_7(error):
    waits = []

    def make():
        raise error

    with pytest.raises(NetworkError) as caught:
        patiently(make, HERE, Patience(sleep=waits.append))
    assert waits == [0.5, 1, 2, 4]
    assert caught.value.exit_code == 7
    assert caught.value.hint


def test_what_the_store_gave_up_is_not_tried_again_after_a_minute():
    now, calls = [0.0], []

    def make():
        calls.append(now[0])
        now[0] += 40  # the store's client tries by itself
        raise ConnectionError("HTTP status server error (503 Service Unavailable)")

    def sleep(seconds):
        now[0] += seconds

    with pytest.raises(NetworkError) as caught:
        patiently(make, HERE, Patience(sleep=sleep, clock=lambda: now[0]))
    assert caught.value.exit_code == 7
    assert calls == [0, 40.5]
    assert now == [80.5]


def test_a_rate_limit_is_waited_for_as_told():
    waits, said = [], []
    answers = [http(429, RateLimit='"api";r=0;t=7'), None]

    def make():
        if (error := answers.pop(0)) is not None:
            raise error
        return "done"

    patience = Patience(sleep=waits.append, say=said.append)
    assert patiently(make, HERE, patience) == "done"
    assert waits == [7]
    assert said == ["rate limit: told; trying again in 7 s"]


def test_the_hourly_commit_limit_is_waited_for_only_when_asked():
    text = "You have exceeded the rate limit for repository commits (128 per hour)."
    waits = []
    left = [1] * 7

    def make():
        if left:
            left.pop()
            raise http(429, text)
        return "done"

    with pytest.raises(QuotaError, match="128 commits an hour") as caught:
        patiently(make, HERE, Patience(sleep=waits.append))
    assert "--wait" in caught.value.hint
    assert waits == []
    assert patiently(make, HERE, Patience(sleep=waits.append, for_quota=True)) == "done"
    assert waits == [60] * 60 * 6


def test_a_commit_that_landed_in_spite_of_the_error_is_not_made_again():
    calls = []

    def make():
        calls.append(1)
        raise http(504)

    found = patiently(make, HERE, Patience(sleep=lambda _: None), landed=lambda: "oid")
    assert found == "oid"
    assert calls == [1]


def test_mistakes_of_ours_are_not_called_a_failure_of_the_hub():
    with pytest.raises(KeyError):
        patiently(lambda: {}["x"], HERE)
