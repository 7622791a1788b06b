"""The contract of models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import ClassVar, TypeVar

import numpy as np
from torch import Tensor, nn

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import PluginError
from toolkit_lm.messages import Array, EncoderInput, MultiModalFeatureSpec
from toolkit_lm.model.kernels import choose_kernels, choose_sources
from toolkit_lm.model.matching import load_parameters
from toolkit_lm.step import StepPart

IntermediateTensors = dict[str, Tensor]
"""What a pipeline rank hands to the next one, by name; [T, H] each."""
EncoderSequences = Callable[[Sequence[int]], AbstractContextManager[None]]
"""Inside `with sequences(lengths):`, attention of type ENCODER has a flat batch of sequences of
these lengths. Entering again is cheap."""


ComputeLogits = TypeVar("ComputeLogits", bound=Callable[..., Tensor])


def logits_of(part: str) -> Callable[[ComputeLogits], ComputeLogits]:
    """Marks a `compute_logits` that gives the logits of an attribute, a ParallelLMHead or a Model,
    and changes nothing.

    One that scales or caps them (Gemma 2, Granite, Cohere, T5) must not be marked: rounding makes
    equals of logits that differ, and the first of equals is taken. A method that overrides a marked
    one has no mark.
    """

    def mark(compute_logits: ComputeLogits) -> ComputeLogits:
        vars(compute_logits)["part"] = part
        return compute_logits

    return mark


class Model(nn.Module):
    """A model that the runner can drive. T tokens of the flat batch, R rows, H hidden size, V
    vocabulary.

    It is made with a surrounding `with torch.device(...)`; its parameters hold this rank's shard
    (see `toolkit_lm.model`'s layers).
    """

    packed: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Modules that pack several of the checkpoint's: {"qkv_proj": ("q_proj", "k_proj",
    "v_proj")}."""
    renames: ClassVar[Sequence[tuple[str, str]]] = ()
    """Regular expressions and replacements that turn the checkpoint's names into the model's."""
    ignored: ClassVar[Sequence[str]] = ()
    """Regular expressions of weights to pass over."""
    parts: ClassVar[Mapping[str, type[StepPart]]] = {}
    """By name, what keeps more of its sequences than tokens and KV cache, and hands to `forward`
    more than tokens."""
    takes_token_types: ClassVar[bool] = False
    """`forward` takes `token_type_ids` [T] int64 too: 1 for the tokens of a pair's second text,
    else 0."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.vllm_config = vllm_config
        self.prefix = prefix
        self.kernels = choose_kernels()
        choose_sources().learn(prefix, self.packed, self.renames)

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        *,
        intermediate: IntermediateTensors | None = None,
    ) -> Tensor | IntermediateTensors:
        """Hidden states [T, H] of tokens `input_ids` [T] at `positions` [T] or [3, T] (int64), or
        what the next pipeline rank needs.

        `intermediate` is the previous pipeline rank's result.
        """
        raise NotImplementedError

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Hidden states [R, H] -> logits [R, V], on every rank."""
        raise NotImplementedError

    def likeliest(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """The greatest of each row's logits, NaN where there is any, and its token, the first of
        equals: [R, H] -> [R], [R] int64.

        Where `compute_logits` is that of a part (`logits_of`), the part finds them, which need not
        make the logits.
        """
        if (part := getattr(self.compute_logits, "part", None)) is None:
            return self.kernels.likeliest(self.compute_logits(hidden_states))
        found: tuple[Tensor, Tensor] = getattr(self, part).likeliest(hidden_states)
        return found

    def divides_experts(self) -> bool:
        """Whether the model has experts, on this pipeline rank or another, that it divides as
        `enable_expert_parallel` says."""
        return False

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Takes the checkpoint's tensors (name, full tensor, mapped from disk); returns the names
        of the parameters filled.

        Raises CheckpointError that names the weights that are missing, unexpected or do not fit.
        """
        return load_parameters(
            self, weights, packed=self.packed, renames=self.renames, ignored=self.ignored
        )


class EncoderDecoderModel(Model):
    """A model whose decoder's cross attention reads what its encoder has made of another sequence.
    E tokens of encoder sequences."""

    embedder: ClassVar[str | None] = None
    """"module:Class" of its encoder alone, a pooling model, where it has one."""

    def encode(self, input_ids: Tensor, positions: Tensor, **features: list[Tensor]) -> Tensor:
        """Hidden states [E, H] of encoder tokens `input_ids` [E] at `positions` [E] (int64): those
        of all sequences that a step encodes.

        Where its rules make features of prompts, they are in the list `features`, one of each
        sequence; the tokens are then 0.
        """
        raise NotImplementedError

    def example_input(self, num_tokens: int) -> EncoderInput:
        """What the encoder is warmed up with: of about so many tokens. A model that reads features
        has other examples."""
        return EncoderInput.of_tokens([0] * num_tokens)

    def forward(  # type: ignore[override]
        self, input_ids: Tensor, positions: Tensor, *, encoder_hidden_states: Tensor | None = None
    ) -> Tensor:
        """Decoder hidden states [T, H]; `input_ids` and `positions` as of other models.

        `encoder_hidden_states` [E, H]: what `encode` has given in this step, of which cross
        attention stores keys and values. None: those of all sequences are cached.
        """
        raise NotImplementedError


class MultiModalModel(Model):
    """A language model that reads items of media too: where an item stands among the tokens,
    embeddings of the item replace theirs.

    Its language part is a model of its own, most often made by `make_part`.
    """

    def embed(self, input_ids: Tensor) -> Tensor:
        """Embeddings [T, H] of tokens [T], as the decoder goes on with them: those of items stand
        beside them as they are."""
        raise NotImplementedError

    def encode(
        self, modality: str, items: list[dict[str, Tensor]], sequences: EncoderSequences
    ) -> list[Tensor]:
        """Embeddings [n, H] of each item of a modality, from its named arrays. What they are does
        not depend on the other items."""
        raise NotImplementedError

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        *,
        inputs_embeds: Tensor | None = None,
        intermediate: IntermediateTensors | None = None,
    ) -> Tensor | IntermediateTensors:
        """As of other models. `inputs_embeds` [T, H] stand in the place of `embed(input_ids)`, and
        may be written to; None: no token is an item's.
        """
        raise NotImplementedError

    def prompt_positions(
        self, token_ids: np.ndarray, features: Sequence[MultiModalFeatureSpec]
    ) -> np.ndarray | None:
        """Rotary positions [3, N] (int64) of a prompt's tokens, below N; those after it go on from
        the greatest, all three alike.

        None: each token's index. `features` are without their data.
        """
        return None

    def example_items(self) -> list[tuple[str, dict[str, Array]]]:
        """The largest usual item of each modality, which the encoder is warmed up with."""
        raise NotImplementedError


class FallbackModel(Model):
    """A model class for architectures that have none of their own: registered by
    `models.add_fallback`."""

    @classmethod
    def refuses(cls, vllm_config: VllmConfig) -> str | None:
        """Why this class cannot run the checkpoint; None when it can. Must not hold weights.

        Of `vllm_config` only the checkpoint is resolved; its architecture is the first that
        config.json names.
        """
        raise NotImplementedError

    @classmethod
    def architecture_of(cls, model_type: str) -> str | None:
        """The architecture of checkpoints of a `model_type` that name none; None where it knows
        none, or several."""
        return None

    @classmethod
    def reserved_positions(cls, vllm_config: VllmConfig) -> int:
        """Of the positions that the checkpoint states, how many no token ever has. Asked of
        checkpoints that are not refused."""
        return 0

    def plain(self, token_ids: Tensor, *, exact: bool = False) -> Tensor | None:
        """Logits [T, V] at each token of one sequence [T], by the model's own code, without the
        engine's attention and cache.

        Of a model without logits, hidden states [T, H]. `exact`: computed in float32, whatever the
        dtype of the weights. The engine's are compared with them at the start. None: there is
        nothing to compare with.
        """
        return None


SHIM = """\
class {name}Shim({name}):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__(...)  # what {name} takes, read from vllm_config.hf_config"""


def check_constructor(cls: type[nn.Module]) -> None:
    """Raises PluginError, with the shim to write, unless `cls` can be made by `cls(vllm_config=...,
    prefix=...)` alone."""
    signature = inspect.signature(cls)
    try:
        signature.bind(vllm_config=None, prefix="")
    except TypeError as error:
        shim = SHIM.format(name=cls.__name__)
        raise PluginError(
            f"model {cls.__module__}.{cls.__qualname__}{signature} cannot be made as "
            f"{cls.__name__}(vllm_config=..., prefix=...): {error}. "
            "Models take these two keyword arguments and no others. Change its __init__, or "
            f"register a shim:\n{shim}"
        ) from None
