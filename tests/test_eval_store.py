"""The sample store: nothing finished is lost, nothing counts twice."""

from pathlib import Path

import pytest

from rlfe.errors import RequestError, RlfeError
from rlfe.eval.frames import frames
from rlfe.eval.store import Judged, Sample, Store

HEADER = {"checkpoint": "x/global_step_1", "weights": "aa"}
RIGHT = Judged("h1", "passed", "", 0.1, {"base": "passed"})


def filled(path: Path) -> None:
    with Store(path, "rule v1").open(HEADER) as store:
        store.add_block("p/1", 0, [Sample("a", "stop", 1), Sample("\ud800", "length", 2)])
        store.add_verdicts({("p/1", 0): [RIGHT, RIGHT]})
        store.add_block("p/2", 0, [Sample("b" * 300_000, "stop", 1)])


def test_what_was_written_is_read(tmp_path: Path) -> None:
    filled(tmp_path / "s.zst")
    store = Store.read(tmp_path / "s.zst", "rule v1", texts=True)
    assert store.blocks["p/1", 0] == [Sample("a", "stop", 1), Sample("\ud800", "length", 2)]
    assert store.verdicts == {("p/1", 0): [RIGHT, RIGHT]}
    assert store.unjudged() == [("p/2", 0)]


def test_a_file_cut_at_any_byte_keeps_every_whole_block(tmp_path: Path) -> None:
    path = tmp_path / "s.zst"
    filled(path)
    data = path.read_bytes()
    ends = [end for _, end in frames(path)]
    assert ends[-1] == len(data)
    for cut in range(len(data)):
        path.write_bytes(data[:cut])
        whole = sum(end <= cut for end in ends)
        assert len(list(frames(path))) == whole
    path.write_bytes(data[:-3])
    with Store(path, "rule v1").open(HEADER) as store:
        assert store.missing("p/2", 1, 8) == [(0, 1)]
        store.add_block("p/2", 0, [Sample("again", "stop", 1)])
    store = Store.read(path, "rule v1", texts=True)
    assert store.blocks["p/2", 0] == [Sample("again", "stop", 1)]
    assert len(store.blocks["p/1", 0]) == 2


def test_a_short_last_block_is_redone_whole_when_n_grows(tmp_path: Path) -> None:
    with Store(tmp_path / "s.zst", "r").open(HEADER) as store:
        store.add_block("p", 0, [Sample("x", "stop", 1)] * 8)
        store.add_block("p", 1, [Sample("x", "stop", 1)] * 4)
        store.add_verdicts({("p", 1): [RIGHT] * 4})
        assert store.missing("p", 12, 8) == []
        assert store.missing("p", 20, 8) == [(1, 8), (2, 4)]
        store.add_block("p", 1, [Sample("y", "stop", 1)] * 8)
        assert ("p", 1) in store.unjudged()
    store = Store.read(tmp_path / "s.zst", "r")
    assert len(store.blocks["p", 1]) == 8
    assert ("p", 1) not in store.verdicts


def test_a_short_block_in_one_file_never_hides_a_whole_one_in_another(tmp_path: Path) -> None:
    for name, size in (("main.zst", 1), ("shard.zst", 8)):
        with Store(tmp_path / name, "r").open(HEADER) as store:
            store.add_block("p", 0, [Sample(name, "stop", 1)] * size)
            store.add_verdicts({("p", 0): [RIGHT] * size})
    for own, other in (("main.zst", "shard.zst"), ("shard.zst", "main.zst")):
        store = Store.read(tmp_path / own, "r", texts=True, beside=[tmp_path / other])
        assert store.blocks["p", 0] == [Sample("shard.zst", "stop", 1)] * 8
        assert store.unjudged() == []


def test_another_judging_rule_keeps_samples_and_drops_verdicts(tmp_path: Path) -> None:
    filled(tmp_path / "s.zst")
    store = Store.read(tmp_path / "s.zst", "rule v2")
    assert sorted(store.unjudged()) == [("p/1", 0), ("p/2", 0)]
    assert store.blocks["p/1", 0][0].text == "a"


def test_samples_of_other_weights_are_refused(tmp_path: Path) -> None:
    filled(tmp_path / "s.zst")
    before = (tmp_path / "s.zst").read_bytes()
    with pytest.raises(RequestError, match="another weights: aa there, bb here"):
        Store(tmp_path / "s.zst", "rule v1").open({**HEADER, "weights": "bb"})
    assert (tmp_path / "s.zst").read_bytes() == before


def test_a_second_writer_is_refused_and_a_closed_store_is_free(tmp_path: Path) -> None:
    with (
        Store(tmp_path / "s.zst", "r").open(HEADER),
        pytest.raises(RequestError, match="another process"),
    ):
        Store(tmp_path / "s.zst", "r").open(HEADER)
    with Store(tmp_path / "s.zst", "r").open(HEADER) as store:
        assert store.header is not None


def test_a_full_disk_keeps_every_finished_block(tmp_path: Path) -> None:
    import resource

    path = tmp_path / "s.zst"
    filled(path)
    size = path.stat().st_size
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    store = Store(path, "rule v1").open(HEADER)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size + 10, hard))
    try:
        with pytest.raises(RlfeError, match="Every finished block is kept"):
            store.add_block("p/3", 0, [Sample(str(i) * 99, "stop", 1) for i in range(8)])
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    store.close()
    assert path.stat().st_size == size


def test_a_file_of_another_schema_is_refused(tmp_path: Path) -> None:
    import zstandard

    line = b'{"kind": "header", "schema": "other/9"}\n'
    (tmp_path / "s.zst").write_bytes(zstandard.ZstdCompressor().compress(line))
    with pytest.raises(RlfeError, match="other/9"):
        Store.read(tmp_path / "s.zst", "r")
