"""What a large study needs, and which part runs full first: the table of docs/scale.md.

What: a 7B model on 8 nodes of 8 GPUs, 200 steps of 128 rollouts, ten checkpoints, evaluated at
n = 160: bytes, seconds and requests, each marked measured (here or in docs/), documented (by its
maker) or computed (from the formula that stands beside it). What not: a prediction of a run's
time; where a speed of a 7B model enters, it is an upper bound from memory bandwidth times one
stated efficiency. `--measure` measures again what one machine can: the store's writer.
Try: `python -m benchmarks.scale`.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

GB, MB = 1e9, 1e6


class Row(NamedTuple):
    """A line of the table."""

    part: str
    value: str
    how: str
    formula: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Study:
    """The study; the shape is that of Qwen2.5-7B (config.json: 28 layers, 4 KV heads of 128)."""

    parameters: float = 7.616e9
    layers: int = 28
    kv_heads: int = 4
    head_size: int = 128
    nodes: int = 8
    gpus_per_node: int = 8
    steps: int = 200
    rollouts: int = 128
    rollout_tokens: int = 4000  # the limit: the worst case
    save_every: int = 20
    cells: int = 3
    problems: int = 378  # MBPP+
    samples: int = 160
    reply_tokens: int = 300
    characters_per_token: float = 3.5

    @property
    def gpus(self) -> int:
        return self.nodes * self.gpus_per_node

    @property
    def checkpoints(self) -> int:
        return self.steps // self.save_every

    @property
    def checkpoint_bytes(self) -> float:
        return 2 * self.parameters  # bfloat16


@dataclass(frozen=True, slots=True, kw_only=True)
class Known:
    """Numbers that are not computed here, each with its source."""

    gpu_bandwidth: float = 4.8e12  # bytes/s, documented: H200 data sheet
    gpu_memory: float = 141e9  # bytes, documented: H200 data sheet
    gpu_flops: float = 989e12  # bf16, dense, documented: H200 data sheet
    decode_rows: int = 512  # engine.sample_batch's default (docs/vllm.md)
    decode_efficiency: float = 0.4  # assumed: of the bandwidth bound; not measured for 7B
    judge_seconds: float = 56 / 3200  # CPU a sample, measured: docs/log.md (5 % endless loops)
    write_seconds: float = 0.18e-3  # CPU a block of 8 samples, measured: --measure
    stored_share: float = 0.15  # bytes on disk a character of reply, measured: --measure
    rollout_bytes: float = 6.5  # bytes on disk a token of a rollout, measured: --measure
    network: float = 12.5e9  # bytes/s a node, assumed: 100 Gb/s
    shared_disk: float = 5e9  # bytes/s of the shared file system, assumed
    upload: float = 125e6  # bytes/s to the Hub, assumed: 1 Gb/s
    hub_private: float = 100e9  # bytes, documented: docs/hub.md
    hub_commits: int = 128  # an hour, documented: docs/hub.md


def table(study: Study, known: Known) -> list[Row]:
    """All rows."""
    return [*storage(study, known), *training(study, known), *evaluation(study, known)]


def storage(study: Study, known: Known) -> list[Row]:
    one = study.checkpoint_bytes
    cell = one * study.checkpoints
    whole = cell * study.cells
    state = 12 * study.parameters
    full_at = int(known.hub_private // one) + 1
    commits = study.checkpoints * study.cells
    return [
        Row("a checkpoint", _bytes(one), "computed", "2 bytes x parameters"),
        Row("checkpoints of a cell", _bytes(cell), "computed", f"{study.checkpoints} of them"),
        Row("resumable state of a cell", _bytes(state), "computed",
            "12 bytes x parameters: float32 weights, two moments"),
        Row("checkpoints of the study", _bytes(whole), "computed", f"{study.cells} cells"),
        Row("private storage at the Hub is full at", f"checkpoint {full_at}",
            "documented limit", "100 GB free / a checkpoint"),
        Row("commits of the study", f"{commits} of {known.hub_commits} an hour",
            "documented limit", "one commit a checkpoint"),
        Row("upload of the study", _time(whole / known.upload), "computed", "at an assumed 1 Gb/s"),
    ]  # fmt: skip


def training(study: Study, known: Known) -> list[Row]:
    memory = 16 * study.parameters
    tokens = study.rollouts * study.rollout_tokens
    decode = tokens_per_second(study, known)
    each = study.rollouts / study.gpus
    flops = 6 * study.parameters * tokens
    gathered = 8 * study.parameters * max(1.0, each)
    samples = study.steps * study.rollouts
    return [
        Row("float32 weights, gradients and moments", _bytes(memory), "computed",
            f"16 bytes x parameters; an H200 has {_bytes(known.gpu_memory)}"),
        Row("the same on each GPU of a node", _bytes(memory / study.gpus_per_node), "computed",
            f"in {study.gpus_per_node} shards"),
        Row("tokens of a step, at most", f"{tokens:,}", "computed", "rollouts x limit"),
        Row("decoding a token for one row", f"{1e3 * known_row(study, known):.0f} ms", "computed",
            "weights / bandwidth / efficiency: few rows, so the weights are the cost"),
        Row("sampling a step", _time(study.rollout_tokens * known_row(study, known)), "computed",
            f"limit x that: {each:g} rows a GPU do not fill it"),
        Row("rows that a GPU decodes at its best", f"{known.decode_rows}: {decode:,.0f} tokens/s",
            "computed", "bandwidth bound x 0.4, context 1,000"),
        Row("update of a step", _time(flops / (study.gpus * known.gpu_flops * 0.4)), "computed",
            "6 x parameters x tokens at 40 % of the peak"),
        Row("sharded passes of a step, network of a node", _time(
            gathered * study.gpus_per_node / known.network), "computed",
            "8 bytes x parameters a pass, one row a pass, 8 GPUs share 100 Gb/s"),
        Row("the same with shards within a node", _time(
            4 * study.parameters * (study.nodes - 1) / study.nodes / known.network * 2),
            "computed", "float32 gradients are added up between nodes once a step"),
        Row("weights from learner to sampler", "0 bytes", "measured: docs/vllm.md",
            "same GPU: CUDA IPC handles, no network"),
        Row("judging a step", _time(study.rollouts * known.judge_seconds), "measured a sample",
            "17.5 ms of CPU x rollouts, one core, MBPP-like tests"),
        Row("rollouts of a cell", f"{samples:,}", "computed", "steps x rollouts"),
        Row("their record on disk, at most", _bytes(samples * study.rollout_tokens
            * known.rollout_bytes), "measured a token", "tokens x 6.5 bytes"),
    ]  # fmt: skip


def known_row(study: Study, known: Known) -> float:
    """Seconds of one decoding step with few rows: every weight is read once."""
    return study.checkpoint_bytes / known.gpu_bandwidth / known.decode_efficiency


def tokens_per_second(study: Study, known: Known, context: int = 1000) -> float:
    """Of one GPU that decodes many rows: weights and all keys and values are read once a step."""
    kept = 2 * study.layers * study.kv_heads * study.head_size * 2  # bytes a token
    read = study.checkpoint_bytes + known.decode_rows * context * kept
    return known.decode_rows * known.gpu_bandwidth / read * known.decode_efficiency


def evaluation(study: Study, known: Known) -> list[Row]:
    replies = study.problems * study.samples
    rate = tokens_per_second(study, known) / study.reply_tokens  # samples a second and GPU
    all_rate = rate * study.gpus
    one = replies / all_rate
    points = study.checkpoints * study.cells
    text = replies * study.reply_tokens * study.characters_per_token
    loads = max(study.gpus, points)
    read = loads * study.checkpoint_bytes
    return [
        Row("replies of a checkpoint", f"{replies:,}", "computed", "378 problems x 160"),
        Row("sampled by a GPU", f"{rate:.0f} replies/s", "computed", "tokens/s / 300"),
        Row("a checkpoint on all GPUs", _time(one), "computed", f"{study.gpus} samplers"),
        Row("all checkpoints", _time(one * points), "computed", f"{points} of them"),
        Row("judge: cores that keep up with a GPU", f"{rate * known.judge_seconds:.1f}",
            "measured a sample", "replies/s x 17.5 ms; identical answers are judged once"),
        Row("judge: cores that keep up with a node",
            f"{rate * known.judge_seconds * study.gpus_per_node:.0f}", "measured a sample", "x 8"),
        Row("texts of a checkpoint to the driver", _bytes(text), "computed",
            "replies x 1,050 bytes"),
        Row("network of the driver", f"{_bytes(all_rate * text / replies)}/s", "computed",
            "replies/s of all GPUs x 1,050 bytes"),
        Row("store of a checkpoint", _bytes(text * known.stored_share), "measured share",
            "characters x 0.15"),
        Row("driver's writer", f"{all_rate / 8 * known.write_seconds:.0%} of a core",
            "measured a block", "blocks/s of all GPUs x 0.18 ms"),
        Row("samplers that fill the writer", f"{8 / known.write_seconds / rate:,.0f}",
            "measured a block", "44,000 replies/s / replies/s of a GPU"),
        Row("weights read by the samplers", _bytes(read), "computed",
            "max(GPUs, checkpoints) loads"),
        Row("reading them", _time(2 * read / known.shared_disk), "computed",
            "hashed, then loaded, 5 GB/s assumed for the shared file system"),
    ]  # fmt: skip


def _bytes(number: float) -> str:
    for size, name in ((1e12, "TB"), (GB, "GB"), (MB, "MB")):
        if number >= size:
            return f"{number / size:.3g} {name}"
    return f"{number / 1e3:.3g} kB"


def _time(seconds: float) -> str:
    if seconds >= 5400:
        return f"{seconds / 3600:.1f} h"
    return f"{seconds / 60:.0f} min" if seconds >= 100 else f"{seconds:.2g} s"


def markdown(rows: list[Row]) -> str:
    lines = ["| part | value | how | from |", "| --- | --: | --- | --- |"]
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in rows)])


def measure() -> str:
    """CPU of writing a judged block, and bytes on disk a character, on packaged programs."""
    from rlfe.eval.store import Judged, Sample, Store
    from rlfe.tasks import get

    verdict = Judged("0123456789abcdef", "passed", "", 0.0123, {"base": "passed"})
    rows = [
        (problem.id, block, [_reply(problem.answer, 8 * block + row) for row in range(8)])
        for problem in get("mbpp_plus").problems("test")
        for block in range(4)
    ]
    with tempfile.TemporaryDirectory() as folder:
        path, start = Path(folder) / "step_000001.jsonl.zst", time.process_time()
        with Store(path, "rule").open({"weights": "none"}) as store:
            for problem, block, texts in rows:
                store.add_block(problem, block, [Sample(text, "stop", 300) for text in texts])
                store.add_verdicts({(problem, block): [verdict] * 8})
        seconds = time.process_time() - start
        characters = sum(len(text) for _, _, texts in rows for text in texts)
        share = path.stat().st_size / characters
    return (
        f"{1e3 * seconds / len(rows):.2f} ms of CPU a block, {share:.2f} bytes a character, "
        f"{_rollout_bytes():.1f} bytes a token of a rollout"
    )


def _rollout_bytes(tokens: int = 4000) -> float:
    """Bytes a token of a rollout's line: text, ids and log-probabilities (made up, Zipf's law)."""
    import zstandard

    chance = np.random.default_rng(0)
    words = [f"{word:x}" for word in chance.integers(0, 1 << 14, 150_000)]
    lines = []
    for _ in range(8):
        ids = [int(word) for word in chance.zipf(1.3, 4 * tokens) if word < 150_000][:tokens]
        logprobs = [round(-float(value), 6) for value in chance.exponential(0.5, len(ids))]
        text = " ".join(words[token] for token in ids)
        lines.append(json.dumps({"text": text, "token_ids": ids, "logprobs": logprobs}))
    packed = zstandard.ZstdCompressor(level=6).compress("\n".join(lines).encode())
    return len(packed) / (8 * tokens)


def _reply(program: str, number: int) -> str:
    """A reply that differs from the others of its problem, as sampled ones do."""
    changed = program.replace("return", f"# variant {number * 7919 % 10007}\n    return", 1)
    return f"```python\n{changed}\n```\n" + "This function solves the task.\n" * 3


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0] if __doc__ else None)
    parser.add_argument("--measure", action="store_true", help="measure the store's writer too")
    if parser.parse_args().measure:
        print(measure())
    print(markdown(table(Study(), Known())))


if __name__ == "__main__":
    main()
