"""Which folders of a target are runs: by their names, or as runs of an own task."""

from __future__ import annotations

from rlfe import config
from rlfe.hub.client import RepoFacts
from rlfe.hub.target import look_in_folder, look_on_hub


def test_runs_of_an_own_task_are_seen_in_a_target(tmp_path):
    own = "tiny_vowels_nobuf_lr1e6"
    (tmp_path / "tiny_mbpp_nobuf_lr1e6").mkdir()
    (tmp_path / own).mkdir()
    settings = ["model.path=tiny", "task.name=vowels", "task.module=vowels.py"]
    (tmp_path / own / "config.toml").write_text(config.dump(config.load([], settings).recipe))
    (tmp_path / "other_vowels_nobuf_lr1e6").mkdir()  # nothing says that it is a run
    assert look_in_folder(tmp_path).cells == ("tiny_mbpp_nobuf_lr1e6", own)


def test_runs_of_an_own_task_are_seen_on_the_hub_when_one_is_pushed():
    class Listing:
        revision = "main"

        def facts(self):
            return RepoFacts(private=True, head="9f")

        def entries(self):
            return {"tiny_vowels_nobuf_lr1e6": None, "tiny_mbpp_nobuf_lr1e6": None, "data": None}

    assert look_on_hub(Listing(), (), tasks={"vowels"}, anonymous=True).cells == (
        "tiny_mbpp_nobuf_lr1e6",
        "tiny_vowels_nobuf_lr1e6",
    )
    assert look_on_hub(Listing(), (), anonymous=True).cells == ("tiny_mbpp_nobuf_lr1e6",)
