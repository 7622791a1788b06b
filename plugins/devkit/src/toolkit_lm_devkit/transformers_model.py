"""TransformersConformance: ModelConformance for models that transformers has too."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from toolkit_lm.errors import CheckpointError, UnsupportedError
from torch import Tensor

from toolkit_lm_devkit.checkpoints import make_checkpoint, randomize
from toolkit_lm_devkit.equality import assert_bf16_error, assert_same_logits
from toolkit_lm_devkit.forward import load_checkpoint, logits_of
from toolkit_lm_devkit.model import ModelConformance, Reference, Subject

_TRAINED = 32
"""Positions that scalings take the model to have been trained for."""
ROPE_TYPES: dict[str, dict[str, Any]] = {
    "linear": {"factor": 2.0},
    "dynamic": {"factor": 2.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": _TRAINED},
    "longrope": {"original_max_position_embeddings": _TRAINED},
    "llama3": {
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": _TRAINED,
    },
}
"""The scalings of rotary positions that transformers has, with their values."""


def reference_of(hf_model: Any) -> Reference:
    """The logits of a model of transformers."""

    def logits(token_ids: Sequence[int]) -> Tensor:
        with torch.inference_mode():
            out: Tensor = hf_model(torch.tensor([list(token_ids)], device=hf_model.device)).logits[
                0
            ]
        return out

    return logits


def _made(hf_model: Any, values: dict[str, Any]) -> Any | None:
    """The same weights with another config; None where transformers cannot make such a model."""
    try:
        made = type(hf_model)(type(hf_model.config)(**values)).eval()
    except Exception:
        # Each family refuses in its own way what it does not know.
        return None
    made.load_state_dict(hf_model.state_dict())
    return made


class TransformersConformance(ModelConformance):
    """Subclass it and define `make_hf_model`. Checkpoints are what its `save_pretrained` writes; it
    is also the reference."""

    def make_hf_model(self, **variant: Any) -> Any:
        """A small model of transformers, in float32. Its weights are drawn anew."""
        raise NotImplementedError(f"{type(self).__name__} must define make_hf_model(**variant)")

    def make_checkpoint(self, folder: Path, **variant: Any) -> Reference:
        hf_model = self.make_hf_model(**variant).eval()
        randomize(hf_model)
        make_checkpoint(folder, hf_model)
        return reference_of(hf_model)

    def test_every_rope_scaling_is_obeyed_or_refused(self, tmp_path: Path, first: Subject) -> None:
        """Tries each rope scaling that transformers applies to the first variant."""
        tokens = torch.tensor(self.prompts(first)[2])
        tokens = tokens.repeat(-(-self.max_model_len // len(tokens)))[: self.max_model_len]
        plain = self.make_hf_model(**next(iter(self.variants.values()))).eval()
        randomize(plain)
        unscaled = reference_of(plain)(tokens.tolist())
        for name, scaled in self.scaled_models(plain):
            reference = reference_of(scaled)(tokens.tolist())
            if torch.equal(reference, unscaled):
                continue
            folder = tmp_path / name
            folder.mkdir()
            make_checkpoint(folder, scaled)
            try:
                model = load_checkpoint(
                    self.model_class(first),
                    folder,
                    plugins=first.loaded,
                    max_model_len=self.max_model_len,
                )
            except (CheckpointError, UnsupportedError) as error:
                assert name in str(error), (
                    f"the refusal does not name the rope type {name!r}: {error}"
                )
                continue
            ours = logits_of([model], tokens).log_softmax(-1)
            try:
                assert_same_logits(ours, reference.log_softmax(-1))
            except AssertionError as error:
                pytest.fail(
                    f"rope type {name!r} of config.json is neither obeyed nor refused: {error}"
                )

    def scaled_models(self, hf_model: Any) -> Iterator[tuple[str, Any]]:
        """The model with each rope type that its config allows, by name. None of a model without
        rotary positions."""
        values = hf_model.config.to_dict()
        rope = values.get("rope_parameters")
        if not rope:
            return
        # If kinds of layers have their own rotary parameters, those with full attention are scaled.
        kind = "full_attention" if "full_attention" in rope else None
        plain = {
            "rope_theta": (rope[kind] if kind else rope).get("rope_theta", 1e4),
            "partial_rotary_factor": 1.0,
        }
        plain |= {
            key: value for key, value in (rope[kind] if kind else rope).items() if key in plain
        }
        # Full-attention layers may have heads of their own size.
        by_layer = (values.get("per_layer_config") or {}).values()
        own = (layer["head_dim"] for layer in by_layer if "head_dim" in layer)
        heads = (
            next(own, None)
            or values.get("head_dim")
            or values["hidden_size"] // values["num_attention_heads"]
        )
        pairs = int(heads * plain["partial_rotary_factor"]) // 2
        for name, fields in ROPE_TYPES.items():
            scaling = {**plain, **fields, "rope_type": name}
            if name == "longrope":
                scaling |= {
                    "short_factor": [1.0 + i / 8 for i in range(pairs)],
                    "long_factor": [2.0 + i for i in range(pairs)],
                }
            changes: dict[str, Any] = {
                "max_position_embeddings": _TRAINED if name == "dynamic" else self.max_model_len
            }
            changes["rope_parameters"] = {**rope, kind: scaling} if kind else scaling
            if "original_max_position_embeddings" in values:
                changes["original_max_position_embeddings"] = _TRAINED
            if (scaled := _made(hf_model, {**copy.deepcopy(values), **changes})) is not None:
                yield name, scaled

    def test_bfloat16_error_is_that_of_transformers(self, tmp_path: Path) -> None:
        """Both are compared with transformers in float32, on the weights that bfloat16 leaves."""
        half = self.make_hf_model(**next(iter(self.variants.values()))).eval()
        randomize(half)
        half = half.to(torch.bfloat16)
        make_checkpoint(tmp_path, half)
        exact, theirs = (
            Subject(tmp_path, reference_of(model), plugins=self.plugins)
            for model in (copy.deepcopy(half).float(), half)
        )
        prompts = self.prompts(exact)
        generated = self.generate(exact, prompts, dtype="bfloat16")
        work = list(zip(prompts, generated.token_ids, strict=True))
        assert_bf16_error(
            generated.logprobs,
            [theirs.logprobs(p, t) for p, t in work],
            [exact.logprobs(p, t) for p, t in work],
        )
