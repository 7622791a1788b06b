"""Options of this plugin, and the arguments of logits processors that have vLLM's form."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Protocol

from msgspec import Struct, field
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import RequestError
from toolkit_lm.param_spec import ProcessorParams, param
from toolkit_lm.params import SAMPLING_PARAMS, SamplingParams
from toolkit_lm.plugin import Plugins
from toolkit_lm.renderer import Renderer

PLUGIN = "vllm_names"
LOGPROBS = ("logprobs", "prompt_logprobs")
"""Parameters that count log probabilities."""
WHOLE_VOCABULARY = 2**31 - 1
"""Number of log probabilities that stands for -1: those of all tokens."""
MAX_TRACE = 2**20
"""Most tokens of a trace that is replayed."""


class Options(Struct, frozen=True):
    """`--plugin-option vllm_names.NAME=...`"""

    logits_processors: list[str] = field(default_factory=list)
    """Classes of vLLM's form, MODULE:CLASS, that requests with `vllm_xargs` use."""


class ProcessorArguments(ProcessorParams):
    """Parameters of a request for the logits processors of the option."""

    changes_forward = False
    vllm_xargs: Annotated[
        dict[str, Any] | None,
        param(
            "Arguments of the engine's logits processors that have vLLM's form, by name.",
            max_items=64,
            flag=False,
        ),
    ] = None

    def prepare(self, renderer: Any) -> Mapping[str, Any] | None:
        """The arguments, as they are."""
        return None if self.vllm_xargs is None else {"vllm_xargs": self.vllm_xargs}


class TraceArguments(ProcessorParams):
    """Parameters of a request whose output is given."""

    changes_forward = False
    trace_decode_token_ids: Annotated[
        list[int] | None,
        param(
            "Output tokens, which are taken as they are; their log probabilities are the model's. "
            "max_tokens must be their number, ignore_eos true, and n 1.",
            max_items=MAX_TRACE,
            flag=False,
        ),
    ] = None

    def prepare(self, renderer: Any) -> Mapping[str, Any] | None:
        """The trace. Raises ValueError for tokens that are not in the vocabulary."""
        trace = self.trace_decode_token_ids
        if trace is None:
            return None
        if not trace or not all(0 <= token < renderer.vocab_size for token in trace):
            raise RequestError(
                "trace_decode_token_ids must have token ids of the vocabulary, at least one: from "
                f"0 to {renderer.vocab_size - 1}.",
                "trace_decode_token_ids",
            )
        return {"trace": trace}


class Engine(Protocol):
    """The parts of an engine that a request's parameters depend on."""

    @property
    def config(self) -> VllmConfig:
        """The resolved config."""

    @property
    def plugins(self) -> Plugins:
        """The loaded plugins."""

    @property
    def renderer(self) -> Renderer:
        """The renderer of prompts."""


def with_arguments(params: SamplingParams, engine: Engine) -> SamplingParams:
    """Parameters of which -1 log probabilities are those of the whole vocabulary. `extra_args` that
    no plugin states are arguments of the engine's logits processors of vLLM's form, if it has any:
    these see all requests."""
    whole = [name for name in LOGPROBS if getattr(params, name) == WHOLE_VOCABULARY]
    if whole:
        size = engine.config.vocab_size or engine.renderer.vocab_size
        params = params.replace(**dict.fromkeys(whole, size))
    options = engine.plugins.options(PLUGIN)
    if options is None or not options.logits_processors:
        return params
    extra_args = params.extra_args or {}
    stated = {*SAMPLING_PARAMS, *engine.plugins.logits_processors.params}
    others = {name: value for name, value in extra_args.items() if name not in stated}
    kept = {name: value for name, value in extra_args.items() if name in stated}
    kept["vllm_xargs"] = {**others, **(kept.get("vllm_xargs") or {})}
    return params.replace(extra_args=kept)
