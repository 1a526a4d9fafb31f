"""A request in vLLM's terms, and its answer in ours.

What: every sampling value given, end tokens as the union that all engines use, stop strings cut
from the text while their tokens stay, and how vLLM says no. Not here: when requests are sent.
"""

from __future__ import annotations

from typing import Any

from rlfe.engines.tokenizer import HfTokenizer
from rlfe.types import Completion, Finish, Request, Sampling

FINISH = {"stop": Finish.STOP, "length": Finish.LENGTH}  # everything else was cut from outside


def sampling_params(sampling: Sampling, tokenizer: HfTokenizer, *, own_seed: bool) -> Any:
    """`vllm.SamplingParams` with nothing left to a default.

    vLLM gives the rows of a request the seeds `seed`, `seed + 1`, ... `own_seed`: whether the
    request brings one.
    """
    from vllm import SamplingParams

    special = (tokenizer.token_of(text) for text in sampling.stop)
    ends = {*sampling.stop_token_ids, *tokenizer.stop_token_ids}
    ends |= {token for token in special if token is not None}
    return SamplingParams(
        n=1 if sampling.temperature == 0 else sampling.n,  # greedy ones are all the same
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        top_k=max(sampling.top_k, 0),
        min_p=sampling.min_p,
        presence_penalty=0.0,
        frequency_penalty=0.0,
        repetition_penalty=1.0,
        seed=sampling.seed if own_seed else None,
        stop=list(sampling.stop),
        stop_token_ids=sorted(ends),
        ignore_eos=False,
        max_tokens=sampling.max_tokens,
        min_tokens=0,
        logprobs=0 if sampling.logprobs else None,  # of the sampled token only
        flat_logprobs=sampling.logprobs,
        detokenize=bool(sampling.stop),
        include_stop_str_in_output=False,  # cut from the text; the tokens stay
        skip_special_tokens=True,
    )


def completions(
    request: Request, output: Any, tokenizer: HfTokenizer, policy_step: int
) -> list[Completion]:
    """The n completions of a finished `vllm.RequestOutput`, in order."""
    done = [_completion(request, part, tokenizer, policy_step) for part in output.outputs]
    return done * request.sampling.n if len(done) < request.sampling.n else done


def _completion(
    request: Request, output: Any, tokenizer: HfTokenizer, policy_step: int
) -> Completion:
    tokens = tuple(output.token_ids)
    finish = FINISH.get(output.finish_reason, Finish.ABORT)
    if request.sampling.stop:
        text = output.text
    else:
        text = tokenizer.decode(tokens[:-1] if finish is Finish.STOP else tokens)
    flat = output.logprobs  # the sampled token's comes first at every position; None: not asked for
    starts = () if flat is None else flat.start_indices
    return Completion(
        token_ids=tokens,
        logprobs=tuple(flat.logprobs[place] for place in starts),
        text=text,
        finish=finish,
        policy_step=policy_step,
    )


def refusals() -> tuple[type[Exception], ...]:
    """What vLLM raises for a request that it does not take; its class changed with versions."""
    from vllm import exceptions

    return (ValueError, getattr(exceptions, "VLLMClientError", ValueError))


def reason(error: Exception) -> str:
    """The first line of an error."""
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__
