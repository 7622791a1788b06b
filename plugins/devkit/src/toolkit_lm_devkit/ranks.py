"""Tensor parallel ranks, each in a process of its own: what they compute is what one rank does."""

from __future__ import annotations

import importlib
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors.torch import load_file, save_file
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import Model
from toolkit_lm_executor_mp.groups import torch_groups
from torch import Tensor

from toolkit_lm_devkit.forward import hidden_states, load_checkpoint, logits_of


class Computed(NamedTuple):
    """Model and checkpoint for a rank to compute. The model is a class of an importable module."""

    model_class: type[Model]
    folder: Path
    """The checkpoint."""


def logits_of_ranks(
    models: Sequence[Computed], token_ids: Tensor, *, ranks: int = 2, **options: Any
) -> list[list[Tensor]]:
    """For each of `models`, the logits [T, V] of each rank at each token of one sequence [T];
    `options` are those of VllmConfig.

    A rank computes all of them one after the other: a start of Python costs more than a small model
    does. Raises AssertionError where a rank fails; its error is on stderr.
    """
    return _run(models, [token_ids], ranks, "logits", options)


def hidden_states_of_ranks(
    models: Sequence[Computed], sequences: Sequence[Tensor], *, ranks: int = 2, **options: Any
) -> list[list[Tensor]]:
    """Hidden states [T, H] of each rank for `sequences` of token ids, concatenated in T. Otherwise
    like `logits_of_ranks`."""
    return _run(models, sequences, ranks, "hidden states", options)


def _run(
    models: Sequence[Computed],
    sequences: Sequence[Tensor],
    ranks: int,
    kind: str,
    options: dict[str, Any],
) -> list[list[Tensor]]:
    names = [
        (model.model_class.__module__, model.model_class.__qualname__, str(model.folder))
        for model in models
    ]
    with tempfile.TemporaryDirectory() as folder:
        work = {
            "models": names,
            "sequences": [s.tolist() for s in sequences],
            "ranks": ranks,
            "kind": kind,
            "options": options,
        }
        Path(folder, "work.json").write_text(json.dumps(work))
        commands = [[sys.executable, "-m", __name__, str(rank), folder] for rank in range(ranks)]
        # The words are our own.
        processes = [subprocess.Popen(command) for command in commands]  # nosec B603
        try:
            codes = [process.wait(timeout=200) for process in processes]
        finally:
            for process in processes:
                process.kill()
                process.wait()
        assert codes == [0] * ranks, f"the ranks ended with the exit codes {codes}"
        results = [load_file(Path(folder, f"{rank}.safetensors")) for rank in range(ranks)]
    return [[result[str(index)] for result in results] for index in range(len(models))]


def _main(rank: int, folder: Path) -> None:
    work = json.loads((folder / "work.json").read_text())
    sequences = [torch.tensor(s) for s in work["sequences"]]
    options = {"tensor_parallel_size": work["ranks"], **work["options"]}
    parallel = VllmConfig.default(tensor_parallel_size=work["ranks"]).with_rank(rank).parallel
    results = {}
    with torch_groups(parallel, folder / "sync"):
        for index, (module, name, checkpoint) in enumerate(work["models"]):
            model = load_checkpoint(
                getattr(importlib.import_module(module), name),
                Path(checkpoint),
                rank=rank,
                **options,
            )
            out = (
                logits_of([model], sequences[0])
                if work["kind"] == "logits"
                else torch.cat(hidden_states([model], sequences))
            )
            results[str(index)] = out.contiguous()
    save_file(results, folder / f"{rank}.safetensors")


if __name__ == "__main__":
    _main(int(sys.argv[1]), Path(sys.argv[2]))
