"""What would spoil an evaluation late and can be known early: checked before a model is loaded."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Sequence
from pathlib import Path

from rlfe import checkpoints
from rlfe.cli.evaluation_output import Options
from rlfe.errors import RequestError, RlfeError
from rlfe.eval import conditions
from rlfe.eval.jobs import Job
from rlfe.eval.tally import measures


def before_work(
    options: Options, jobs: Sequence[Job], wanted: Sequence[conditions.Condition]
) -> None:
    """Conditions that no score can meet, and folders that cannot be written.

    Raises:
        RequestError: A condition asks for a score that this call does not make.
        RlfeError: A folder of the results cannot be written.
    """
    samples = {
        measure.name: job.settings.n
        for job in jobs
        for measure in measures(job.task.name, job.settings.mode)
    }
    conditions.check(wanted, samples)
    folders = [options.table_base.parent, *(job.target.evals for job in jobs)]
    for folder in dict.fromkeys(folders):
        check_writable(folder)


def check_writable(folder: Path) -> None:
    """Write something into the folder or, where it is not there, into the one it will be made in.

    Raises:
        RlfeError: It cannot be written.
    """
    place = folder
    while not place.exists() and place != place.parent:
        place = place.parent
    try:
        handle, name = tempfile.mkstemp(prefix=".rlfe-", dir=place)
        os.close(handle)
        os.unlink(name)
    except OSError as error:
        raise RlfeError(
            f"{place} cannot be written: {error.strerror}",
            hint="Give a --runs-dir that can, or change its rights; nothing was loaded yet.",
        ) from error


def check_base(folder: Path) -> None:
    """Refuse a base model whose files are damaged; fakes of tests have no weights to read.

    Raises:
        RequestError: A file is missing, cut short or no safetensors; all reasons are named.
    """
    lacks = checkpoints.problems(folder)
    if lacks:
        raise RequestError(
            f"{folder} is no complete model: {'; '.join(lacks)}",
            hint="Fetch the model again; only complete folders with safetensors weights load.",
        )
