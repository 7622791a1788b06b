"""More logits processors. This entry module only registers them; each is imported when a request
asks for it."""

from toolkit_lm.plugin import LogitsProcessorRegistry, hookimpl

from toolkit_lm_sampling_extra.params import (
    DryParams,
    EpsilonParams,
    MirostatParams,
    NgramParams,
    TypicalParams,
    XtcParams,
)


@hookimpl
def toolkit_register_logits_processors(processors: LogitsProcessorRegistry) -> None:
    processors.add("dry", "toolkit_lm_sampling_extra.dry:Dry", params=DryParams)
    processors.add(
        "no_repeat_ngram",
        "toolkit_lm_sampling_extra.no_repeat_ngram:NoRepeatNgram",
        params=NgramParams,
    )
    # It works right after core's filters, as in transformers: before all other processors of its
    # stage.
    processors.add(
        "typical", "toolkit_lm_sampling_extra.typical:Typical", params=TypicalParams, priority=1000
    )
    processors.add("xtc", "toolkit_lm_sampling_extra.xtc:Xtc", params=XtcParams)
    processors.add(
        "epsilon_cutoff",
        "toolkit_lm_sampling_extra.epsilon_cutoff:EpsilonCutoff",
        params=EpsilonParams,
    )
    # It learns from the probability that a token was drawn with: nothing may change the
    # distribution after it.
    processors.add(
        "mirostat",
        "toolkit_lm_sampling_extra.mirostat:Mirostat",
        params=MirostatParams,
        priority=-1000,
    )
