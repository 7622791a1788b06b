"""The fallback of pooling engines: encoders and classifiers of transformers, by their own code."""

from __future__ import annotations

import inspect
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from itertools import pairwise
from typing import Any, ClassVar

import torch
import transformers
from toolkit_lm.attention import BatchView, CacheBackend, CacheLayer, current
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import UnsupportedError
from toolkit_lm.kv import KVCacheSpec, PageTensor
from toolkit_lm.model import FallbackModel, IntermediateTensors, join, torch_dtype
from toolkit_lm_poolers import (
    METHODS,
    ClassifierHead,
    ClassifierPooler,
    DispatchPooler,
    RowPooler,
    classification_pooler,
    embedding_pooler,
    token_classification_pooler,
)
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.auto import modeling_auto as auto

from toolkit_lm_transformers.conversion import Conversion
from toolkit_lm_transformers.deadline import deadline
from toolkit_lm_transformers.examine import check_config, read_by_class, understood
from toolkit_lm_transformers.uninitialized import Uninitialized

logger = logging.getLogger(__name__)

_SECONDS = 300.0
_PROBE = 8
"""Tokens of a pass over shapes. Funnel, which pools its tokens twice, runs no fewer than 5."""
_OWN_POOLER = "own_pooler"
"""Name of the child `pooler` of a model of transformers: `pooler` is the engine's own."""
_KINDS: Mapping[str, Mapping[str, Any]] = {
    "embedding": {
        **auto.MODEL_MAPPING_NAMES,
        **auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
    },
    "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
    "classification": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "token_classification": auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
}

_SPEAKING = (
    auto.MODEL_FOR_TEXT_TO_SPECTROGRAM_MAPPING_NAMES,
    auto.MODEL_FOR_TEXT_TO_WAVEFORM_MAPPING_NAMES,
)
"""Classes that transformers lists among models without a head, too."""


class WholeSequences(CacheBackend):
    """Tells a layer which tokens are of one sequence. It caches nothing."""

    @classmethod
    def page_layout(cls, spec: KVCacheSpec) -> Sequence[PageTensor]:
        raise NotImplementedError("it caches nothing")

    def build(self, batch: BatchView) -> list[slice]:
        bounds = batch.query_start.tolist()
        return [slice(begin, end) for begin, end in pairwise(bounds) if end > begin]


class WholeModel(CacheLayer):
    """The model's forward pass: ids [T], and token types [T] where they are given -> [T, width].
    Sequences of equal length are computed together."""

    backend = WholeSequences
    needs_cache = False
    compute_rows: Callable[..., Tensor]
    """Computes ids [B, T] by the code of transformers: [B, T, width]."""

    def __init__(self, width: int, prefix: str) -> None:
        super().__init__(prefix)
        self.width = width

    @property
    def one_way(self) -> bool:
        return False

    def kv_cache_spec(self) -> None:
        return None

    def compute(self, *inputs: Tensor, out: Tensor) -> None:
        _, rows = current(self.prefix)
        alike: dict[int, list[slice]] = {}
        for row in rows:
            alike.setdefault(row.stop - row.start, []).append(row)
        for members in alike.values():
            index = torch.stack([torch.arange(row.start, row.stop) for row in members])
            index = index.to(out.device)
            try:
                out[index] = self.compute_rows(*(tensor[index] for tensor in inputs)).to(out.dtype)
            except (RuntimeError, ValueError, IndexError) as error:
                if isinstance(error, torch.OutOfMemoryError | torch.AcceleratorError):
                    raise
                # Code of transformers that cannot run prompts so short, such as Funnel's: their
                # requests fail, and others do not.
                logger.warning("prompts of %d tokens fail: %s", index.shape[1], error)
                out[index] = torch.nan


class TransformersForPooling(FallbackModel):
    """Any encoder of texts of transformers, with its classifier if it has one. Each sequence is
    computed whole."""

    takes_token_types: ClassVar[bool] = True

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        self.kind, width, config = _examine(vllm_config)
        name = vllm_config.hf_config["architectures"][0]
        dtype = torch_dtype(vllm_config.model.dtype)
        with deadline(_SECONDS, "make the model"), Uninitialized():
            model = getattr(transformers, name)._from_config(config, dtype=dtype).eval()
        # Hidden states do not pass through a pooler, logits may.
        self._reads_pooler = "classification" in self.kind
        for child_name, child in model.named_children():
            if child_name != "pooler":
                self.add_module(child_name, child)
            elif self._reads_pooler:
                self.add_module(_OWN_POOLER, child)
        for own, parameter in model.named_parameters(recurse=False):
            self.register_parameter(own, parameter)
        for own, buffer in model.named_buffers(recurse=False):
            self.register_buffer(own, buffer, own not in model._non_persistent_buffers_set)
        self._runner: Callable[..., Any] = _runner(model, self.kind).__call__
        self._has_types = _has_types(model, self.kind)
        reads_end = self.kind == "classification" and config.is_encoder_decoder
        self._end: int | None = config.eos_token_id if reads_end else None
        self._convert = Conversion(model)
        self.whole_model = WholeModel(width, join(prefix, "whole_model"))
        self.whole_model.compute_rows = self._rows
        self.pooler: RowPooler = self._make_pooler(vllm_config)

    @classmethod
    def refuses(cls, vllm_config: VllmConfig) -> str | None:
        try:
            _examine(vllm_config)
        except UnsupportedError as error:
            return str(error)
        return None

    def _make_pooler(self, vllm_config: VllmConfig) -> RowPooler:
        if self.kind == "classification":
            made = classification_pooler(vllm_config, nn.Identity(), default="LAST")
            # Each token has the logits of its sequence, and none of its own.
            head = next(module for module in made.modules() if isinstance(module, ClassifierHead))
            return DispatchPooler([ClassifierPooler(METHODS["LAST"], head)])
        if self.kind == "token_classification":
            return token_classification_pooler(vllm_config, nn.Identity())
        return embedding_pooler(vllm_config, default="MEAN")

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        *,
        intermediate: IntermediateTensors | None = None,
        token_type_ids: Tensor | None = None,
    ) -> Tensor:
        out = next(self.parameters()).new_empty(len(input_ids), self.whole_model.width)
        types = [token_type_ids] if token_type_ids is not None and self._has_types else []
        return self.whole_model.run(input_ids, *types, out=out)

    def _rows(self, input_ids: Tensor, token_type_ids: Tensor | None = None) -> Tensor:
        types = {} if token_type_ids is None else {"token_type_ids": token_type_ids}
        length = input_ids.shape[1]
        if self._end is not None and not input_ids.eq(self._end).any(dim=1).all():
            # Classifiers of encoder-decoder models read the end of the text, which a prompt of
            # tokens may lack.
            input_ids = F.pad(input_ids, (0, 1), value=self._end)
        result = self._runner(input_ids=input_ids, **types)
        return _values(result, self.kind, length)

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        return super().load_weights(self._named(self._convert(weights)))

    def _named(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
        """The model's tensors by their names here, without those of a pooler that is not read."""
        for name, tensor in weights:
            if not name.startswith("pooler."):
                yield name, tensor
            elif self._reads_pooler:
                yield name.replace("pooler", _OWN_POOLER, 1), tensor


def _examine(vllm_config: VllmConfig) -> tuple[str, int, Any]:
    """Kind of the model, numbers of a token in its result, and its config. Raises
    UnsupportedError."""
    name = vllm_config.hf_config["architectures"][0]
    kind = next((kind for kind, names in _KINDS.items() if name in _flat(names)), None)
    if kind is None:
        raise UnsupportedError(f"{name} is not a text encoder or classifier of transformers")
    if any(name in _flat(names) for names in _SPEAKING):
        raise UnsupportedError("it writes speech")
    config = read_by_class(vllm_config.hf_config, name)
    check_config(config, vllm_config)
    model_class = getattr(transformers, name)
    with torch.device("meta"):
        model = understood(
            lambda: model_class._from_config(config, dtype=torch.float32), "make the model"
        )
    runner = _runner(model, kind)
    if "input_ids" not in inspect.signature(runner.forward).parameters:
        raise UnsupportedError(f"{name} takes no tokens")
    if "classification" in kind:
        return kind, int(config.num_labels), config
    return kind, understood(lambda: width_of(runner, kind), "run the model on shapes alone"), config


@torch.no_grad()
def width_of(encoder: Any, kind: str) -> int:
    """Numbers of a token in an encoder's result, by a pass over shapes. If that needs values, they
    are the config's `hidden_size`."""
    try:
        result = encoder(input_ids=torch.zeros(1, _PROBE, dtype=torch.long, device="meta"))
    except RuntimeError as error:
        size = getattr(encoder.config, "hidden_size", None)
        if "meta" not in str(error) or not isinstance(size, int):
            raise
        return size
    return int(_values(result, kind, _PROBE).shape[-1])


def _flat(names: Mapping[str, Any]) -> set[str]:
    return {
        name for value in names.values() for name in ([value] if isinstance(value, str) else value)
    }


def _runner(model: Any, kind: str) -> Any:
    return model.base_model if kind in ("embedding", "masked") else model


def _has_types(model: Any, kind: str) -> bool:
    takes = "token_type_ids" in inspect.signature(_runner(model, kind).forward).parameters
    return takes and getattr(model.config, "type_vocab_size", 0) > 1


def _values(result: Any, kind: str, num_tokens: int) -> Tensor:
    """[B, T, width] of a result: hidden states, or logits."""
    if kind == "classification":
        logits: Tensor = result.logits
        if logits.ndim != 2:
            raise UnsupportedError(f"its logits have shape {list(logits.shape)}")
        return logits[:, None].expand(-1, num_tokens, -1)
    found: Tensor = result.logits if kind == "token_classification" else result[0]
    if found.ndim != 3 or found.shape[1] != num_tokens:
        raise UnsupportedError(f"it gives {list(found.shape)}, and not a vector of each token")
    return found
