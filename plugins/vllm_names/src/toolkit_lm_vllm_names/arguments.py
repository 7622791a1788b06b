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

from toolkit_lm_vllm_names.embeds_format import Embeds, decoded

PLUGIN = "vllm_names"
LOGPROBS = ("logprobs", "prompt_logprobs")
"""Parameters that count log probabilities."""
WHOLE_VOCABULARY = 2**31 - 1
"""Number of log probabilities that stands for -1: those of all tokens."""
MAX_TRACE = 2**20
"""Most tokens of a trace that is replayed."""
PLACEHOLDER = 0
"""Token that stands for a row of a prompt of embeddings."""


class Options(Struct, frozen=True):
    """`--plugin-option vllm_names.NAME=...`"""

    logits_processors: list[str] = field(default_factory=list)
    """Classes of vLLM's form, MODULE:CLASS, that requests with `vllm_xargs` use."""
    enable_prompt_embeds: bool = False
    """Requests may have a prompt of embeddings: `prompt_embeds`."""


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


def embeds_enabled(config: VllmConfig) -> bool:
    """Whether the engine takes prompts of embeddings."""
    stated = config.plugins.plugin_option.get(PLUGIN, {}).get("enable_prompt_embeds", "")
    return str(stated).lower() in ("true", "1", "on", "yes")


def single(value: Any) -> str | None:
    """The text of `prompt_embeds`: one text, or a list of one. None: it is empty."""
    return (value[0] if isinstance(value, list) and value else value) or None


def read_embeds(text: str, config: VllmConfig) -> Embeds:
    """The embeddings of a prompt. Raises RequestError for those of another model, and for more than
    `max_model_len` of them."""
    stated = config.hf_config
    size = (stated.get("text_config") or stated).get("hidden_size") or stated.get("n_embd")
    if not isinstance(size, int):
        raise RequestError(
            "prompt_embeds: the config.json of this model has no hidden_size.", "prompt_embeds"
        )
    embeds = decoded(text, config.max_model_len * size * 4)
    if embeds.size != size:
        raise RequestError(
            f"prompt_embeds has rows of {embeds.size} numbers, and this model's hidden size is "
            f"{size}.",
            "prompt_embeds",
        )
    return embeds


class EmbedsArguments(ProcessorParams):
    """Parameter of a request whose prompt is a tensor."""

    prompt_embeds: Annotated[
        str | list[str] | None,
        param(
            "A prompt of embeddings, in base64: a tensor of safetensors or torch.save. It replaces "
            "the prompt.",
            max_items=1,
            flag=False,
        ),
    ] = None

    def prepare(self, renderer: Any) -> Mapping[str, Any] | None:
        """The embeddings, as bytes. Raises RequestError."""
        text = single(self.prompt_embeds)
        if text is None:
            return None
        if not embeds_enabled(renderer.config):
            raise RequestError(
                "prompt_embeds: this engine takes no prompts of embeddings. Start it with the "
                "option enable_prompt_embeds.",
                "prompt_embeds",
            )
        return read_embeds(text, renderer.config)._asdict()


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
