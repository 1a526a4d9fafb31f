"""Fixtures of several test modules."""

from __future__ import annotations

from pathlib import Path

import hypothesis
import pytest

from tests.tiny_model import write_tiny_model

# No deadline: a loaded machine is no failure.
hypothesis.settings.register_profile("rlfe", deadline=None)
hypothesis.settings.load_profile("rlfe")


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A complete, random model folder that learns and samples in milliseconds (float32)."""
    return write_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture
def one_thread():
    """torch on one CPU thread, as the exact engine is defined."""
    import torch

    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


@pytest.fixture
def tinker_server(tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A loopback server of the Tinker API on the tiny model, and the environment that names it."""
    pytest.importorskip("tinker", reason="tinker is not installed (rlfe[tinker])")
    from tests.tinker_server import KEY, Server

    server = Server(tiny_model, tmp_path / "tinker")
    monkeypatch.setenv("TINKER_BASE_URL", server.start())
    monkeypatch.setenv("TINKER_API_KEY", KEY)
    yield server
    server.stop()
