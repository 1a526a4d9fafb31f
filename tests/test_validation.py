from dataclasses import replace

import numpy as np
import pytest

from rlfe.engines.fake import FakeLearner, FakeSampler
from rlfe.errors import RequestError, RlfeError
from rlfe.randomness import derive
from rlfe.rundir import RunDir
from rlfe.schema import Recipe
from rlfe.tasks import get
from rlfe.training.job import Job, training_list
from rlfe.training.validation import is_due, validated, validation_list
from rlfe.types import Problem, Prompt, Status, Verdict


class Sums:
    """Problems "n+1"; test problems 0 and 1 are trained on, too."""

    name = "sums"
    version = "1"
    needs_judge = False

    def problems(self, split):
        numbers = {"train": range(4), "test": [*range(2), *range(10, 16)], "none": range(2)}[split]
        return tuple(
            Problem(id=f"sums/{n}", task="sums", split=split, prompt=f"{n}+1", answer=str(n + 1))
            for n in numbers
        )

    def prompt(self, problem, style, examples=()):
        return Prompt(format="sums-v1", text=f"{problem.prompt}=", stop=(";",))

    def judge(self, replies, judge):
        for reply in replies:
            right = reply.text == reply.problem.answer
            broken = reply.text == "broken"
            status = Status.PASSED if right else Status.FAILED
            yield reply.key, Verdict(status=Status.INFRASTRUCTURE if broken else status)


class Remembering(FakeSampler):
    def __init__(self, reply):
        super().__init__(reply)
        self.requests = []

    def generate(self, requests):
        self.requests.append(list(requests))
        yield from super().generate(list(requests)[::-1])


def adds(request, row):
    """Right for numbers below 13; prompts are "n+1="."""
    number = int("".join(chr(token) for token in request.prompt_ids).split("+")[0])
    return str(number + 1) if number < 13 else "wrong"


def job(tmp_path, *, reply=adds, **sections):
    sections = {
        "validate": {"every": 2, "before_train": True},
        "prompt": {"style": "base"},
        "train": {"max_tokens": 20},
        "model": {"max_len": 40},
        **sections,
    }
    recipe = Recipe.model_validate(sections)
    sampler = Remembering(reply)
    return Job(
        recipe=recipe,
        run=RunDir(tmp_path),
        task=Sums(),
        data=training_list(recipe, Sums(), sampler.tokenizer),
        sampler=sampler,
        learner=FakeLearner(),
    )


def held_out_of(work):
    return validation_list(work.recipe, work.task, work.sampler.tokenizer, work.data)


def test_due_before_training_and_every_so_many_steps():
    recipe = Recipe.model_validate({"validate": {"every": 10, "before_train": True}})
    assert [step for step in range(31) if is_due(recipe, step)] == [0, 10, 20, 30]
    late = Recipe.model_validate({"validate": {"every": 10}})
    assert [step for step in range(31) if is_due(late, step)] == [10, 20, 30]
    off = Recipe.model_validate({"validate": {"before_train": True}})
    assert not any(is_due(off, step) for step in range(31))


def test_problems_are_disjoint_from_the_training_list_by_id(tmp_path):
    work = job(tmp_path)
    held_out = held_out_of(work)
    assert [p.id for p in held_out.data.problems] == [f"sums/{n}" for n in range(10, 16)]
    assert {p.id for p in work.data.problems}.isdisjoint(p.id for p in held_out.data.problems)


def test_batches_take_so_many_problems_each(tmp_path):
    two = {"every": 1, "problems": 2, "batches": 2}
    held_out = held_out_of(job(tmp_path, validate=two))
    assert len(held_out.data.problems) == 4


def test_off_means_no_list(tmp_path):
    assert held_out_of(job(tmp_path, validate={"every": 0})) is None


def test_a_split_without_other_problems_is_refused(tmp_path):
    with pytest.raises(RequestError, match="no problem that is not trained on"):
        held_out_of(job(tmp_path, validate={"every": 1, "split": "none"}))


def test_numbers_of_a_validation(tmp_path):
    work = job(tmp_path, validate={"every": 2, "samples": 2})
    metrics = validated(work, held_out_of(work), finished_steps=2)
    assert metrics["validate/success"] == metrics["validate/reward"] == 0.5
    assert (metrics["validate/problems"], metrics["validate/samples"]) == (6, 12)
    assert metrics["validate/truncated"] == 0.0
    assert metrics["validate/length_mean"] == pytest.approx((3 + 6) / 2)


def test_requests_have_their_own_generators_and_the_validation_temperature(tmp_path):
    work = job(tmp_path, validate={"every": 2, "temperature": 0.3})
    validated(work, held_out_of(work), finished_steps=2)
    first = work.sampler.requests[0][0].sampling
    assert first.seed == derive(0, "validate", 2, "sums/10")
    assert (first.temperature, first.max_tokens, first.stop) == (0.3, 20, (";",))


def test_validation_uses_the_current_weights(tmp_path):
    work = job(tmp_path)
    work.sampler.load = lambda snapshot: "an older fingerprint"
    with pytest.raises(RlfeError, match="does not hold the current weights"):
        validated(work, held_out_of(work), finished_steps=2)


def test_what_could_not_be_scored_is_counted_and_not_wrong(tmp_path):
    work = job(tmp_path, reply=lambda request, row: "broken")
    metrics = validated(work, held_out_of(work), finished_steps=0)
    assert metrics["validate/unscored"] == 6
    assert metrics["validate/success"] is None


def test_a_long_prompt_is_refused_or_stays_with_less_room(tmp_path):
    tight = {"model": {"max_len": 21}, "train": {"max_tokens": 16}}
    # training prompts have 4 tokens, validation prompts 5: 5 + 16 = 21 fits, 5 + 17 does not
    assert held_out_of(job(tmp_path, **tight)).max_tokens == (16,) * 6
    longer = {"model": {"max_len": 21}, "train": {"max_tokens": 17}}
    with pytest.raises(RequestError, match="6 of 6 prompts"):
        held_out_of(job(tmp_path, **longer))
    lenient = job(tmp_path, data={"fail_on_prompt_too_long": False}, **longer)
    metrics = validated(lenient, held_out_of(lenient), finished_steps=0)
    assert (metrics["validate/shortened"], metrics["validate/problems"]) == (6, 6)


def test_a_problem_without_room_counts_as_wrong(tmp_path):
    work = job(tmp_path, data={"fail_on_prompt_too_long": False})
    held_out = held_out_of(work)

    crowded = replace(held_out, max_tokens=(0, *held_out.max_tokens[1:]))
    metrics = validated(work, crowded, finished_steps=0)
    assert metrics["validate/success"] == pytest.approx(2 / 6)
    assert (metrics["validate/without_room"], metrics["validate/samples"]) == (1, 6)


def test_a_missing_sample_is_an_error(tmp_path):
    work = job(tmp_path)
    work.sampler.generate = lambda requests: iter([])
    with pytest.raises(RlfeError, match="gave 0 of 1 samples of problem sums/10"):
        validated(work, held_out_of(work), finished_steps=4)


def test_no_global_random_number_is_used(tmp_path):
    np.random.seed(7)
    before = np.random.get_state()[1].tolist()
    work = job(tmp_path)
    validated(work, held_out_of(work), finished_steps=2)
    assert np.random.get_state()[1].tolist() == before


def test_the_share_of_flat_groups_needs_as_many_samples_as_a_group_has(tmp_path):
    def half(request, row):
        return adds(request, row) if row % 2 else "wrong"

    for samples, expected in ((1, None), (4, (0.5**3 + 1) / 2)):
        work = job(
            tmp_path,
            reply=half,
            validate={"every": 1, "samples": samples},
            train={"max_tokens": 20, "group_size": 4},
        )
        metrics = validated(work, held_out_of(work), finished_steps=0)
        assert metrics["validate/flat_share"] == expected


def test_a_file_that_is_trained_on_whole_leaves_nothing_to_validate_on(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text('{"question": "How many?", "answer": "#### 7"}\n' * 3)
    sampler = FakeSampler(adds)

    def held_out(size):
        recipe = Recipe.model_validate(
            {
                "task": {"name": "gsm8k"},
                "data": {"source": str(path), "size": size},
                "validate": {"every": 2},
                "prompt": {"style": "base"},
                "train": {"max_tokens": 20},
                "model": {"max_len": 4000},
            }
        )
        task = get("gsm8k", data=recipe.data)
        trained = training_list(recipe, task, sampler.tokenizer)
        return validation_list(recipe, task, sampler.tokenizer, trained)

    with pytest.raises(RequestError, match="no problem that is not trained on") as caught:
        held_out(None)
    assert "A file has no splits" in str(caught.value)
    assert [problem.id for problem in held_out(2).data.problems] == ["rows/2"]
