"""The whole path with the real judge: known programs give the known scores."""

from pathlib import Path

import pytest

from rlfe.engines.fake import FakeSampler
from rlfe.eval.jobs import make_job
from rlfe.eval.judging import JudgeOnDemand
from rlfe.eval.places import Places
from rlfe.eval.runner import run_jobs
from rlfe.eval.samplers import Samplers
from rlfe.eval.settings import Settings
from rlfe.eval.tables import Draws, Scored, score_rows
from rlfe.eval.tally import measures, tally
from rlfe.sandbox.pool import Judge
from rlfe.tasks import get
from rlfe.types import Request
from tests.eval_doubles import RECIPE
from tests.test_eval_runner import target


@pytest.mark.parametrize("name", ["mbpp_plus", "mbpp_test", "humaneval_plus", "gsm8k"])
def test_half_of_the_replies_are_the_reference_and_half_are_wrong(
    name: str, tmp_path: Path
) -> None:
    task = get(name)
    problems = task.problems("test")[:3]

    def reply(request: Request, row: int) -> str:
        problem = problems[int(request.id.split("/")[0])]
        if row % 2:
            return "#### -999999"
        return problem.answer.strip().removeprefix(task.prompt(problem, "base").text.strip())

    settings = Settings(
        task=name, style="base", n=4, temperature=1.0, top_p=1.0, max_tokens=4000,
        max_len=100_000, seed=0, limit=3, mode="flexible" if name == "gsm8k" else None,
    )  # fmt: skip
    job = make_job(target(tmp_path), task, settings, RECIPE, {"sampler": "fake"})
    samplers = Samplers(lambda job: FakeSampler(reply), lambda a, b: True)
    with JudgeOnDemand(lambda: Judge(workers=1)) as judges:
        report = run_jobs([job], samplers, judges, Places(lambda path: "w"))
    assert report.judged == 12
    assert (judges.judge is not None) == (name != "gsm8k")
    counts = tally(job.read(), [p.id for p in problems], 4, measures(name, settings.mode), 1.0)
    found = {row["task"]: row["score"] for row in score_rows(Scored(job=job, tally=counts), Draws())
             if row["k"] == "1"}  # fmt: skip
    assert found[name] == "0.5"
    assert set(found.values()) == {"0.5"}
    assert counts.rates.distinct == 0.5
