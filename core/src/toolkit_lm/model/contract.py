"""The contract of models."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import ClassVar, TypeVar

from torch import Tensor, nn

from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import PluginError, UnsupportedError
from toolkit_lm.model.embedding import VocabParallelEmbedding
from toolkit_lm.model.kernels import choose_kernels, choose_sources
from toolkit_lm.model.linear_method import Quantization
from toolkit_lm.model.matching import load_parameters
from toolkit_lm.step import StepPart

IntermediateTensors = dict[str, Tensor]
"""Tensors that a pipeline rank passes to the next one, by name; [T, H] each."""


ComputeLogits = TypeVar("ComputeLogits", bound=Callable[..., Tensor])


def logits_of(part: str) -> Callable[[ComputeLogits], ComputeLogits]:
    """Marks a `compute_logits` that returns the logits of an attribute, a ParallelLMHead or a
    Model, without changes.

    A method that scales or caps the logits (Gemma 2, Granite, Cohere, T5) must not be marked:
    rounding makes different logits equal, and the first of equals is taken. A method that overrides
    a marked one has no mark.
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
    """Parts with further state of sequences, and further inputs of `forward`, by name. Examples
    from toolkit_lm.parts: {"media": MediaPart} for a model that reads media, {"encoder":
    EncoderPart} for an encoder-decoder model. Each part states what it needs of the model."""
    embedder: ClassVar[str | None] = None
    """"module:Class" of a pooling model that is this model's encoder alone; None: there is none."""
    takes_token_types: ClassVar[bool] = False
    """Whether `forward` also takes `token_type_ids` [T] int64: 1 for the tokens of a pair's second
    text, otherwise 0."""

    current_rows: Sequence[int] | None = None
    """Rows of the step that modules are called for at the moment, in a model that computes its
    sequences one after the other. None: modules are called for all tokens of a step."""
    quantization: Quantization | None = None
    """The quantization that the layers' methods are of. Set once the model is constructed."""

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
        """Hidden states [T, H] of tokens `input_ids` [T] at `positions` [T] or [3, T] (int64). On a
        pipeline rank that is not the last: tensors for the next one.

        `intermediate` is the previous pipeline rank's result.
        """
        raise NotImplementedError

    def _find_embedding(self) -> VocabParallelEmbedding:
        found = [module for module in self.modules() if isinstance(module, VocabParallelEmbedding)]
        if len(found) != 1:
            there = ", ".join(module.prefix for module in found) or "none on this pipeline stage"
            raise UnsupportedError(
                f"{type(self).__name__}.embed_input_ids: a model without one embedding of tokens "
                f"(it has {there}) says itself which it is."
            )
        return found[0]

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """Embeddings [T, H], a new tensor, of tokens `input_ids` [T], in the form in which the
        decoder uses them: the `inputs_embeds` of `forward`, if it has this argument.

        By default the model's one VocabParallelEmbedding computes them. All tensor parallel ranks
        call it together. Raises UnsupportedError on a pipeline stage without the embedding: the
        first stage has it.
        """
        # Not a cached property: compilers trace this, and cannot trace its lock. Not an attribute:
        # torch would register the module twice.
        embedding = self.__dict__.get("_input_embedding")
        if embedding is None:
            embedding = self.__dict__["_input_embedding"] = self._find_embedding()
        embedded: Tensor = embedding(input_ids)
        return embedded

    def compute_logits(self, hidden_states: Tensor) -> Tensor:
        """Hidden states [R, H] -> logits [R, V], on every rank."""
        raise NotImplementedError

    def likeliest(self, hidden_states: Tensor) -> tuple[Tensor, Tensor]:
        """The greatest of each row's logits (NaN if there is any) and its token, the first of
        equals: [R, H] -> [R], [R] int64.

        If `compute_logits` only returns an attribute's logits (`logits_of`), that attribute
        computes the result. It may avoid making the logits.
        """
        if (part := getattr(self.compute_logits, "part", None)) is None:
            return self.kernels.likeliest(self.compute_logits(hidden_states))
        found: tuple[Tensor, Tensor] = getattr(self, part).likeliest(hidden_states)
        return found

    def divides_experts(self) -> bool:
        """Whether the model has experts, on this pipeline rank or another, that it divides if
        `enable_expert_parallel` is set."""
        return False

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Loads the checkpoint's tensors (name, full tensor, mapped from disk). Returns the names
        of the parameters filled.

        Raises CheckpointError, which names the weights that are missing, unexpected or do not fit.
        """
        return load_parameters(
            self, weights, packed=self.packed, renames=self.renames, ignored=self.ignored
        )


class FallbackModel(Model):
    """A model class for architectures without a class of their own, registered by
    `models.add_fallback`."""

    @classmethod
    def refuses(cls, vllm_config: VllmConfig) -> str | None:
        """Returns why this class cannot run the checkpoint; None: it can. Must not load weights.

        Only the checkpoint of `vllm_config` is resolved. Its architecture is the first that
        config.json names.
        """
        raise NotImplementedError

    @classmethod
    def architecture_of(cls, model_type: str) -> str | None:
        """The architecture of checkpoints of a `model_type` that name none. None: the type is
        unknown, or has several."""
        return None

    @classmethod
    def reserved_positions(cls, vllm_config: VllmConfig) -> int:
        """Number of positions that the checkpoint states but no token ever has. Called for
        checkpoints that are not refused."""
        return 0

    def plain(self, token_ids: Tensor, *, exact: bool = False) -> Tensor | None:
        """Logits [T, V] at each token of one sequence [T], computed by the model's own code,
        without the engine's attention and cache.

        For a model without logits: hidden states [T, H]. `exact`: computed in float32, whatever the
        dtype of the weights. At the start they are compared with the engine's. None: there is
        nothing to compare with.
        """
        return None


SHIM = """\
class {name}Shim({name}):
    def __init__(self, *, vllm_config, prefix=""):
        super().__init__(...)  # what {name} takes, read from vllm_config.hf_config"""


def check_constructor(cls: type[nn.Module]) -> None:
    """Raises PluginError, with the shim to write, unless `cls(vllm_config=..., prefix=...)` can
    make an instance."""
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
