"""The three layers of an engine's purpose: runner type (at engine start), convert type (at model
load), task (per request)."""

from __future__ import annotations

from typing import Literal, get_args

RunnerType = Literal["generate", "pooling"]
PoolingTask = Literal["embed", "token_embed", "classify", "token_classify", "score"]
Task = Literal["generate", "embed", "token_embed", "classify", "token_classify", "score"]

POOLING_TASKS: tuple[PoolingTask, ...] = get_args(PoolingTask)

CONVERT_TASKS: dict[str, tuple[PoolingTask, ...]] = {
    "embed": ("embed", "token_embed"),
    "classify": ("classify", "score", "token_classify"),
}
"""Tasks that a model of each convert type serves. A native reward model serves its own pooler's
tasks."""

_BY_SUFFIX: tuple[tuple[str, RunnerType, str], ...] = (
    ("ForCausalLM", "generate", "none"),
    ("ForConditionalGeneration", "generate", "none"),
    ("ChatModel", "generate", "none"),
    ("LMHeadModel", "generate", "none"),
    ("ForTextEncoding", "pooling", "embed"),
    ("EmbeddingModel", "pooling", "embed"),
    ("ForSequenceClassification", "pooling", "classify"),
    ("Classification", "pooling", "classify"),
    ("ForRewardModeling", "pooling", "embed"),
    ("RewardModel", "pooling", "embed"),
    ("Model", "pooling", "embed"),
)
"""Suffixes of architecture names; the first match applies. "Classification" counts only after a
"For"."""


CONVERTIBLE_SUFFIXES = ("ForCausalLM", "ForConditionalGeneration", "ChatModel", "LMHeadModel")
"""Suffixes of model class names that pooling adapters can convert."""


def way_to_serve(task: PoolingTask) -> str:
    """End of an error's message: how to make a generating engine serve a task."""
    convert = next(convert for convert, tasks in CONVERT_TASKS.items() if task in tasks)
    hint = " To serve it beside generation: extra_tasks=['embed']." if convert == "embed" else ""
    return f"Start the engine with convert={convert!r}.{hint}"


def default_runner(architecture: str) -> tuple[RunnerType, str]:
    """Returns the runner type, and the convert type of a pooling runner, that an architecture's
    name implies: the table of `auto`."""
    for suffix, runner, convert in _BY_SUFFIX:
        if architecture.endswith(suffix) and (
            suffix != "Classification" or "For" in architecture.removesuffix(suffix)
        ):
            return runner, convert
    return "generate", "none"
