"""The registry of checkpoint writers. The plugin `quantize` brings its hook. Importing it needs no
torch."""

from __future__ import annotations

from toolkit_lm.plugin import PlainRegistry


class CheckpointWriterRegistry(PlainRegistry):
    """Subclasses of toolkit_lm_weights.writer.CheckpointWriter, by the name that `toolkit quantize
    --format` gives."""

    noun = "checkpoint writer"
    base = "toolkit_lm_weights.writer:CheckpointWriter"
