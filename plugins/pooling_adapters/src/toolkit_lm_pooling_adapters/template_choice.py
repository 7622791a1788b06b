"""Chooses the score template for an engine's pairs of query and document."""

from __future__ import annotations

from pathlib import Path

from toolkit_lm.config import PoolerConfig, VllmConfig
from toolkit_lm.errors import ConfigError, PluginError, nearest
from toolkit_lm.plugin import Plugins

from toolkit_lm_pooling_adapters.registry import ScoreTemplateRegistry
from toolkit_lm_pooling_adapters.score_template import ScoreTemplate, read_score_template
from toolkit_lm_pooling_adapters.weight_names import stored_weights


def choose_score_template(config: VllmConfig, plugins: Plugins) -> ScoreTemplate | None:
    """The score template of a resolved config: the one in the option `score_template` (a name or a
    file), else the one of a reranker's architecture.

    None: query and document are a pair of texts that the renderer joins. An architecture's template
    applies only to language models without a trained classifier that classify by the reranker's
    method. Raises ConfigError and PluginError."""
    assert config.checkpoint is not None, "the config is not resolved: it has no checkpoint"
    templates = plugins.brought_registry(ScoreTemplateRegistry)
    wanted = config.pooler.score_template
    if wanted is not None:
        if wanted in templates:
            return _load(wanted, templates)
        if Path(wanted).is_file():
            return read_score_template(Path(wanted))
        known = nearest(wanted, templates.keys())
        raise ConfigError(
            f"score_template {wanted!r} is neither the name of a registered template nor a file. "
            f"{known}"
        )
    if config.model.convert != "classify":
        return None
    architecture = config.hf_config["architectures"][0]
    # The one that was registered last: third parties come after the distributions of this
    # repository.
    name = next(
        (e.key for e in reversed(templates.entries()) if architecture in e.architectures), None
    )
    if name is None or "score.weight" in stored_weights(config.checkpoint.path):
        return None
    template = _load(name, templates)
    return template if _is_made_for(template, config.pooler) else None


def _is_made_for(template: ScoreTemplate, options: PoolerConfig) -> bool:
    if options.classifier_method == "auto":
        return True
    tokens = options.classifier_tokens
    return options.classifier_method == template.classifier_method and tokens in (
        None,
        list(template.classifier_tokens),
    )


def _load(name: str, templates: ScoreTemplateRegistry) -> ScoreTemplate:
    template = templates.load(name)
    if not isinstance(template, ScoreTemplate):
        owner = templates.get(name).owner
        raise PluginError(
            f"{owner}: score template {name!r} must be a ScoreTemplate, not a "
            f"{type(template).__name__}."
        )
    return template
