import pytest

from rlfe.errors import RequestError
from rlfe.training.lengths import fitting


def test_prompt_plus_completion_up_to_the_window_fits():
    assert fitting({"a": 1024, "b": 10}, max_tokens=3072, max_len=4096) == (["a", "b"], [])


def test_a_prompt_that_does_not_fit_ends_the_command_with_its_ids():
    tokens = {f"p/{index}": 5000 + index for index in range(12)} | {"ok": 1}
    with pytest.raises(RequestError) as caught:
        fitting(tokens, max_tokens=3072, max_len=4096)
    assert "12 of 13 prompts are longer than the 1024 tokens" in caught.value.what
    assert "p/9 (5009) and 2 more" in caught.value.what
    assert caught.value.exit_code == 2


def test_or_is_left_out_and_listed():
    kept, left_out = fitting({"a": 1025, "b": 3}, max_tokens=3072, max_len=4096, fail=False)
    assert (kept, left_out) == (["b"], ["a"])


def test_nothing_left_is_an_error_either_way():
    with pytest.raises(RequestError, match="1 of 1 prompts"):
        fitting({"a": 9}, max_tokens=10, max_len=16, fail=False)
