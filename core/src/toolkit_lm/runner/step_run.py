"""Run: the interface of the runner that parts use during a step."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import numpy as np
from torch import Tensor, nn

from toolkit_lm.attention import BatchView, forward_context
from toolkit_lm.model import named_layers
from toolkit_lm.runner.backends import cache_layers
from toolkit_lm.sampling import TokenHistory, sample
from toolkit_lm.sampling.transfer import to_device
from toolkit_lm.step import StepRun


class Run(StepRun):
    """Interface that parts get in place of the runner."""

    def __init__(self, runner: Any) -> None:
        """`runner`: the ModelRunner that makes it. Its module imports this one, hence no type."""
        self._runner = runner
        self._layers: dict[nn.Module, tuple[list[str], Mapping[str, Any]]] = {}
        """Names of the cache layers of modules that ran, and their named layers."""

    def sequences(self, lengths: Sequence[int]) -> AbstractContextManager[None]:
        runner = self._runner
        metadata = runner._bindings.encoder_metadata(lengths)
        return forward_context(runner._context._replace(metadata=metadata))

    def tap(self, layer: str) -> Tensor:
        taps = self._runner._taps
        buffers: dict[str, Tensor] = {} if taps is None else taps.buffers
        if layer not in buffers:
            raise ValueError(
                f"layer {layer!r} is not tapped: no part names it in `taps`. Tapped are: "
                f"{', '.join(map(repr, buffers)) or 'none'}."
            )
        return buffers[layer][: len(self._runner.step_inputs.token_index)]

    def forward(
        self,
        model: nn.Module,
        rows: np.ndarray,
        tokens: Sequence[np.ndarray],
        start: np.ndarray,
        **arguments: Tensor,
    ) -> Tensor:
        runner = self._runner
        counts = np.array([len(ids) for ids in tokens], np.int64)
        ends = start + counts
        if (most := int(ends.max())) > runner.config.max_model_len:
            raise ValueError(
                f"a second pass reaches token {most}, beyond max_model_len "
                f"{runner.config.max_model_len}"
            )
        query_start = np.zeros(len(counts) + 1, np.int32)
        counts.cumsum(out=query_start[1:])
        index = np.arange(query_start[-1]) + np.repeat(start - query_start[:-1], counts)
        persistent = runner.step_inputs.rows[rows]
        seq_lens = ends.astype(np.int32)
        common: dict[str, Any] = {
            "query_start": query_start,
            "seq_lens": seq_lens,
            "starts": np.asarray(start, np.int64),
            "query_start_device": to_device(query_start, runner.device),
            "seq_lens_device": to_device(seq_lens, runner.device),
            "max_query_len": int(counts.max()),
            "max_seq_len": most,
        }
        context = runner._context
        backends = runner._bindings.backends
        metadata: list[Any] = [None] * len(backends)
        if (known := self._layers.get(model)) is None:
            known = self._layers[model] = [*cache_layers(model)], named_layers(model)
        names, layers = known
        for group in {context.bindings[name].group for name in names}:
            table, slots = runner._batch.slots(group, persistent, counts, index)
            view = BatchView(
                **common,
                block_table=to_device(table, runner.device),
                slot_mapping=to_device(slots, runner.device),
            )
            backend = backends[group]
            assert backend is not None, "a group of layers that run here has a backend"
            metadata[group] = backend.build(view)
        second = context._replace(metadata=metadata, layers=layers, slots={})
        with forward_context(second, within=context):
            out: Tensor = model(
                to_device(np.concatenate(tokens).astype(np.int64), runner.device),
                to_device(index, runner.device),
                **arguments,
            )
        return out

    def draw(
        self, logits: Tensor, rows: np.ndarray, ahead: int, after: np.ndarray | None = None
    ) -> np.ndarray:
        runner = self._runner
        sampling = runner._batch.sampling
        persistent = runner.step_inputs.rows[rows]
        with _as_if_drawn(sampling.history, persistent, ahead, after):
            selected = sampling.select(persistent)
            # Copies that are valid until the next selection.
            selected.position += ahead
            selected.logprobs[:] = -1
            selected.processors = None
            drawn = sample(logits, selected, runner.model.kernels.likeliest)
        return np.array(drawn.token_ids, np.int64)


@contextmanager
def _as_if_drawn(
    history: TokenHistory, rows: np.ndarray, ahead: int, after: np.ndarray | None
) -> Iterator[None]:
    """Context in which the rows' tokens are followed by `after` [N, ahead]. Raises ValueError for
    tokens beyond the longest sequence."""
    if not ahead:
        yield
        return
    assert after is not None, "what is drawn before this token"
    assert after.shape == (len(rows), ahead), "a token of each row for each that is drawn before"
    ends = history.num_tokens[rows]
    places = ends[:, None] + np.arange(ahead)
    if places.max() >= history.token_ids.shape[1]:
        raise ValueError(f"a draw {ahead} tokens ahead is beyond max_model_len")
    tokens = history.token_ids
    writeable = tokens.flags.writeable
    tokens.flags.writeable = True
    kept = tokens[rows[:, None], places]
    tokens[rows[:, None], places] = after
    history.num_tokens[rows] += ahead
    try:
        yield
    finally:
        tokens[rows[:, None], places] = kept
        history.num_tokens[rows] = ends
        tokens.flags.writeable = writeable
