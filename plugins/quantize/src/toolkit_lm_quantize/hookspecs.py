"""The hook that this plugin brings, and the registry that it fills."""

from __future__ import annotations

from toolkit_lm.plugin import hookspec
from toolkit_lm_weights.registry import CheckpointWriterRegistry


@hookspec
def toolkit_register_checkpoint_writers(writers: CheckpointWriterRegistry) -> None:
    """Registers writers of checkpoints: formats of `toolkit quantize`.

    Caller: the loader. Process: every one, though only the command line uses them. Thread: main.
    Return: nothing; all implementations are called.
    """


REGISTRIES = {"toolkit_register_checkpoint_writers": CheckpointWriterRegistry}
"""Registry that the loader fills for each hook."""
