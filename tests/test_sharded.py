"""Two ranks compute what one process does: losses, gradients, weights, checkpoints and states."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from rlfe.checkpoints import problems
from rlfe.engines.ranks import Ranks
from rlfe.engines.sharded import FILLER, rows_by_rank, with_fillers
from tests.sharded_ranks import PROGRAMS, rows

ROOT = Path(__file__).parent.parent
LIMIT = 1e-5  # relative to the largest value: float32 sums in another order, then three AdamW steps
SLOW = "compiled"  # tracing takes its time
ALONE = [name for name in PROGRAMS if name not in ("crossed", SLOW)]


@pytest.fixture(scope="module")
def seen(tmp_path_factory: pytest.TempPathFactory, tiny_model: Path) -> dict[str, list[Any]]:
    """What each program saw, by its name: [one process, two ranks]."""
    folder = tmp_path_factory.mktemp("ranks")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    alone = {name: PROGRAMS[name](tiny_model, Ranks(), folder) for name in ALONE}
    found = on_two_ranks(tiny_model, folder, *ALONE, "crossed")
    alone["crossed"] = PROGRAMS["crossed"](tiny_model, Ranks(), folder)
    torch.set_num_threads(before)
    return {name: [alone[name], found[name]] for name in found} | {"folder": [folder]}


def on_two_ranks(model: Path, folder: Path, *names: str) -> dict[str, Any]:
    words = ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [sys.executable, *words, "-m", "tests.sharded_ranks", model, folder, *names],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return {name: torch.load(folder / f"{name}_2.pt") for name in names}


def distance(first: Any, second: Any) -> float:
    """Largest difference relative to the largest value."""
    a, b = (torch.as_tensor(each, dtype=torch.float64) for each in (first, second))
    assert a.shape == b.shape
    return float((a - b).abs().max() / a.abs().max())


@pytest.mark.parametrize("name", ["uneven", "replayed", "few", "lora", "whole", "crossed"])
def test_two_ranks_give_the_losses_norms_and_weights_of_one_process(seen, name: str) -> None:
    one, two = seen[name]
    assert one["norms"][0] > 1e-3
    assert distance(one["norms"], two["norms"]) < LIMIT
    for part in ("logp", "entropy"):
        assert all(distance(a, b) < LIMIT for a, b in zip(one[part], two[part], strict=True))
    for sums, others in zip(one["sums"], two["sums"], strict=True):
        assert sums.keys() == others.keys()
        assert all(others[key] == pytest.approx(sums[key], rel=1e-4, abs=1e-6) for key in sums)
    assert one["weights"].keys() == two["weights"].keys()
    for key, weight in one["weights"].items():
        assert distance(weight, two["weights"][key]) < LIMIT


def test_snapshots_the_base_and_entropies_are_those_of_one_process(seen) -> None:
    one, two = seen["replayed"]
    for name in ("of a snapshot", "of the base", "entropies"):
        assert distance(one[name], two[name]) < LIMIT


def test_a_state_in_shards_goes_on_bit_for_bit(seen) -> None:
    _, two = seen["whole"]
    assert two["loaded"] == two["fingerprint"]
    went_on, resumed = two["after"]
    assert went_on["fingerprint"] == resumed["fingerprint"]
    assert went_on["norms"] == resumed["norms"]


def test_any_number_of_ranks_reads_the_state_of_another_number(seen) -> None:
    one, two = seen["crossed"]
    assert one["loaded"] == seen["whole"][1]["fingerprint"]
    assert two["loaded"] == seen["whole"][0]["fingerprint"]


def test_the_first_rank_writes_complete_checkpoints(seen) -> None:
    (folder,) = seen["folder"]
    assert problems(folder / "whole_2") == []
    assert problems(folder / "lora_2") == []
    names = [sorted(path.name for path in (folder / f"lora_{n}").rglob("*")) for n in (1, 2)]
    assert names[0] == names[1]
    assert seen["lora"][1]["merge"] == pytest.approx(seen["lora"][0]["merge"], abs=1e-5)


def test_rows_are_divided_by_tokens_and_by_whether_they_have_a_gradient() -> None:
    length_B = np.array([9, 1, 5, 0, 4, 7, 2])
    graded_B = np.array([True, True, True, True, False, True, False])
    first, second = rows_by_rank(length_B, graded_B, ranks=2)
    assert first.tolist() == [0, 1, 4]  # 9 + 1 with a gradient, 4 without
    assert second.tolist() == [2, 5, 6]  # 7 + 5 with a gradient, 2 without


def test_every_row_with_a_token_belongs_to_one_rank() -> None:
    rng = np.random.default_rng(0)
    length_B, graded_B = rng.integers(0, 50, 41), rng.random(41) < 0.5
    shares = rows_by_rank(length_B, graded_B, ranks=5)
    assert sorted(np.concatenate(shares).tolist()) == np.flatnonzero(length_B).tolist()
    tokens = [int(length_B[rows].sum()) for rows in shares]
    assert max(tokens) - min(tokens) <= 2 * int(length_B.max())


def test_fillers_are_copies_of_the_shortest_row_in_no_group() -> None:
    batch = rows([5, 0, 2, 8], seed=0)
    whole = with_fillers(batch)
    assert whole.group_B.tolist() == [*batch.group_B, FILLER, FILLER]
    shortest = int(np.argmin(np.where(batch.mask_BL.any(1), batch.mask_BL.cumsum(1).argmax(1), 99)))
    assert whole.ids_BL[4].tolist() == batch.ids_BL[shortest].tolist()
    assert batch.group_B.tolist() == rows([5, 0, 2, 8], seed=0).group_B.tolist()


@pytest.mark.slow
@pytest.mark.usefixtures("one_thread")
@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # the compiler's own
def test_compiled_layers_of_two_ranks_give_the_same_too(tiny_model: Path, tmp_path: Path) -> None:
    one = PROGRAMS["compiled"](tiny_model, Ranks(), tmp_path)
    two = on_two_ranks(tiny_model, tmp_path, "compiled")["compiled"]
    assert distance(one["norms"], two["norms"]) < LIMIT
    for name, weight in one["weights"].items():
        assert distance(weight, two["weights"][name]) < LIMIT, name
