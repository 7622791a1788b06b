"""More logits processors. This entry module only registers them; each is imported when a request asks for it."""

from llm_toolkit.plugin import LogitsProcessorRegistry, hookimpl


@hookimpl
def toolkit_register_logits_processors(processors: LogitsProcessorRegistry) -> None:
    processors.add("no_repeat_ngram", "llm_toolkit_sampling_extra.no_repeat_ngram:NoRepeatNgram")
    processors.add("epsilon_cutoff", "llm_toolkit_sampling_extra.epsilon_cutoff:EpsilonCutoff")
