"""TransformersConformance: ModelConformance for models that transformers has too."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from toolkit_lm_devkit.checkpoints import make_checkpoint, randomize
from toolkit_lm_devkit.equality import assert_bf16_error
from toolkit_lm_devkit.model import ModelConformance, Reference, Subject


def reference_of(hf_model: Any) -> Reference:
    """The logits of a model of transformers."""

    def logits(token_ids: Sequence[int]) -> Tensor:
        with torch.inference_mode():
            out: Tensor = hf_model(torch.tensor([list(token_ids)], device=hf_model.device)).logits[0]
        return out

    return logits


class TransformersConformance(ModelConformance):
    """Subclass it and define `make_hf_model`. Checkpoints are what its `save_pretrained` writes; it is also the reference."""

    def make_hf_model(self, **variant: Any) -> Any:
        """A small model of transformers, in float32. Its weights are drawn anew."""
        raise NotImplementedError(f"{type(self).__name__} must define make_hf_model(**variant)")

    def make_checkpoint(self, folder: Path, **variant: Any) -> Reference:
        hf_model = self.make_hf_model(**variant).eval()
        randomize(hf_model)
        make_checkpoint(folder, hf_model)
        return reference_of(hf_model)

    def test_bfloat16_error_is_that_of_transformers(self, tmp_path: Path) -> None:
        """Both are compared with transformers in float32, on the weights that bfloat16 leaves."""
        half = self.make_hf_model(**next(iter(self.variants.values()))).eval()
        randomize(half)
        half = half.to(torch.bfloat16)
        make_checkpoint(tmp_path, half)
        exact, theirs = Subject(tmp_path, reference_of(copy.deepcopy(half).float())), Subject(tmp_path, reference_of(half))
        prompts = self.prompts(exact)
        generated = self.generate(exact, prompts, dtype="bfloat16")
        work = list(zip(prompts, generated.token_ids, strict=True))
        assert_bf16_error(generated.logprobs, [theirs.logprobs(p, t) for p, t in work], [exact.logprobs(p, t) for p, t in work])
