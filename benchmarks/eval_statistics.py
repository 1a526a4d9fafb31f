"""How long the statistics of an evaluation take, beside a named peer measured in the same run.

    python benchmarks/eval_statistics.py                 # pass@k, bootstrap
    python benchmarks/eval_statistics.py --report        # also a report of 34 checkpoints

Sizes are those of docs/statistics.md: 378 problems, 160 samples, all k. Prints the median of the
repeats, wall and CPU seconds, and the peer's median over ours. Peers: evalplus' estimator for one
k, called for every k (where evalplus is installed), and SciPy's `bootstrap` over problems for one
k, times 160 (where SciPy is installed). The report has no peer; its peak memory is printed.
"""

from __future__ import annotations

import argparse
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from rlfe.eval.passk import pass_at_all_k
from rlfe.eval.statistics import DRAWS, draw_weights, over_problems

P, N, CHECKPOINTS = 378, 160, 20


def timed(work: Callable[[], object], repeats: int) -> tuple[float, float]:
    """Median wall and CPU seconds of a call."""
    walls, cpus = [], []
    for _ in range(repeats):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return statistics.median(walls), statistics.median(cpus)


def show(name: str, mine: tuple[float, float], peer: str, other: float | None) -> None:
    """One line; a peer that is not installed is named as such."""
    ratio = (
        f"{peer} not installed"
        if other is None
        else f"{peer} {other:.3f} s, {other / mine[0]:.1f}x"
    )
    print(f"{name:<42} {mine[0]:8.4f} s wall {mine[1]:8.4f} s CPU   {ratio}", flush=True)


def counts(source: np.random.Generator) -> np.ndarray:
    """Right samples of every problem of a made-up checkpoint."""
    return source.binomial(N, source.beta(0.35, 0.3, P))


def evalplus_seconds(correct_P: np.ndarray, repeats: int) -> float | None:
    """All k by calling evalplus' estimator for each."""
    try:
        from evalplus.eval import estimate_pass_at_k
    except ImportError:
        return None
    return timed(lambda: [estimate_pass_at_k(N, correct_P, k) for k in range(1, N + 1)], repeats)[0]


def scipy_seconds(p_PK: np.ndarray) -> float | None:
    """One k by SciPy's percentile bootstrap, times all k and checkpoints."""
    try:
        from scipy.stats import bootstrap
    except ImportError:
        return None
    generator = np.random.default_rng(0)

    def one() -> object:
        return bootstrap(
            (p_PK[:, 0],), np.mean, n_resamples=DRAWS, method="percentile", rng=generator
        )

    return timed(one, 3)[0] * N * CHECKPOINTS


def report_seconds(root: Path) -> tuple[float, float]:
    """A report of 2 runs x 17 checkpoints and their base on mbpp_plus (n 160) and gsm8k (n 8)."""
    sys.path.insert(0, str(Path(__file__).parents[1]))
    from rlfe.eval.report.gather import read_runs
    from rlfe.eval.report.write import build, write
    from tests.report_data import make_experiment

    folders = make_experiment(root, steps=tuple(range(30, 511, 30)), problems=P, n=N)

    def work() -> None:
        analysis, payload = build(read_runs(folders))
        write(root / "report", "Benchmark", analysis, payload)

    return timed(work, 1)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--report", action="store_true", help="also time a whole report")
    asked = parser.parse_args()
    source = np.random.default_rng(0)
    correct_P = counts(source)
    peer = evalplus_seconds(correct_P, asked.repeats)
    mine = timed(lambda: pass_at_all_k(N, correct_P), max(asked.repeats, 20))
    show(f"pass@k, {P} x {N}, all k (limit 0.05 s)", mine, "evalplus", peer)
    values = [pass_at_all_k(N, counts(source)) for _ in range(CHECKPOINTS)]

    def intervals() -> None:
        weights_BP = draw_weights(P, DRAWS, np.random.default_rng(1))
        for p_PK in values:
            over_problems(p_PK, weights_BP)

    name = f"bootstrap, {CHECKPOINTS} x {P} x {N} k (limit 20 s)"
    show(name, timed(intervals, asked.repeats), "SciPy", scipy_seconds(values[0]))
    if asked.report:
        with tempfile.TemporaryDirectory() as root:
            wall, cpu = report_seconds(Path(root))
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(
            f"report, 34 checkpoints, 2 tasks (60 s, 2 GB)   {wall:6.1f} s wall {cpu:6.1f} s CPU, "
            f"{peak:.2f} GB at most"
        )


if __name__ == "__main__":
    main()
