"""The contract of models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, TypeVar

from torch import Tensor, nn

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import PluginError
from toolkit_lm.model.kernels import choose_kernels, choose_sources
from toolkit_lm.model.matching import load_parameters
from toolkit_lm.step import StepPart

IntermediateTensors = dict[str, Tensor]
"""What a pipeline rank hands to the next one, by name; [T, H] each."""


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
    more than tokens: {"media": MediaPart} of a model that reads media, {"encoder": EncoderPart} of
    an encoder-decoder model, from toolkit_lm.parts. Each says what it asks of the model."""
    embedder: ClassVar[str | None] = None
    """"module:Class" of a pooling model that is its encoder alone, where it has one."""
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
