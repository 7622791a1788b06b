"""Drafters. This entry module only registers them; each is imported when an engine uses it."""

from toolkit_lm.plugin import DrafterRegistry, LogitsProcessorRegistry, PartRegistry, hookimpl

from toolkit_lm_drafters.options import Options as Options
from toolkit_lm_drafters.requests import DraftParams


@hookimpl
def toolkit_register_drafters(drafters: DrafterRegistry) -> None:
    drafters.add("ngram", "toolkit_lm_drafters.ngram:NgramDrafter")
    drafters.add("suffix", "toolkit_lm_drafters.suffix:SuffixDrafter")
    drafters.add("draft_model", "toolkit_lm_drafters.draft_model:DraftModelDrafter")
    drafters.add("eagle", "toolkit_lm_drafters.eagle:EagleDrafter")
    drafters.add("mtp", "toolkit_lm_drafters.mtp:MtpDrafter")


@hookimpl
def toolkit_register_logits_processors(processors: LogitsProcessorRegistry) -> None:
    # It is a part's, and processes no logits.
    processors.add("drafter", None, params=DraftParams)


@hookimpl
def toolkit_register_parts(parts: PartRegistry) -> None:
    parts.add(
        "drafter",
        request="toolkit_lm_drafters.requests:DraftRequests",
        for_model="toolkit_lm_drafters.requests:is_for",
    )
