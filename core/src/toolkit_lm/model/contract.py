"""The contract of models."""

from __future__ import annotations

import inspect
from collections.abc import Iterable, Mapping, Sequence
from typing import ClassVar

from torch import Tensor, nn

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import PluginError
from toolkit_lm.messages import EncoderInput
from toolkit_lm.model.kernels import choose_kernels
from toolkit_lm.model.matching import load_parameters
from toolkit_lm.model.state import ModelState

IntermediateTensors = dict[str, Tensor]
"""What a pipeline rank hands to the next one, by name; [T, H] each."""


class Model(nn.Module):
    """A model that the runner can drive. T tokens of the flat batch, R rows, H hidden size, V vocabulary.

    It is made with a surrounding `with torch.device(...)`; its parameters hold this rank's shard (see `toolkit_lm.model`'s layers).
    """

    packed: ClassVar[Mapping[str, tuple[str, ...]]] = {}
    """Modules that pack several of the checkpoint's: {"qkv_proj": ("q_proj", "k_proj", "v_proj")}."""
    renames: ClassVar[Sequence[tuple[str, str]]] = ()
    """Regular expressions and replacements that turn the checkpoint's names into the model's."""
    ignored: ClassVar[Sequence[str]] = ()
    """Regular expressions of weights to pass over."""
    state: ClassVar[type[ModelState]] = ModelState
    """What the runner keeps of its sequences, and hands to `forward` beside tokens."""
    takes_token_types: ClassVar[bool] = False
    """`forward` takes `token_type_ids` [T] int64 too: 1 for the tokens of a pair's second text, else 0."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.vllm_config = vllm_config
        self.prefix = prefix
        self.kernels = choose_kernels()

    def forward(
        self, input_ids: Tensor, positions: Tensor, *, intermediate: IntermediateTensors | None = None
    ) -> Tensor | IntermediateTensors:
        """Hidden states [T, H] of tokens `input_ids` [T] at `positions` [T] or [3, T] (int64), or what the next pipeline rank needs.

        `intermediate` is the previous pipeline rank's result.
        """
        raise NotImplementedError

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Hidden states [R, H] -> logits [R, V], on every rank."""
        raise NotImplementedError

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Takes the checkpoint's tensors (name, full tensor, mapped from disk); returns the names of the parameters filled.

        Raises CheckpointError that names the weights that are missing, unexpected or do not fit.
        """
        return load_parameters(self, weights, packed=self.packed, renames=self.renames, ignored=self.ignored)


class EncoderDecoderModel(Model):
    """A model whose decoder's cross attention reads what its encoder has made of another sequence. E tokens of encoder sequences."""

    embedder: ClassVar[str | None] = None
    """"module:Class" of its encoder alone, a pooling model, where it has one."""

    def encode(self, input_ids: Tensor, positions: Tensor, **features: list[Tensor]) -> Tensor:
        """Hidden states [E, H] of encoder tokens `input_ids` [E] at `positions` [E] (int64): those of all sequences that a step encodes.

        Where its rules make features of prompts, they are in the list `features`, one of each sequence; the tokens are then 0.
        """
        raise NotImplementedError

    def example_input(self, num_tokens: int) -> EncoderInput:
        """What the encoder is warmed up with: of about so many tokens. A model that reads features has other examples."""
        return EncoderInput.of_tokens([0] * num_tokens)

    def forward(self, input_ids: Tensor, positions: Tensor, *, encoder_hidden_states: Tensor | None = None) -> Tensor:  # type: ignore[override]
        """Decoder hidden states [T, H]; `input_ids` and `positions` as of other models.

        `encoder_hidden_states` [E, H]: what `encode` has given in this step, of which cross attention stores keys and values. None: those
        of all sequences are cached.
        """
        raise NotImplementedError


class FallbackModel(Model):
    """A model class for architectures that have none of their own: registered by `models.add_fallback`."""

    @classmethod
    def refuses(cls, vllm_config: VllmConfig) -> str | None:
        """Why this class cannot run the checkpoint; None when it can. Must not hold weights.

        Of `vllm_config` only the checkpoint is resolved; its architecture is the first that config.json names.
        """
        raise NotImplementedError


SHIM = """\
class {name}Shim({name}):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__(...)  # what {name} takes, read from vllm_config.hf_config"""


def check_constructor(cls: type[nn.Module]) -> None:
    """Raises PluginError, with the shim to write, unless `cls` can be made by `cls(vllm_config=..., prefix=...)` alone."""
    signature = inspect.signature(cls)
    try:
        signature.bind(vllm_config=None, prefix="")
    except TypeError as error:
        shim = SHIM.format(name=cls.__name__)
        raise PluginError(
            f"model {cls.__module__}.{cls.__qualname__}{signature} cannot be made as {cls.__name__}(vllm_config=..., prefix=...): {error}. "
            f"Models take these two keyword arguments and no others. Change its __init__, or register a shim:\n{shim}"
        ) from None
