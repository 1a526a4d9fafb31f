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
