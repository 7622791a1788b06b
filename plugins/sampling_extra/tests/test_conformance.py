"""The plugin's processors pass the conformance kit."""

from __future__ import annotations

from toolkit_lm_devkit import LogitsProcessorConformance
from toolkit_lm_sampling_extra.dry import Dry
from toolkit_lm_sampling_extra.epsilon_cutoff import EpsilonCutoff
from toolkit_lm_sampling_extra.mirostat import Mirostat
from toolkit_lm_sampling_extra.no_repeat_ngram import NoRepeatNgram
from toolkit_lm_sampling_extra.params import (
    DryParams,
    EpsilonParams,
    MirostatParams,
    NgramParams,
    TypicalParams,
    XtcParams,
)
from toolkit_lm_sampling_extra.typical import Typical
from toolkit_lm_sampling_extra.xtc import Xtc


class TestDry(LogitsProcessorConformance):
    processor = Dry
    params = DryParams
    cases = (
        {"dry_multiplier": 1.0, "dry_allowed_length": 1},
        {"dry_multiplier": 3, "dry_allowed_length": 1, "dry_sequence_breakers": ["b", 3]},
    )
    wrong = ({"dry_multiplier": -1}, {"dry_sequence_breakers": [256]})


class TestXtc(LogitsProcessorConformance):
    processor = Xtc
    params = XtcParams
    cases = (
        {"xtc_probability": 1, "xtc_threshold": 0.05},
        {"xtc_probability": 0.5, "xtc_threshold": 0.02},
    )
    wrong = ({"xtc_threshold": 2},)


class TestMirostat(LogitsProcessorConformance):
    processor = Mirostat
    params = MirostatParams
    cases = ({"mirostat_tau": 2.0}, {"mirostat_tau": 1, "mirostat_eta": 1})
    wrong = ({"mirostat_tau": 0},)


class TestNoRepeatNgram(LogitsProcessorConformance):
    processor = NoRepeatNgram
    params = NgramParams
    cases = ({"no_repeat_ngram_size": 1}, {"no_repeat_ngram_size": 2})
    wrong = ({"no_repeat_ngram_size": -1},)


class TestEpsilonCutoff(LogitsProcessorConformance):
    processor = EpsilonCutoff
    params = EpsilonParams
    cases = ({"epsilon_cutoff": 0.001}, {"epsilon_cutoff": 0.9})
    wrong = ({"epsilon_cutoff": 1.5},)


class TestTypical(LogitsProcessorConformance):
    processor = Typical
    params = TypicalParams
    cases = ({"typical_p": 0.9}, {"typical_p": 1e-6})
    wrong = ({"typical_p": 0},)
