"""Text to token ids and back, the way every engine needs it.

What: one encoding of a `Prompt` with at most one BOS, and the union of the end tokens that
tokenizer, config and generation config name (base models often disagree with themselves). Not
here: which prompt a problem gets (`rlfe.tasks`). Rules: docs/judging.md 2.
Try it: `HfTokenizer("model").encode(Prompt(format="x", text="Hello"))`.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from rlfe.checkpoints import problems
from rlfe.engines.source import model_folder, read_json
from rlfe.errors import RequestError
from rlfe.types import Prompt


def end_token_ids(
    tokenizer_eos_id: int | Sequence[int] | None,
    config: Mapping[str, Any] | None,
    generation_config: Mapping[str, Any] | None,
) -> tuple[int, ...]:
    """Every token id that ends a reply, sorted: 151643 and 151645 for many Qwen base models."""
    named = [tokenizer_eos_id]
    named += [(facts or {}).get("eos_token_id") for facts in (config, generation_config)]
    text_config = (config or {}).get("text_config")
    if isinstance(text_config, Mapping):
        named.append(text_config.get("eos_token_id"))
    return tuple(sorted({token for value in named for token in _ids(value)}))


def _ids(value: int | Sequence[int] | None) -> Iterable[int]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)


def need_tokenizer(folder: Path) -> None:
    """RequestError if a model folder has no tokenizer; loads nothing."""
    lacks = [line for line in problems(folder) if "tokenizer" in line]
    if lacks:
        raise RequestError(
            f"{folder} has {lacks[0]}", hint="Copy the base model's tokenizer files there."
        )


class HfTokenizer:
    """The tokenizer of a model folder (needs transformers, not torch).

    Args:
        path: Model folder or Hub id.
        thinking: Passed to the chat template as `enable_thinking`; None: not passed.
        revision: Of the Hub id.

    Raises:
        NotFoundError: No such folder (exit 5).
        RequestError: The folder has no tokenizer (exit 2).
    """

    def __init__(
        self, path: Path | str, *, thinking: bool | None = None, revision: str | None = None
    ) -> None:
        folder = model_folder(path, revision)
        need_tokenizer(folder)
        self.folder, self._thinking = folder, thinking
        self._inner = _load(folder)
        self.vocabulary_size = len(self._inner)
        self.has_chat_template = self._inner.chat_template is not None
        self.stop_token_ids = end_token_ids(
            self._inner.eos_token_id,
            read_json(folder / "config.json"),
            read_json(folder / "generation_config.json"),
        )

    def encode(self, prompt: Prompt) -> tuple[int, ...]:
        """Token ids of a prompt, with at most one BOS and no end token added.

        Raises:
            RequestError: A chat prompt for a tokenizer without chat template.
        """
        if prompt.messages:
            text, special = self._chat_text(prompt), False
        else:
            text, special = prompt.text, True
        ids: list[int] = self._inner(text, add_special_tokens=special)["input_ids"]
        bos, eos = self._inner.bos_token_id, self._inner.eos_token_id
        while bos is not None and ids[:2] == [bos, bos]:
            ids = ids[1:]
        added_end = special and eos is not None and eos != bos and ids[-1:] == [eos]
        if added_end and not text.endswith(self._inner.eos_token):
            ids = ids[:-1]
        return tuple(ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of token ids without special tokens."""
        text: str = self._inner.decode(
            list(token_ids), skip_special_tokens=True, clean_up_tokenization_spaces=False
        )
        return text

    def token_of(self, text: str) -> int | None:
        """The id of a special token that is spelt like this text, if there is one.

        A stop string such as `<|endoftext|>` never shows in decoded text; its token does.
        """
        if text not in self._inner.get_added_vocab() and text not in self._inner.all_special_tokens:
            return None
        found: int | None = self._inner.convert_tokens_to_ids(text)
        return found

    def _chat_text(self, prompt: Prompt) -> str:
        if not self.has_chat_template:
            raise RequestError(
                f"the tokenizer in {self.folder} has no chat template",
                hint="Use prompt.style = base (eval: --prompt base) for this model.",
            )
        switch = {} if self._thinking is None else {"enable_thinking": self._thinking}
        messages = [{"role": turn.role, "content": turn.text} for turn in prompt.messages]
        text: str = self._inner.apply_chat_template(
            messages, tokenize=False, add_generation_prompt=True, **switch
        )
        return text + prompt.text


def _load(folder: Path) -> Any:
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(str(folder))
