"""A drafter with a model of its own: a small one drafts for a large one with the same tokens."""

from msgspec import Struct
from toolkit_lm.plugin import DrafterRegistry, hookimpl


class Options(Struct, frozen=True):
    checkpoint: str = ""
    """Folder of the small model."""
    drafts: int = 4
    """Tokens that it drafts in a step."""
    shares_embedding: bool = False
    """It reads the large model's embeddings of tokens, in place of its own."""


@hookimpl
def toolkit_register_drafters(drafters: DrafterRegistry) -> None:
    drafters.add("draft_model", "draft_model_target:DraftModel")
