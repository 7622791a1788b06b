"""Requests to encoder-decoder models, with the rules of the model's prompts."""

from __future__ import annotations

from itertools import chain

from msgspec import structs

from toolkit_lm.config import VllmConfig
from toolkit_lm.messages import EngineRequest, SequenceInputs
from toolkit_lm.plugin import Plugins
from toolkit_lm.processing.validation import check_token_ids
from toolkit_lm.renderer import EncoderDecoderRules, Renderer


def load_rules(
    config: VllmConfig, renderer: Renderer, plugins: Plugins
) -> EncoderDecoderRules | None:
    """The rules of the config's model; None: it has no encoder next to its decoder. Raises
    PluginError."""
    models = plugins.models
    architecture = config.checkpoint.architecture if config.checkpoint is not None else ""
    rules = models.load_rules(architecture) if architecture in models else None
    if rules is None:
        return None
    with models.get(architecture).owner.boundary(f"the rules of {architecture!r}", target=rules):
        made: EncoderDecoderRules = rules(config, renderer)
    return made


def inputs_by_rules(
    rules: EncoderDecoderRules, message: EngineRequest, vocab_size: int, plugins: Plugins
) -> SequenceInputs:
    """Returns a request's inputs, with the tokens that the rules force or forbid, and their logits
    processors. Processors that the request sets take precedence.

    Raises RequestError for a token that is not in the vocabulary.
    """
    inputs = message.inputs
    made = (message.prompt_token_ids, message.max_output_tokens)
    with plugins.boundary:
        forced = rules.forced_tokens(*made)
        processors = rules.logits_processors(*made)
        bad_words = rules.bad_words()
    check_token_ids([*forced.values(), *chain(*bad_words)], vocab_size, "generation_config.json")
    return structs.replace(
        inputs,
        bad_words=[*inputs.bad_words, *bad_words],
        forced_tokens=forced,
        logits_processors={**processors, **inputs.logits_processors},
    )
