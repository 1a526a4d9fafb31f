"""The Hub's client with our patience: retries, waits, and errors that a user can act on.

`create_commit` is never retried by the client and without xet `upload_folder` is not either, so
every call goes through `Client.call`. A commit that failed may have landed all the same: who sends
files looks at the tree before trying again (`rlfe.hub.upload`). The token is found by the library
(HF_TOKEN, token file), passed nowhere and printed nowhere. Try: `Client("org/x").account()`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, TypeVar

from rlfe.errors import NotAllowedError, NotFoundError
from rlfe.hub.plan import RemoteFile
from rlfe.hub_calls import LOGIN, USUAL, Context, Patience, patiently

PUBLIC_ENDPOINT = "https://huggingface.co"
Result = TypeVar("Result")


class RepoFacts(NamedTuple):
    """What a look at the repository says. `RepoFacts(private=True, head="9f..")`"""

    private: bool
    head: str


class Client:
    """One repository of the Hub, seen through the real client.

    Args:
        repo_id: "org/name", checked before.
        revision: Branch to read and write.
        patience: How long calls are tried.
    """

    def __init__(
        self,
        repo_id: str,
        *,
        revision: str = "main",
        patience: Patience = USUAL,
    ) -> None:
        from huggingface_hub import HfApi

        self.api = HfApi(library_name="rlfe")
        self.repo_id, self.revision = repo_id, revision
        self.patience = patience
        self.user = ""
        self.may_write = True

    def call(
        self,
        make: Callable[[], Result],
        *,
        landed: Callable[[], Result | None] = lambda: None,
    ) -> Result:
        """`make()` with our patience (`rlfe.hub_calls.patiently`)."""
        context = Context(repo_id=self.repo_id, account=self.user)
        return patiently(make, context, self.patience, landed=landed)

    # -- looking -------------------------------------------------------------------------------

    def account(self) -> str:
        """The account of the token. Raises `NotAllowedError` (exit 4) without a valid one."""
        from huggingface_hub import get_token

        if not get_token():
            raise NotAllowedError("not logged in to the Hub: there is no token", hint=LOGIN)
        facts = self.call(self.api.whoami)
        self.user = str(facts["name"])
        token = facts.get("auth", {}).get("accessToken") or {}
        self.may_write = token.get("role") != "read"
        return self.user

    def check_role(self) -> None:
        """Raises `NotAllowedError` when the token can only read (known after `account`)."""
        if not self.may_write:
            raise NotAllowedError(
                f"account {self.user} may read but not write {self.repo_id}: its token only reads",
                hint=LOGIN,
            )

    def facts(self) -> RepoFacts | None:
        """Visibility and head of the repository; None when it is not there (or not visible)."""
        try:
            info = self.call(lambda: self.api.repo_info(self.repo_id))
        except NotFoundError:
            return None
        return RepoFacts(private=bool(info.private), head=str(info.sha))

    def head(self) -> str:
        """Commit id of the revision."""
        return str(self.call(lambda: self.api.repo_info(self.repo_id, revision=self.revision)).sha)

    def files(self, folder: str | None = None, *, recursive: bool = True) -> dict[str, RemoteFile]:
        """Files below a folder of the repository by path; empty when there is no such folder."""
        from huggingface_hub.errors import EntryNotFoundError

        def listing() -> list[Any]:
            try:
                return list(self.api.list_repo_tree(
                    self.repo_id, folder, recursive=recursive, revision=self.revision
                ))  # fmt: skip
            except EntryNotFoundError:
                return []

        return {entry.path: _remote_file(entry) for entry in self.call(listing) if _is_file(entry)}

    def entries(self) -> dict[str, RemoteFile | None]:
        """What lies at the root: files by name, and folders with None."""
        listing = self.call(lambda: list(self.api.list_repo_tree(
            self.repo_id, revision=self.revision
        )))  # fmt: skip
        return {entry.path: _remote_file(entry) if _is_file(entry) else None for entry in listing}

    def revisions(self) -> list[str]:
        """Names of branches and tags."""
        refs = self.call(lambda: self.api.list_repo_refs(self.repo_id))
        return [ref.name for ref in (*refs.branches, *refs.tags)]

    def text(self, path: str, revision: str | None = None) -> str | None:
        """A small text file of the repository, read past the user's cache; None if absent."""
        from tempfile import TemporaryDirectory

        from huggingface_hub.errors import EntryNotFoundError

        def read() -> str | None:
            with TemporaryDirectory() as folder:
                try:
                    found = self.api.hf_hub_download(
                        self.repo_id, path, revision=revision or self.revision, cache_dir=folder
                    )
                except EntryNotFoundError:
                    return None
                with open(found, encoding="utf-8", newline="") as file:
                    return file.read()

        return self.call(read)

    # -- making --------------------------------------------------------------------------------

    def ensure_repo(self, *, private: bool) -> bool:
        """Make the repository and branch if they are not there. True: the repository is new.

        Looks first: without the right to create, an existing repository may still be writable.
        The visibility of an existing one is left alone.
        """
        is_new = self.facts() is None
        if is_new:
            self.call(lambda: self.api.create_repo(self.repo_id, private=private, exist_ok=True))
        if self.revision != "main":
            self.call(lambda: self.api.create_branch(
                self.repo_id, branch=self.revision, exist_ok=True
            ))  # fmt: skip
        return is_new

    def tag(self, name: str) -> None:
        """Set a tag on the revision's head; an existing tag stays where it is."""
        self.call(lambda: self.api.create_tag(
            self.repo_id, tag=name, revision=self.revision, exist_ok=True
        ))  # fmt: skip


def _is_file(entry: Any) -> bool:
    return hasattr(entry, "blob_id")


def _remote_file(entry: Any) -> RemoteFile:
    lfs = entry.lfs
    sha256 = (lfs["sha256"] if isinstance(lfs, Mapping) else lfs.sha256) if lfs else ""
    return RemoteFile(size=entry.size, git_sha1=entry.blob_id, sha256=sha256)


def endpoint() -> str | None:
    """The endpoint if it is not the public Hub."""
    from huggingface_hub import constants

    return None if constants.ENDPOINT == PUBLIC_ENDPOINT else str(constants.ENDPOINT)
