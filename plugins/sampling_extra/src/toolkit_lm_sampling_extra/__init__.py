"""More logits processors. This entry module only registers them; each is imported when a request asks for it."""

from toolkit_lm.plugin import LogitsProcessorRegistry, hookimpl


@hookimpl
def toolkit_register_logits_processors(processors: LogitsProcessorRegistry) -> None:
    processors.add("no_repeat_ngram", "toolkit_lm_sampling_extra.no_repeat_ngram:NoRepeatNgram")
    processors.add("epsilon_cutoff", "toolkit_lm_sampling_extra.epsilon_cutoff:EpsilonCutoff")
