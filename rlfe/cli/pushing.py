"""What `rlfe push` does, stage by stage: discover, look, plan, card; with --yes send and verify.

The plan and the card are shown first; nothing is made on the Hub before that. Not here: how files
are compared and sent (`rlfe.hub`), how a plan looks (`rlfe.cli.push_view`).
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from rlfe.cli import output
from rlfe.cli.publication import (
    Publication,
    Stated,
    hub_base_card,
    no_base_card,
    open_runs,
    publication,
)
from rlfe.cli.push_view import COLUMNS, Report, quiet_client, rows_of, size_text
from rlfe.errors import (
    NetworkError,
    NotAllowedError,
    PartialError,
    QuotaError,
    RequestError,
    RlfeError,
)
from rlfe.hub import metadata
from rlfe.hub.cache import Cache
from rlfe.hub.card_metadata import check_license, license_of
from rlfe.hub.client import Client, endpoint
from rlfe.hub.discover import LocalRun
from rlfe.hub.folder import check_target, same_in_folder, write_tree
from rlfe.hub.plan import Plan, make_plan, plan_warnings
from rlfe.hub.publish import Documents, manifest_entries, publish_documents
from rlfe.hub.secrets import first_secret_in
from rlfe.hub.target import UNKNOWN, Look, look_in_folder, look_on_hub
from rlfe.hub.upload import Sent, Uploader
from rlfe.hub.verify import load_problems, verify, write_receipts
from rlfe.hub_calls import TRIES, Patience

DRY_TRIES = 2  # nobody waits long for a dry run
PLACEHOLDER_REPO = "ORG/NAME"  # in the card of a folder: the repository it may go to one day


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The command line, checked."""

    runs: tuple[str, ...]
    repo: str | None
    to_folder: Path | None
    private: bool | None  # None: not said
    revision: str
    steps: str | None
    exclude: tuple[str, ...]
    per_commit: int
    with_card: bool
    card_only: bool
    tag: str | None
    prune: bool
    verify: bool
    wait: bool
    yes: bool
    as_json: bool
    stated: Stated

    @property
    def place(self) -> str:
        return self.repo or str(self.to_folder)

    def command(self) -> str:
        """The command line that really sends, with the user's own values."""
        values: list[tuple[str, str | None]] = [
            ("--repo", self.repo),
            ("--to-folder", str(self.to_folder) if self.to_folder else None),
            ("--revision", self.revision if self.revision != "main" else None),
            ("--steps", self.steps),
            ("--exclude", ",".join(self.exclude) or None),
            ("--checkpoints-per-commit", str(self.per_commit) if self.per_commit > 1 else None),
            ("--tag", self.tag),
            *self.stated.options(),
        ]
        flags = [
            ("--public", self.private is False), ("--private", self.private is True),
            ("--no-card", not self.with_card),
            ("--card-only", self.card_only), ("--prune", self.prune),
            ("--no-verify", not self.verify), ("--wait", self.wait),
        ]  # fmt: skip
        words = [word for name, value in values if value for word in (name, value)]
        words += [name for name, is_set in flags if is_set]
        return shlex.join(["rlfe", "push", *self.runs, *words, "--yes"])


def _refuse_secrets(text: str) -> None:
    secret = first_secret_in(text.encode().splitlines())
    if secret is not None:
        raise RequestError(
            f"README.md:{secret.line} holds what looks like a {secret.shape}",
            hint="Revoke it if it is real, and remove it from where the card takes it.",
        )


class Push:
    """One push, from discovery to receipt."""

    def __init__(self, request: Request) -> None:
        self.request = request
        self.client: Client | None = None
        self.report: Report | None = None
        if request.repo is not None:
            quiet_client()
            patience = Patience(
                tries=TRIES if request.yes else DRY_TRIES, for_quota=request.wait, say=output.note
            )
            self.client = Client(request.repo, revision=request.revision, patience=patience)

    def run(self) -> int:
        """All stages; returns the exit code."""
        request = self.request
        runs, caches = open_runs(request.runs, steps=request.steps, exclude=request.exclude)
        self._need_checkpoints(runs)
        look = self._look(runs)
        plan = self._plan(runs, caches, look)
        pub = self._publication(runs, look) if request.with_card else None
        if request.yes and pub is not None:
            check_license(pub.material)
        plan = replace(plan, card=pub.card_text(look.card) if pub else "")
        _refuse_secrets(plan.card)
        self._warn(plan, pub, look)
        if not request.yes:
            self._show(plan)
            return 0
        sent, wrong = self._send(plan, pub, caches)
        for cache in caches.values():
            cache.save()
        return self._finish(plan, sent, wrong)

    # -- before -------------------------------------------------------------------------------

    def _need_checkpoints(self, runs: Sequence[LocalRun]) -> None:
        if self.request.card_only or any(run.checkpoints for run in runs):
            return
        why = [f"  {name}: {reason}" for run in runs for name, reason in run.left_home.items()]
        told = "\n".join(why) or f"  {', '.join(run.name for run in runs)}: no global_step_<N>"
        raise PartialError(
            f"no checkpoint is complete, nothing is pushed:\n{told}",
            hint="Finish, merge or repair a checkpoint (or choose other --steps).",
        )

    def _look(self, runs: Sequence[LocalRun]) -> Look:
        """What is there. A dry run goes on without it; then everything counts as new."""
        if self.client is None:
            assert self.request.to_folder is not None
            check_target(self.request.to_folder, [run.folder for run in runs])
            return look_in_folder(self.request.to_folder.expanduser())
        try:
            look = look_on_hub(
                self.client, [run.name for run in runs], tasks={run.cell.task for run in runs}
            )
            if self.request.yes:
                self.client.check_role()
            return look
        except (NetworkError, NotAllowedError, QuotaError) as error:
            if self.request.yes:
                raise
            output.warn(f"the remote state is unknown, everything counts as new: {error.what}")
            return UNKNOWN

    def _plan(self, runs: Sequence[LocalRun], caches: Mapping[str, Cache], look: Look) -> Plan:
        request = self.request
        chosen = [] if request.card_only else runs
        plan = make_plan(request.place, chosen, remote=look.files, caches=caches)
        if request.to_folder is not None:
            plan = same_in_folder(plan, request.to_folder.expanduser())
        for cache in caches.values():
            cache.save()
        private = look.facts.private if look.facts else request.private is not False
        warnings = plan_warnings(
            plan, commits=len(plan.commits(request.per_commit)) + request.with_card,
            private=private and self.client is not None, prune=request.prune,
            endpoint=endpoint() if self.client else None,
        )  # fmt: skip
        if look.facts and request.private not in (None, look.facts.private):
            kind = "private" if look.facts.private else "public"
            warnings += (f"{request.repo} exists and stays {kind}",)
        return replace(plan, warnings=warnings)

    def _publication(self, runs: Sequence[LocalRun], look: Look) -> Publication:
        names = {run.name for run in runs}
        others = [name for name in look.cells if name not in names]
        may_ask = look.files is not None and (self.client is not None or self.request.yes)
        return publication(
            runs, self.request.repo or PLACEHOLDER_REPO, self.request.stated, other_cells=others,
            base_card=hub_base_card if may_ask else no_base_card,
        )  # fmt: skip

    def _warn(self, plan: Plan, pub: Publication | None, look: Look) -> None:
        for text in plan.warnings:
            output.warn(text)
        for name, why in plan.left_home.items():
            output.warn(f"{name} stays home: {why}")
        if pub is None:
            return
        place = self.request.place
        if not metadata.is_ours(look.card):
            output.warn(f"the README.md of {place} was not written by rlfe: --yes replaces it")
        for name in pub.material.other_cells:
            output.warn(f"{name} is there and not among these runs: the card leaves it out")
        if license_of(pub.material) is None and not self.request.yes:
            output.warn("the base model's license is not known: --yes will ask for --license ID")

    # -- showing ------------------------------------------------------------------------------

    def _show(self, plan: Plan) -> None:
        if self.request.as_json:
            output.document(self._document(plan, []))
        else:
            output.table(COLUMNS, rows_of(plan))
            commits = len(plan.commits(self.request.per_commit))
            beside = " and one for card and tables" if self.request.with_card else ""
            output.result(
                f"\n{size_text(plan.bytes_to_send)} at most in {commits} commits{beside} "
                f"to {self.request.place}"
            )
            if plan.card:
                output.result(f"\n{plan.card}")
        output.hint(f"Nothing was sent. To send it: {self.request.command()}")

    def _document(self, plan: Plan, sent: Sequence[Sent]) -> dict[str, Any]:
        summary = plan.summary(plan.commits(self.request.per_commit))
        return {
            "schema": "rlfe.push/1",
            "rows": [dict(zip(COLUMNS, row, strict=True)) for row in rows_of(plan, exact=True)],
            "run": {
                "place": self.request.place, "revision": self.request.revision,
                "remote_known": plan.remote_known, "commits": summary.commits,
                "bytes": plan.bytes_to_send, "files": summary.files, "warnings": summary.warnings,
                "left_home": summary.skipped, "card": plan.card, "sent": list(sent),
                "command": self.request.command(),
            },
        }  # fmt: skip

    # -- sending ------------------------------------------------------------------------------

    def _send(
        self, plan: Plan, pub: Publication | None, caches: Mapping[str, Cache]
    ) -> tuple[list[Sent], list[str]]:
        try:
            if self.client is None:
                self._write(plan, pub, caches)
                return [], []
            return self._upload(self.client, plan, pub, caches)
        except (KeyboardInterrupt, RlfeError, OSError):
            there = self.report.summary() if self.report else "Nothing was sent"
            output.hint(f"{there}; nothing is half done. To go on: {self.request.command()}")
            raise

    def _documents(
        self, plan: Plan, pub: Publication | None, caches: Mapping[str, Cache]
    ) -> Documents | None:
        if pub is None:
            return None
        make: Callable[[str | None], str] = pub.with_commits().card_text
        return Documents(files=pub.files, card=make, entries=manifest_entries(plan, caches))

    def _write(self, plan: Plan, pub: Publication | None, caches: Mapping[str, Cache]) -> None:
        assert self.request.to_folder is not None
        target = self.request.to_folder.expanduser()
        target.mkdir(parents=True, exist_ok=True)
        self.report = Report(plan)
        write_tree(plan, target, self._documents(plan, pub, caches), self.report.landed)

    def _upload(
        self, client: Client, plan: Plan, pub: Publication | None, caches: Mapping[str, Cache]
    ) -> tuple[list[Sent], list[str]]:
        request = self.request
        client.ensure_repo(private=request.private is not False)
        self.report = Report(plan)
        uploader = Uploader(client, caches, self.report.landed)
        sent = uploader.send(plan, checkpoints_per_commit=request.per_commit)
        delete = [file.remote for file in plan.remote_only] if request.prune else []
        documents = self._documents(plan, pub, caches)
        last = publish_documents(client, documents, delete=delete)
        sent += [last] if last else []
        wrong = verify(client, plan, caches) if request.verify else []
        unloadable = load_problems(client, plan, caches) if request.verify and not wrong else []
        if request.tag and not wrong and not unloadable:
            client.tag(request.tag)
        self._write_receipts(client, plan, sent, wrong, unloadable)
        return sent, wrong + unloadable

    def _write_receipts(
        self,
        client: Client,
        plan: Plan,
        sent: Sequence[Sent],
        wrong: Sequence[str],
        unloadable: Sequence[str],
    ) -> None:
        verified = not (wrong or unloadable) if self.request.verify else None
        head = client.head()
        try:
            write_receipts(
                plan, sent, repo=client.repo_id, revision=client.revision, head=head,
                verified=verified, tag=self.request.tag, unloadable=unloadable,
            )  # fmt: skip
        except (OSError, RlfeError) as error:
            output.warn(f"no receipt is kept: {error}")

    def _finish(self, plan: Plan, sent: Sequence[Sent], wrong: Sequence[str]) -> int:
        if self.request.as_json:
            output.document(self._document(plan, sent))
        elif self.client is not None:
            checked = "verified" if self.request.verify and not wrong else "not verified"
            output.result(f"{self.request.repo}: {len(sent)} commits, {checked}")
        else:
            output.result(f"{self.request.to_folder}: {len(plan.to_send)} parts written")
        if wrong:
            raise PartialError(
                f"{self.request.place} is not as it should be:\n  " + "\n  ".join(wrong[:10]),
                hint="Repair what does not load (or give --no-verify) and run the command again.",
            )
        last = next((u.checkpoint for u in reversed(plan.units) if u.checkpoint), None)
        if last is not None:
            output.hint(
                f'Next: AutoModelForCausalLM.from_pretrained("{self.request.place}", '
                f'subfolder="{last.subfolder}")'
            )
        return PartialError.exit_code if plan.left_home else 0
