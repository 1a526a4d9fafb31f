"""The schema of a recipe: every key, its default, its range and one sentence about it.

What a key means is defined in `docs/algorithms.md`; loading (recipes, `--set`, environment) is
`rlfe.config`. A new setting is a line here plus a reader plus a line of docs. Sections hold at
most 12 keys (`replay` 14).
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field


def _number(value: Any) -> Any:
    """A number that arrives as text ("6e-6") becomes a float; true and false are no numbers."""
    if isinstance(value, bool):
        raise ValueError(f"expected a number, got {value}")
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            raise ValueError(f'expected a number, got the text "{value}"') from None
    return value


Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
Positive = Annotated[Number, Field(gt=0)]
NonNegative = Annotated[Number, Field(ge=0)]
Fraction = Annotated[Number, Field(ge=0, le=1)]
Count = Annotated[int, Field(ge=1, strict=True)]
CountOrZero = Annotated[int, Field(ge=0, strict=True)]


def key(default: Any, about: str, **limits: Any) -> Any:
    """A field with its default and its one sentence."""
    return Field(default=default, description=about, **limits)


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=False)


class Model(Section):
    path: str = key("", "model folder or Hub id to start from")
    revision: str | None = key(None, "Hub revision of the model")
    dtype: Literal["bfloat16", "float16", "float32"] = key(
        "bfloat16", "what the sampler gets and a kept checkpoint stores"
    )
    max_len: Count = key(4096, "prompt plus completion, tokens")
    license: str | None = key(None, "license of the base model where its card is not at hand")


class Naming(Section):
    model: str | None = key(None, "model part of the run folder's name")
    arm: str | None = key(None, "arm part of the run folder's name")


class Task(Section):
    name: str = key("mbpp", "training task: mbpp, gsm8k, deepcoder, or the name of an own task")
    module: str | None = key(None, "Python file of an own task (problems, prompt, judge)")


class Data(Section):
    source: str | None = key(None, "Hub id or local JSONL/Parquet file instead of packaged data")
    subsets: tuple[str, ...] = key((), "configurations of the source to read; empty: the default")
    split: str | None = key(None, "split of the source to train on; None: the task's own")
    revision: str | None = key(None, "revision of the source")
    ids: tuple[str, ...] = key((), "train on these problems only, in this order")
    size: Count | None = key(None, "take the first N problems only")
    columns: dict[str, str] = key({}, "our field -> the source's column name")
    order: Literal["epochs", "with_replacement"] = key(
        "epochs", "how the problems of a step are drawn"
    )
    fail_on_prompt_too_long: bool = key(True, "refuse problems that do not fit model.max_len")


class PromptSection(Section):
    style: Literal["base", "chat"] | None = key(None, "prompt format; a recipe has to say it")
    examples: tuple[str, ...] = key((), "ids of solved training problems shown in the prompt")
    thinking: bool | None = key(None, "the chat template's thinking switch; None: not passed")


class Train(Section):
    steps: Count = key(500, "training steps")
    prompts_per_step: Count = key(64, "prompts sampled in a step")
    group_size: Count = key(8, "rollouts per prompt")
    mini_batch_rollouts: Count | None = key(
        None, "rollouts per optimiser step; None: all of the step"
    )
    micro_batch_rollouts: Count | None = key(None, "rollouts per forward pass (memory only)")
    epochs: Count = key(1, "passes over the rollouts of a step")
    max_tokens: Count = key(3072, "completion tokens at most")
    temperature: Positive = key(1.0, "sampling temperature")
    mask_truncated: bool = key(False, "take cut rollouts out of the loss mask")
    remainder: Literal["short", "copy", "drop"] = key(
        "short", "what becomes of an incomplete mini-batch"
    )
    max_turns: Literal[1] = key(1, "turns of a rollout; only 1 is built")
    max_nonfinite: Count = key(5, "steps in a row with a non-finite gradient that end the run")


class Reward(Section):
    kind: Literal["binary", "fraction"] = key(
        "binary", "1 if all tests hold, or the share that holds"
    )
    mode: Literal["strict", "flexible"] | None = key(None, "gsm8k rule; None: by prompt style")
    success_threshold: Number = key(1.0, "a reward of at least this is a success")
    format_penalty: Number = key(0.0, "added to a reply that could not be parsed")
    normalization: Literal["identity", "mean", "mean_std"] = key("identity", "of a group's rewards")
    timeout_seconds: Positive = key(0.8, "CPU seconds of a program")


class Advantage(Section):
    name: Literal["grpo", "dr_grpo", "rloo", "maxrl", "tailrl", "centered"] = key(
        "grpo", "estimator"
    )
    ddof: Literal[0, 1] = key(1, "delta degrees of freedom of the standard deviation (grpo)")
    eps: NonNegative = key(1e-6, "added to the standard deviation (grpo)")


class Filter(Section):
    strategy: Literal["none", "top_p", "top_k", "top_k_abs", "min_p"] = key(
        "none", "which groups stay"
    )
    value: Positive = key(1.0, "threshold of the strategy")
    type: Literal["largest", "smallest"] = key("largest", "end of the ranking that stays")
    metric: Literal[
        "reward_variance", "reward_std", "reward_var", "reward", "mean", "reward_sum", "length",
        "entropy", "entropy_variance", "entropy_std",
    ] = key("reward_variance", "score of a group; a standard deviation")  # fmt: skip
    top_p_prob_mode: Literal["linear", "softmax"] = key("linear", "weights of top_p")
    include_zero: bool = key(True, "groups with score 0 are candidates")
    eps: NonNegative = key(0.01, "absolute slack of top_p, linear")
    empty_stop_steps: CountOrZero = key(0, "empty steps in a row that end the run; 0: never")
    loss_scaling: Literal["none", "linear", "sqrt"] = key("none", "advantages times kept share")


class Loss(Section):
    clip_low: Positive = key(0.2, "lower clip range")
    clip_high: Positive = key(0.2, "upper clip range")
    dual_clip: Number | None = key(None, "bound for negative advantages, above 1; None: off", gt=1)
    old: Literal["behavior", "recomputed"] = key("behavior", "base of the ratio")
    is_level: Literal["token", "sequence"] = key("token", "ratio per token or per sequence")
    aggregation: Literal[
        "token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm",
        "token-sum",
    ] = key("token-mean", "how token losses become one number")  # fmt: skip


class Kl(Section):
    beta: NonNegative = key(0.0, "weight of the KL to the base model; 0 loads no reference model")
    estimator: Literal["k1", "k2", "k3", "abs"] = key("k3", "estimator")
    gradient_of: Literal["k2"] | None = key(None, "k2: value of the estimator, gradient of k2")


class Entropy(Section):
    coef: NonNegative = key(0.0, "weight of the entropy bonus")


class Mismatch(Section):
    mode: Literal["none", "tis", "sequence_tis", "icepop", "reject"] = key(
        "none", "correction between sampler and trainer (loss.old = recomputed only)"
    )
    cap: Positive = key(2.0, "C of tis and sequence_tis")
    low: Positive = key(0.5, "lower bound of icepop")
    high: Positive = key(2.0, "upper bound of icepop")
    limit: Positive = key(0.1, "row mean of k3 above which reject drops the row")


class Lag(Section):
    steps: CountOrZero = key(0, "the sampler is this many training steps behind")
    check_every: CountOrZero = key(10, "steps between teacher-forced checks; 0: never")
    fresh_limit: Positive | None = key(
        None, "mean |log ratio| allowed; None: 1e-3 float32, else 5e-2"
    )
    fresh_clip: Positive | None = key(
        None, "clip share allowed at lag 0; None: 1e-3 float32, else 5e-2"
    )


class Diagnostics(Section):
    k_buckets: tuple[str, ...] | None = key(
        None,
        'buckets of success counts such as ("1", "2", "3-5", "6-7"); None: those at group size 8',
    )
    grad_every: CountOrZero = key(0, "steps between measurements of the replay gradient's share")


class Replay(Section):
    model_config = ConfigDict(extra="forbid", frozen=True, populate_by_name=True)

    strategy: Literal["none", "uniform", "hard", "hard_cooldown", "ce"] = key("none", "how to draw")
    weight: NonNegative = key(0.1, "lambda, weight of the replay NLL", alias="lambda")
    rollouts: Count = key(128, "rollouts replayed per step")
    cooldown_steps: CountOrZero | None = key(
        None, "steps of rest; None: 5 for hard_cooldown, else 0"
    )
    cooldown_unit: Literal["rollout", "prompt"] = key("rollout", "what rests")
    max_per_prompt: Count = key(4, "rollouts of one prompt drawn per step")
    per_prompt: Count = key(8, "entries stored per prompt")
    max_entries: Count = key(4096, "entries stored in all")
    max_age: Count | None = key(None, "steps after which an entry is not drawn")
    alpha: NonNegative = key(1.0, "exponent of the difficulty weight")
    w_min: Fraction = key(0.05, "floor of the difficulty weight")
    start_step: CountOrZero = key(0, "first step that may draw")
    min_eligible: Count | None = key(None, "drawable entries before the first draw; None: rollouts")
    shortage: Literal["take", "relax"] = key(
        "take", "too few drawable: take all, or halve the rest"
    )


class Optim(Section):
    lr: Annotated[Positive, Field(lt=1)] = key(1e-6, "learning rate")
    schedule: Literal["constant", "linear", "cosine"] = key("constant", "after warm-up")
    warmup_steps: CountOrZero = key(0, "linear warm-up")
    beta1: Annotated[Number, Field(ge=0, lt=1)] = key(0.9, "AdamW")
    beta2: Annotated[Number, Field(ge=0, lt=1)] = key(0.999, "AdamW")
    eps: Positive = key(1e-8, "AdamW")
    weight_decay: NonNegative = key(0.0, "AdamW")
    grad_clip: NonNegative = key(1.0, "gradient norm; 0: off")


class Lora(Section):
    rank: CountOrZero = key(0, "0: full fine-tuning")
    alpha: Positive = key(32.0, "LoRA alpha")
    targets: str | tuple[str, ...] = key("all-linear", "target modules")


class Save(Section):
    every: Count = key(30, "steps between kept checkpoints; the last step is always kept")
    keep: Count | None = key(None, "checkpoints to keep; None: all")
    state_every: Count | None = key(None, "steps between resumable states; None: save.every")


class Validate(Section):
    every: CountOrZero = key(0, "steps between validations; 0: off")
    before_train: bool = key(False, "validate the base model first")
    problems: Count = key(256, "problems")
    samples: Count = key(1, "samples per problem")
    temperature: NonNegative = key(0.6, "sampling temperature")
    batches: Count = key(1, "validation batches")
    split: str | None = key(None, "split of the problems; None: the task's held-out one")


class Stop(Section):
    reward_below: Number | None = key(None, "mean reward over the window that ends the run")
    window: Count = key(20, "steps of the window")
    collapse_first_turn: Literal[False] = key(False, "not built")
    collapse_multi_turn: Literal[False] = key(False, "not built")


class Engine(Section):
    sampler: Literal["transformers", "vllm", "tinker", "fake"] = key("transformers", "what samples")
    learner: Literal["transformers", "tinker", "fake"] = key("transformers", "what learns")
    device: str = key("auto", "auto, cpu, cuda, mps")
    threads: CountOrZero = key(0, "CPU threads of torch; 0: the library's default")
    sample_batch: Count | None = key(
        None, "sequences generated at a time; None: 64 (transformers), 512 (vllm)"
    )
    gpus_per_node: Count | None = key(
        None, "GPUs that the study was planned for; rlfe train --gpus N starts that many ranks"
    )
    devices: str | None = key(None, 'GPUs to see such as "0,1"; None: as the process finds them')
    tensor_parallel: Count = key(1, "GPUs that share one sampler's weights (vllm)")
    gpu_share: Annotated[Number, Field(gt=0, le=1)] = key(
        0.9, "share of a GPU's memory for the sampler (vllm)"
    )
    max_batched_tokens: Count | None = key(None, "tokens of one pass (vllm); None: its default")
    compilation: Literal["eager", "graphs", "full"] = key(
        "graphs", "CUDA graphs of decoding start in seconds, full adds the compiler (vllm)"
    )
    sleep: bool = key(False, "free the sampler's cache while the learner works (vllm)")


class Compute(Section):
    gradient_checkpointing: bool | Literal["auto"] = key(
        False, "compute layers again for the gradient; auto: where it would not fit otherwise"
    )
    compile: bool = key(False, "torch.compile of layers and logits: a slower start, faster updates")
    token_budget: Count | None = key(
        None, "tokens of a forward pass, padding included; None: 16384 (GPU), 2048 (CPU)"
    )
    logits: Literal["chunked", "full", "liger"] = key(
        "chunked", "some tokens at a time, all at once in float32, or by liger-kernel"
    )
    peak_tflops: Positive | Literal["measured"] | None = key(
        None, "what MFU is a share of; None: the GPU's data sheet, measured: by a trial"
    )


class Service(Section):
    model: str | None = key(
        None, "name of the base model at the service (tinker); None: model.path"
    )
    reduction: Literal["sum", "mean"] = key(
        "sum", "how the service adds a loss up: sum, as the Tinker API says, or mean (SkyRL on JAX)"
    )
    timeout_seconds: Positive = key(3600.0, "seconds that one request may take at the service")


class Track(Section):
    loggers: tuple[Literal["console", "wandb", "trackio", "tensorboard"], ...] = key(
        ("console",), "trackers beside metrics.jsonl"
    )
    project: str = key("rlfe", "project name at the tracker")
    name: str | None = key(None, "run name at the tracker; None: the run folder's name")
    dir: str | None = key(None, "where the tracker writes")
    samples: bool = key(False, "send sample tables to the tracker")


class Run(Section):
    seed: CountOrZero = key(0, "run seed; everything random derives from it")
    resume: Literal["auto", "never"] = key("auto", "never refuses a folder that has checkpoints")
    timeout_minutes: Positive = key(
        30.0, "of several ranks: minutes that one waits for the others before the run ends"
    )


class Study(Section):
    title: str = key("", "of the study; recorded")
    hypothesis: str = key("", "recorded")
    criterion: str = key("", "recorded, in words")
    criteria: tuple[dict[str, Any], ...] = key(
        (), "criteria with a verdict, as [[study.criteria]] tables; recorded with their hash"
    )
    comparisons: tuple[dict[str, Any], ...] = key(
        (), "arms to compare without a verdict, as [[study.comparisons]] tables; recorded"
    )
    assumptions: tuple[str, ...] = key(
        (), 'settings that the study leaves open, as "key" or "key: why"'
    )
    budget_gpu_hours: NonNegative = key(0.0, "recorded; an overrun is shown, not enforced")
    max_wall_minutes: NonNegative = key(0.0, "recorded; an overrun is shown, not enforced")


class EvalTask(Section):
    n: Count | None = key(None, "samples per problem; None: 160 (gsm8k 8)")
    k: tuple[Count, ...] = key(
        (), "k of the shown pass@k; empty: 1, 5, 10, 50, 100, n as far as n goes"
    )
    temperature: NonNegative = key(0.6, "sampling temperature")
    top_p: Annotated[Number, Field(gt=0, le=1)] = key(0.95, "nucleus")
    max_tokens: Count = key(3072, "completion tokens at most")
    limit: Count | None = key(None, "first N problems only; the row says so")
    prompt: Literal["base", "chat"] | None = key(None, "prompt format; None: the run's")
    examples: tuple[str, ...] = key((), "ids of solved training problems shown in the prompt")
    mode: Literal["strict", "flexible"] | None = key(None, "gsm8k headline rule; None: flexible")
    seed: CountOrZero = key(0, "evaluation seed")


class Recipe(Section):
    """A whole recipe. `Recipe().train.steps == 500`."""

    about: str = key("", "one line, shown by `rlfe recipes list`")
    model: Model = Model()
    naming: Naming = Naming()
    task: Task = Task()
    data: Data = Data()
    prompt: PromptSection = PromptSection()
    train: Train = Train()
    reward: Reward = Reward()
    advantage: Advantage = Advantage()
    filter: Filter = Filter()
    loss: Loss = Loss()
    kl: Kl = Kl()
    entropy: Entropy = Entropy()
    mismatch: Mismatch = Mismatch()
    lag: Lag = Lag()
    diagnostics: Diagnostics = Diagnostics()
    replay: Replay = Replay()
    optim: Optim = Optim()
    lora: Lora = Lora()
    save: Save = Save()
    validate_: Validate = Field(default=Validate(), alias="validate")
    stop: Stop = Stop()
    engine: Engine = Engine()
    compute: Compute = Compute()
    service: Service = Service()
    track: Track = Track()
    run: Run = Run()
    study: Study = Study()
    eval: dict[str, EvalTask] = key({}, "settings per evaluation task")
    matrix: dict[str, tuple[Any, ...]] = key({}, "keys that vary over the cells of a sweep")
