"""Which runner and convert type an engine gets, and which combinations are refused with what
words."""

from __future__ import annotations

import msgspec
import pytest
from toolkit_lm.config import PluginsConfig, PoolingProfile, VllmConfig
from toolkit_lm.errors import ConfigError, UnsupportedError
from toolkit_lm.plugin import Plugins, hookimpl
from toolkit_lm.resolution.runner_type import choose_runner


class Registers:
    @hookimpl
    def toolkit_register_models(self, models):
        models.add("KnownForCausalLM", "known:KnownForCausalLM")
        for name in ("BertModel", "BertForSequenceClassification", "KnownForRewardModel"):
            models.add(name, f"known:{name}", runner="pooling")

    @hookimpl
    def toolkit_register_pooling(self, converters):
        converters.add("embed", "known:as_embedding_model")
        converters.add("classify", "known:as_seq_cls_model")


@pytest.fixture(scope="module")
def plugins() -> Plugins:
    return Plugins.load(PluginsConfig(plugins=[]), extra=[Registers()])


def choose(plugins, name, key=None, profile=None, **options):
    """`key`: the registered class that runs the architecture `name`."""
    config = VllmConfig.default({"architectures": [name]}, **options)
    checkpoint = msgspec.structs.replace(
        config.checkpoint, architecture=key or name, pooling_profile=profile
    )
    return choose_runner(config.with_checkpoint(checkpoint), plugins)


LM = ("KnownForCausalLM", None)
SEQ_CLS = ("KnownForSequenceClassification", "KnownForCausalLM")
BERT = ("BertModel", None)
BERT_CLS = ("BertForSequenceClassification", None)
REWARD = ("KnownForRewardModel", None)


@pytest.mark.parametrize(
    ("checkpoint", "options", "expected"),
    [
        (LM, {}, ("generate", "none")),
        (LM, {"runner": "generate"}, ("generate", "none")),
        (LM, {"runner": "generate", "convert": "none"}, ("generate", "none")),
        (LM, {"extra_tasks": ["embed"]}, ("generate", "none")),
        (LM, {"runner": "pooling"}, ("pooling", "embed")),
        (LM, {"convert": "embed"}, ("pooling", "embed")),
        (LM, {"convert": "classify"}, ("pooling", "classify")),
        (LM, {"runner": "pooling", "convert": "classify"}, ("pooling", "classify")),
        (SEQ_CLS, {}, ("pooling", "classify")),
        (SEQ_CLS, {"convert": "embed"}, ("pooling", "embed")),
        (("KnownModel", "KnownForCausalLM"), {}, ("pooling", "embed")),
        (BERT, {}, ("pooling", "none")),
        (BERT, {"runner": "pooling", "convert": "embed"}, ("pooling", "none")),
        (BERT_CLS, {"convert": "classify"}, ("pooling", "none")),
        (REWARD, {}, ("pooling", "none")),
        (REWARD, {"convert": "reward"}, ("pooling", "none")),
    ],
)
def test_what_is_chosen(plugins, checkpoint, options, expected):
    assert choose(plugins, *checkpoint, **options) == expected


@pytest.mark.parametrize(
    ("checkpoint", "options", "error", "words"),
    [
        (
            LM,
            {"convert": "reward"},
            ConfigError,
            (
                "'reward' is for native reward models, and 'KnownForCausalLM' is not "
                "one.*convert='classify'"
            ),
        ),
        (LM, {"convert": "embedd"}, ConfigError, "no convert type 'embedd'.*embed"),
        (
            LM,
            {"runner": "generate", "convert": "embed"},
            ConfigError,
            "takes convert 'none', not 'embed'.*extra_tasks=.'embed'",
        ),
        (
            LM,
            {"runner": "generate", "convert": "classify"},
            ConfigError,
            r"not 'classify'\. Use runner='pooling'\.$",
        ),
        (
            REWARD,
            {"convert": "embed"},
            UnsupportedError,
            "pooling model already, but not of convert type 'embed'.*convert='auto'",
        ),
        (
            LM,
            {"runner": "pooling", "convert": "none"},
            ConfigError,
            "cannot run 'KnownForCausalLM' as it is.*convert='embed' or convert='classify'",
        ),
        (
            BERT,
            {"runner": "generate"},
            ConfigError,
            "runner 'generate': 'BertModel' is a pooling model. Supported: pooling",
        ),
        (
            BERT,
            {"convert": "classify"},
            UnsupportedError,
            "pooling model already, but not of convert type 'classify'",
        ),
        (
            BERT,
            {"convert": "reward"},
            ConfigError,
            "'reward' is for native reward models, and 'BertModel' is not one",
        ),
        (
            BERT_CLS,
            {"convert": "embed"},
            UnsupportedError,
            "pooling model already, but not of convert type 'embed'",
        ),
        (
            LM,
            {"extra_tasks": ["classify"]},
            ConfigError,
            "extra_tasks 'classify'.*Supported: embed",
        ),
        (
            LM,
            {"runner": "pooling", "extra_tasks": ["embed"]},
            ConfigError,
            "extra_tasks embed is for engines that generate",
        ),
        (
            BERT,
            {"extra_tasks": ["embed"]},
            ConfigError,
            "extra_tasks embed is for engines that generate",
        ),
    ],
)
def test_what_is_refused(plugins, checkpoint, options, error, words):
    with pytest.raises(error, match=words):
        choose(plugins, *checkpoint, **options)


def test_a_complete_profile_makes_a_language_model_an_embedder(plugins):
    profile = PoolingProfile(is_complete=True)
    assert choose(plugins, *LM, profile=profile) == ("pooling", "embed")
    assert choose(plugins, *LM, profile=profile, convert="classify") == ("pooling", "classify")
    assert choose(plugins, *LM, profile=profile, runner="generate") == ("generate", "none")
    assert choose(plugins, *LM, profile=profile, extra_tasks=["embed"], runner="generate") == (
        "generate",
        "none",
    )
    assert choose(plugins, *BERT, profile=profile) == ("pooling", "none")
    reranker = PoolingProfile(is_complete=True, scores=True)
    assert choose(plugins, *LM, profile=reranker) == ("pooling", "classify")
    assert choose(plugins, *LM, profile=PoolingProfile(max_tokens=64)) == ("generate", "none")
