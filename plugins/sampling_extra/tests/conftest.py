"""Rows for the sampler whose requests ask for this plugin's processors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from toolkit_lm.config import PluginsConfig, VllmConfig
from toolkit_lm.params import SAMPLING_PARAMS, SamplingParams
from toolkit_lm.plugin import Plugins
from toolkit_lm.renderer import Rendered
from toolkit_lm.sampling import ProcessorTable
from toolkit_lm_devkit import sampling_rows

VOCAB = 64


class LetterRenderer:
    """One token per character."""

    vocab_size = 256
    config = VllmConfig.default({"vocab_size": 128})

    def render_prompt(self, text, *, add_special_tokens):
        assert not add_special_tokens
        return Rendered([ord(char) for char in text])

    def token_bytes(self, token_ids, *, skip_special_tokens=False):
        return [chr(one).encode() for one in token_ids]


@pytest.fixture(scope="session")
def registry():
    return Plugins.load(PluginsConfig(plugins=["sampling_extra"])).logits_processors


@pytest.fixture(scope="session")
def prepare(registry):
    """prepare(dry_multiplier=1, ...) -> the arguments of each processor that the parameters turn
    on."""

    def prepare(**extra_args):
        made = {
            name: params.prepare(LetterRenderer())
            for name, params in registry.parse(extra_args).items()
        }
        return {name: dict(arguments) for name, arguments in made.items() if arguments is not None}

    return prepare


@pytest.fixture(scope="session")
def make_rows(registry, prepare):
    """make_rows(fields, ..., **more): a row for each mapping of parameters, core's and this
    plugin's; `more` as of sampling_rows."""

    def make_rows(*rows, **more):
        split = SimpleNamespace(core=[], extra=[])
        for fields in rows:
            split.core.append(
                SamplingParams(
                    **{name: value for name, value in fields.items() if name in SAMPLING_PARAMS}
                )
            )
            split.extra.append(
                prepare(
                    **{name: value for name, value in fields.items() if name not in SAMPLING_PARAMS}
                )
            )
        table = ProcessorTable(registry, VllmConfig.default(), torch.device("cpu"))
        return sampling_rows(*split.core, processors=table, arguments=split.extra, **more)

    return make_rows


@pytest.fixture(scope="session")
def make_logits():
    """make_logits(rows, seed=0, vocab=64) -> [rows, vocab] normal float32."""
    return lambda rows, seed=0, vocab=VOCAB: torch.randn(
        rows, vocab, generator=torch.Generator().manual_seed(seed)
    )


@pytest.fixture(scope="session")
def edited():
    """edited(logits, rows): the logits after the processors of the stage "logits"."""
    return changed("logits")


@pytest.fixture(scope="session")
def filtered():
    """filtered(probs, rows): the probabilities after the processors of the stage "probs"."""
    return changed("probs")


def changed(stage):
    def change(values, rows):
        values = values.clone()
        rows.processors.apply(values, rows.key.tolist(), rows.processor_row, stage)
        assert not rows.processors.errors
        return values

    return change
