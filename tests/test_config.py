"""Configuration: order of strength, origins, and refusals that name key, value and place."""

import pytest

from rlfe import config, toml
from rlfe.errors import NotFoundError, RequestError
from rlfe.schema import Recipe


@pytest.fixture
def recipe(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def write(text, name="mine.toml"):
        (tmp_path / name).write_text(text)
        return name

    return write


def refusal(*arguments, **named):
    with pytest.raises(RequestError) as caught:
        config.load(*arguments, **named)
    assert caught.value.exit_code == 2
    return caught.value.what


def test_the_later_and_the_stronger_source_wins_and_is_named(recipe):
    first = recipe("[optim]\nlr = 1e-6\nbeta1 = 0.8\n[train]\nsteps = 10\n", "a.toml")
    second = recipe("[train]\nsteps = 20\n[save]\nevery = 5\n", "b.toml")
    environment = {"RLFE_SAVE__EVERY": "6", "RLFE_OPTIM__LR": "3e-6", "HOME": "/root"}
    resolved = config.load(
        [first, second], ["optim.lr=6e-6", "run.seed=4"], environment, {"run.seed": 9}
    )
    values, origins = resolved.values(), resolved.origins
    told = {key: (values[key], origins[key]) for key in (
        "train.steps", "save.every", "optim.lr", "optim.beta1", "run.seed", "kl.beta"
    )}  # fmt: skip
    assert told == {
        "train.steps": (20, "b.toml:2"),
        "save.every": (6, "RLFE_SAVE__EVERY"),
        "optim.lr": (6e-6, "--set"),
        "optim.beta1": (0.8, "a.toml:3"),
        "run.seed": (9, "--seed"),
        "kl.beta": (0.0, "default"),
    }


def test_an_unknown_key_names_file_line_and_the_nearest_key(recipe):
    name = recipe('about = "x"\n\n[optim]\nlearning_rate = 1e-6\n', "tiny2.toml")
    assert (
        refusal([name])
        == 'tiny2.toml:4: unknown key "optim.learning_rate"; did you mean "optim.lr"?'
    )


@pytest.mark.parametrize(
    ("text", "suggestion"),
    [
        ("train.step=4", "train.steps"),
        ("lr=1e-6", "optim.lr"),
        ("replay.weight=1", "replay.lambda"),
        ("validation.every=3", "validate.every"),
        ("eval.gsm8k.maxtokens=3", "eval.gsm8k.max_tokens"),
        ("filter.rollout_filter_value=0.9", "filter.value"),
    ],
)
def test_an_unknown_key_is_told_the_nearest_one(text, suggestion):
    assert refusal([], [text]).endswith(f'did you mean "{suggestion}"?')


def test_an_unknown_environment_variable_of_ours_is_refused():
    assert "RLFE_OPTIM_LR" in refusal([], environment={"RLFE_OPTIM_LR": "1"})


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("optim.lr=7", "--set: optim.lr = 7: should be less than 1"),
        ("train.steps=0", "--set: train.steps = 0: should be greater than or equal to 1"),
        ("optim.lr=low", '--set: optim.lr = "low": expected a number, got the text "low"'),
        ("train.steps=2.5", "--set: train.steps = 2.5: should be a valid integer"),
        ("eval.gsm8k.n=0", "--set: eval.gsm8k.n = 0: should be greater than or equal to 1"),
        ("train.max_turns=2", "--set: train.max_turns = 2: should be 1"),
        ("optim=3", '--set: "optim" is a section, not a key'),
    ],
)
def test_a_refused_value_is_shown_with_its_place_and_reason(text, message):
    assert refusal([], [text]) == message


def test_a_value_of_the_wrong_range_names_the_recipes_line(recipe):
    name = recipe("[train]\nsteps = 5\nepochs = 0\n")
    assert refusal([name]).startswith("mine.toml:3: train.epochs = 0")


def test_two_wrong_values_are_both_told(recipe):
    lines = refusal([recipe("[train]\nsteps = 0\n[kl]\nbeta = -1\n")]).splitlines()
    assert [line.split(" = ")[0] for line in lines] == [
        "mine.toml:2: train.steps",
        "mine.toml:4: kl.beta",
    ]


def test_bad_toml_and_a_key_given_twice_name_the_line(recipe):
    assert refusal([recipe("[optim]\nlr = 1.e-6\n")]).startswith("mine.toml:2: not TOML: ")
    assert (
        refusal([recipe("[optim]\nlr = 1e-6\nlr = 6e-6\n")]) == "mine.toml:3: a key is given twice"
    )
    assert refusal([recipe("[optim]\nlr = 1e-6\n[optim]\n")]) == "mine.toml:3: a key is given twice"
    assert refusal([recipe('about = "x\n')]).startswith("mine.toml:1: not TOML: ")


def test_an_unknown_recipe_names_the_nearest_shipped_one():
    assert refusal(["lr-lader"]) == 'no recipe "lr-lader"; did you mean "lr-ladder"?'
    assert refusal(["missing.toml"]) == 'no recipe "missing.toml"'


@pytest.mark.parametrize(
    ("text", "key", "value"),
    [
        ("optim.lr = 6e-6", "optim.lr", 6e-6),
        ("data.revision=1234567", "data.revision", "1234567"),
        ("data.revision=2026-01-01", "data.revision", "2026-01-01"),
        ("model.path=runs/a b", "model.path", "runs/a b"),
        ('model.path="x=y"', "model.path", "x=y"),
        ("model.path=x=y", "model.path", "x=y"),
        ('lora.targets=["q", "v"]', "lora.targets", ("q", "v")),
        ("save.keep=none", "save.keep", None),
        ("replay.strategy=none", "replay.strategy", "none"),
        ("replay.lambda=0.25", "replay.lambda", 0.25),
        ("prompt.thinking=false", "prompt.thinking", False),
        ("eval.mbpp_plus.k=[1, 5]", "eval.mbpp_plus.k", (1, 5)),
        ("data.columns.prompt=question", "data.columns.prompt", "question"),
    ],
)
def test_a_set_value_is_toml_and_a_bare_word_is_text(text, key, value):
    assert config.load([], [text]).values()[key] == value


def test_the_dump_of_a_recipe_reads_back_as_the_same_recipe(tmp_path):
    sets = [
        "replay.lambda=0.3", "validate.every=2", 'about="a \\"b\\" \\\\ \\u007f é"', "save.keep=3",
        'eval.mbpp_plus.k=[1, 8]', 'diagnostics.k_buckets=["1", "2-3"]', "optim.eps=1e-12",
        'matrix.arm=[{"replay.strategy"="none"}, {"replay.strategy"="ce"}]',
        'matrix."optim.lr"=[1e-6, 3e-6]', "data.columns.prompt=question",
    ]  # fmt: skip
    recipe = config.load([], sets).recipe
    (tmp_path / "config.toml").write_text(config.dump(recipe))
    assert config.read_run_config(tmp_path) == recipe
    assert config.dump(config.read_run_config(tmp_path / "config.toml")) == config.dump(recipe)


def test_a_run_without_config_is_not_found(tmp_path):
    with pytest.raises(NotFoundError, match=r"config\.toml"):
        config.read_run_config(tmp_path)


def test_values_and_origins_cover_every_key_of_the_schema():
    resolved = config.load([])
    assert set(resolved.values()) == set(resolved.origins)
    free = {"eval", "matrix", "data.columns"}
    assert set(config.keys()) - free == set(resolved.values())
    assert all(entry.about for entry in config.keys().values())


def test_every_section_stays_within_its_number_of_keys():
    for name, field in Recipe.model_fields.items():
        count = len(getattr(field.annotation, "model_fields", {}))
        assert count <= (14 if name == "replay" else 12), name


def contradiction(*sets, training=False):
    recipe = config.load([], sets).recipe
    with pytest.raises(RequestError) as caught:
        config.check(recipe, training=training)
    return caught.value.what


@pytest.mark.parametrize(
    ("sets", "words"),
    [
        (["advantage.name=maxrl", "reward.kind=fraction"], "reward.kind"),
        (["advantage.name=maxrl", "reward.format_penalty=-0.1"], "reward.format_penalty"),
        (["advantage.name=maxrl", "reward.normalization=mean"], "reward.normalization"),
        (["advantage.name=dr_grpo"], "seq-mean-token-sum-norm"),
        (["mismatch.mode=tis"], "mismatch.mode"),
        (["loss.old=recomputed", "lag.steps=4"], "lag.steps = 0, it is 4"),
        (["filter.strategy=top_k_abs", "filter.value=2.5"], "whole number"),
        (["filter.strategy=top_k_abs", "filter.value=0.5"], "at least one group"),
        (["filter.strategy=top_p", "filter.value=1.5"], "at most 1"),
        (["train.max_tokens=4096"], "no room for a prompt"),
        (["eval.mbpp_plus.n=8", "eval.mbpp_plus.k=[1, 16]"], "eval.mbpp_plus.k = 16"),
        (["eval.gsm8k.k=[16]"], "n is 8"),
        (['diagnostics.k_buckets=["8"]'], "within 1 to 7"),
        (['diagnostics.k_buckets=["1-3", "3-4"]'], "overlaps"),
        (["engine.sampler=fake"], "goes with itself only"),
        (["mismatch.low=3"], "not below"),
    ],
)
def test_settings_that_contradict_each_other_are_refused(sets, words):
    assert words in contradiction(*sets)


def test_training_asks_for_a_prompt_style_and_a_model():
    lines = contradiction(training=True)
    assert "prompt.style is not set" in lines
    assert "model.path is not set" in lines
    config.check(Recipe())


def test_the_defaults_and_allowed_pairs_pass():
    sets = ["advantage.name=dr_grpo", "loss.aggregation=seq-mean-token-sum-norm"]
    pairs = (sets, ["mismatch.mode=tis", "loss.old=recomputed"])
    for allowed in ([], *pairs, ["filter.strategy=top_k_abs", "filter.value=4"]):
        recipe = config.load([], allowed).recipe
        config.check(recipe)  # refuses with an exception
        values = config.flat(recipe)
        assert all(str(values[key]) == text for key, text in (s.split("=") for s in allowed[:1]))


def test_a_matrix_with_an_unknown_key_or_no_list_is_refused(recipe):
    name = recipe('[matrix]\n"optim.lrr" = [1e-6]\n')
    assert refusal([name]) == 'mine.toml:2: unknown key "optim.lrr"; did you mean "optim.lr"?'
    name = recipe('[matrix]\narm = [{ "replay.lamda" = 0.1 }]\n')
    assert 'did you mean "replay.lambda"?' in refusal([name])
    assert "is not a list" in refusal([recipe('[matrix]\n"optim.lr" = 3\n')])


def test_lines_are_found_for_dotted_and_quoted_keys_and_tables():
    text = 'a = 1\n[x.y]\n"p.q" = 2\nr.s = 3\n[[z]]\n'
    assert toml.key_lines(text) == {
        ("a",): 1,
        ("x", "y"): 2,
        ("x", "y", "p.q"): 3,
        ("x", "y", "r", "s"): 4,
        ("z",): 5,
    }


def test_a_run_config_that_is_no_text_is_named(tmp_path):
    (tmp_path / "config.toml").write_bytes(b'about = "\xff"')
    with pytest.raises(RequestError, match=r"config\.toml is no UTF-8 text"):
        config.read_run_config(tmp_path)
