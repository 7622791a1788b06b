"""How far a quantized model is from its original: distributions of the next token, token by
token."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.errors import ConfigError, UnsupportedError
from toolkit_lm.model import LinearBase, Model, load_model
from toolkit_lm.plugin import Plugins
from toolkit_lm.renderer import make_renderer
from toolkit_lm.resolution import resolve
from toolkit_lm.runner import load_model_class
from toolkit_lm_devkit import logits_of
from torch import Tensor

INDISTINGUISHABLE = 0.01
"""Mean KL divergence below which nobody tells the models apart by their answers."""
_OWN_TEXTS = 8
"""Texts that the original writes itself where none is given."""


@dataclass(frozen=True)
class Quality:
    """A model beside its reference, over the same tokens."""

    num_tokens: int
    """Tokens whose successor was predicted."""
    mean_kl: float
    """KL divergence of the model's distributions of the next token from the reference's, in
    nats."""
    kl_error: float
    """Standard error of mean_kl."""
    median_kl: float
    p99_kl: float
    """99th percentile."""
    top1_agreement: float
    """Share of tokens at which both have the same most probable next token."""
    perplexity: float
    reference_perplexity: float

    @property
    def is_indistinguishable(self) -> bool:
        return self.mean_kl < INDISTINGUISHABLE


@dataclass(frozen=True)
class LayerQuality:
    """The reference with one layer of the model in place of its own."""

    layer: str
    mean_kl: float


@dataclass(frozen=True)
class Report:
    """Output of `toolkit quality`."""

    model: str
    quantization: str
    reference: str
    text: str
    """The file of the text, or who wrote it."""
    quality: Quality
    layers: list[LayerQuality] = field(default_factory=list)
    """Worst first."""


def measure(
    config: VllmConfig,
    plugins: Plugins,
    *,
    reference: str | None,
    text: str | None,
    max_tokens: int,
    window: int,
    layer_tokens: int,
) -> Report:
    """Compares a model with its reference: the checkpoint `reference`, or the model's own
    checkpoint without quantization.

    `text`: a file in UTF-8; None: the reference writes texts itself. At most `max_tokens` of it are
    read, in windows of `window` tokens; the first `layer_tokens` of them also with one layer at a
    time. Raises ToolkitError.
    """
    config = config.replace(device="cpu")
    _check_writes(config, plugins)
    original = _reference(config, reference, plugins)
    window = min(window, resolve(original, plugins).max_model_len)
    windows = _cut(_tokens(original, plugins, text, max_tokens), window, max_tokens)
    theirs = _load(original, plugins)
    ours = _load(config, plugins)
    tally = _Tally()
    changed = _changed(ours, theirs, original.model.model)
    layers: dict[str, list[Tensor]] = {name: [] for name in changed}
    seen = 0
    with torch.inference_mode():
        for tokens in windows:
            expected = _log_probabilities(theirs, tokens)
            tally.add(expected, _log_probabilities(ours, tokens), tokens)
            if seen >= layer_tokens:
                continue
            seen += len(tokens)
            for name, pairs in changed.items():
                with _in_place(pairs):
                    layers[name].append(_kl(expected, _log_probabilities(theirs, tokens)))
    by_layer = [
        LayerQuality(name, torch.cat(kl).mean().item()) for name, kl in layers.items() if kl
    ]
    return Report(
        model=config.model.model,
        quantization=resolve(config, plugins).load.quantization,
        reference=original.model.model,
        text=text or f"written by {original.model.model}",
        quality=tally.quality(),
        layers=sorted(by_layer, key=lambda layer: -layer.mean_kl),
    )


def _check_writes(config: VllmConfig, plugins: Plugins) -> None:
    """Raises UnsupportedError for a model that continues no text."""
    resolved = resolve(config, plugins)
    assert resolved.checkpoint is not None
    entry = plugins.models.get(resolved.checkpoint.architecture)
    if resolved.model.runner == "pooling" or entry.encoder_decoder:
        raise UnsupportedError(
            "toolkit quality compares how models continue a text, and the model "
            f"{entry.key!r} of {config.model.model!r} continues none: it must be a decoder."
        )


def _reference(config: VllmConfig, reference: str | None, plugins: Plugins) -> VllmConfig:
    parallel = config.parallel
    if parallel.num_ranks > 1 or parallel.data_parallel_size > 1:
        raise ConfigError("toolkit quality computes on one rank: leave the parallel sizes at 1.")
    if reference is not None:
        return config.replace(
            model=reference,
            quantization="auto",
            quantization_skip=[],
            quantization_override=[],
            quantization_group_size=None,
        )
    if resolve(config, plugins).load.quantization == "none":
        raise ConfigError(
            f"{config.model.model!r} is not quantized: say how (quantization='int4'), or what it "
            "is to be compared with (--reference ORIGINAL)."
        )
    plain = config.replace(
        quantization="none",
        quantization_skip=[],
        quantization_override=[],
        quantization_group_size=None,
    )
    try:
        resolve(plain, plugins)
    except UnsupportedError:
        raise ConfigError(
            f"{config.model.model!r} holds quantized weights alone: name the checkpoint that it "
            "was made from (--reference ORIGINAL)."
        ) from None
    return plain


def _tokens(
    original: VllmConfig, plugins: Plugins, text: str | None, max_tokens: int
) -> list[list[int]]:
    """Token ids of the text, or of texts that the original writes: greedy answers would be too
    easy."""
    if text is not None:
        renderer = make_renderer(resolve(original, plugins), plugins)
        try:
            with open(text, encoding="utf-8") as file:
                content = file.read()
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"--text {text}: {error}.") from error
        return [list(renderer.render_prompt(content).token_ids)]
    from toolkit_lm import LLM, SamplingParams

    with LLM(config=original.replace(engine_process=False), plugins=plugins) as llm:
        length = min(max_tokens // _OWN_TEXTS, llm.config.max_model_len - 1)
        first = llm.config.hf_config.get("bos_token_id")
        start = first if isinstance(first, int) else 0
        params = [
            SamplingParams(temperature=1, seed=seed, max_tokens=length, ignore_eos=True)
            for seed in range(_OWN_TEXTS)
        ]
        outputs = llm.generate([{"prompt_token_ids": [start]}] * _OWN_TEXTS, params, use_tqdm=False)
    return [[start, *output.outputs[0].token_ids] for output in outputs]


def _cut(texts: list[list[int]], window: int, max_tokens: int) -> list[Tensor]:
    """Windows of 2 tokens at least."""
    found = [
        text[begin : begin + window] for text in texts for begin in range(0, len(text), window)
    ]
    kept: list[Tensor] = []
    total = 0
    for tokens in found:
        if len(tokens) > 1 and total < max_tokens:
            kept.append(torch.tensor(tokens[: max_tokens - total + 1]))
            total += len(tokens)
    if not kept:
        raise ConfigError("the text has fewer than 2 tokens: there is nothing to predict.")
    return kept


def _load(config: VllmConfig, plugins: Plugins) -> Model:
    resolved = resolve(config, plugins).with_rank(0)
    model_class = load_model_class(resolved, plugins)
    return load_model(model_class, resolved, torch.device("cpu"), plugins)


Pairs = list[tuple[LinearBase, LinearBase]]
"""Layers of the model, each with the reference's."""


def _changed(ours: Model, theirs: Model, reference: str) -> dict[str, Pairs]:
    """Layers that are quantized in one of two models, by name; experts of one layer together.
    Raises UnsupportedError if they are not the same layers, of the same sizes."""
    mine, others = (
        {layer.prefix: layer for layer in model.modules() if isinstance(layer, LinearBase)}
        for model in (ours, theirs)
    )
    differing = mine.keys() ^ others.keys() or {
        name for name, layer in mine.items() if layer.spec.shape != others[name].spec.shape
    }
    if differing:
        shown = ", ".join(sorted(differing)[:5])
        raise UnsupportedError(
            f"{reference!r} cannot be the reference: it has other layers than the model ({shown})."
        )
    found: dict[str, Pairs] = {}
    for name, layer in mine.items():
        if type(layer.method) is not type(others[name].method):
            shown = re.sub(r"\bexperts\.\d+\.", "experts.*.", name)
            found.setdefault(shown, []).append((layer, others[name]))
    return found


@contextmanager
def _in_place(pairs: Pairs) -> Iterator[None]:
    """Has layers of the reference compute with the model's weights."""
    before = [other.method for _, other in pairs]
    for mine, other in pairs:
        other.method = mine.method
    try:
        yield
    finally:
        for (_, other), method in zip(pairs, before, strict=True):
            other.method = method


def _log_probabilities(model: Model, tokens: Tensor) -> Tensor:
    """[T - 1, V] float32: of the next token, after each token but the last."""
    return logits_of([model], tokens)[:-1].float().log_softmax(-1)


def _kl(expected: Tensor, found: Tensor) -> Tensor:
    """KL divergence of each row [T]. Rounding makes none negative."""
    return (expected.exp() * (expected - found)).nan_to_num(0).sum(-1).clamp_min(0)


class _Tally:
    """Sums over windows."""

    def __init__(self) -> None:
        self.kl: list[Tensor] = []
        self.agrees: list[Tensor] = []
        self.losses: list[Tensor] = []
        self.reference_losses: list[Tensor] = []

    def add(self, expected: Tensor, found: Tensor, tokens: Tensor) -> None:
        """Log probabilities [T - 1, V] of both, of the tokens [T]."""
        self.kl.append(_kl(expected, found))
        self.agrees.append(expected.argmax(-1) == found.argmax(-1))
        for losses, rows in ((self.losses, found), (self.reference_losses, expected)):
            losses.append(-rows.gather(-1, tokens[1:, None]).squeeze(-1))

    def quality(self) -> Quality:
        kl = torch.cat(self.kl).double()
        count = len(kl)
        return Quality(
            num_tokens=count,
            mean_kl=kl.mean().item(),
            kl_error=(kl.std().item() / math.sqrt(count)) if count > 1 else 0.0,
            median_kl=kl.median().item(),
            p99_kl=kl.quantile(0.99).item(),
            top1_agreement=torch.cat(self.agrees).float().mean().item(),
            perplexity=torch.cat(self.losses).double().mean().exp().item(),
            reference_perplexity=torch.cat(self.reference_losses).double().mean().exp().item(),
        )
