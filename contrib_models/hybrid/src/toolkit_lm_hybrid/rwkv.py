"""RWKV-4 (Peng et al. 2023): linear attention whose keys fade by channel, and feed-forwards, each
of which reads the token before, too."""

from __future__ import annotations

import torch
from toolkit_lm.config import VllmConfig
from toolkit_lm.model import (
    Absent,
    ColumnParallelLinear,
    HFConfig,
    IntermediateTensors,
    LayerNorm,
    ReplicatedLinear,
    RowParallelLinear,
    Shard,
    join,
    layer_index,
    make_layers,
    torch_dtype,
)
from toolkit_lm_decoder.causal_lm import CausalLM, Decoder
from torch import Tensor, nn

from toolkit_lm_hybrid.mixer import RecurrentMixer, Rows, head_parameter

_NO_KEY = -1e38
"""Logarithm of the largest weight before the first token."""


def layer_norm(config: HFConfig, vllm_config: VllmConfig) -> LayerNorm:
    eps = config.get("layer_norm_epsilon", float, 1e-5)
    size = config.require("hidden_size", int)
    return LayerNorm(size, eps=eps, dtype=torch_dtype(vllm_config.model.dtype))


def shifted(x: Tensor, ring: Tensor, rows: Rows) -> Tensor:
    """x [R, L, H] one token later: [R, L, H]. `ring` [blocks, places, H] has the token before, and
    gets the last ones."""
    length = x.shape[1]
    wide = torch.cat([rows.load(ring)[:, None], x], dim=1)
    for token in range(max(0, length - ring.shape[1]), length):
        rows.store(ring, token, x[:, token])
    return wide[:, :-1]


def weighted_means(
    decay: Tensor, first: Tensor, k: Tensor, v: Tensor, ring: Tensor, rows: Rows
) -> Tensor:
    """Means [R, L, C] of values v [R, L, C], weighted by exp(k), which fades by `decay` [C] with
    each token, and by exp(k + first) for the token itself.

    `ring` [blocks, places, 3, C] has the sums of values and of weights, both over exp of the third.
    Only what a token needs of the one before goes token by token: the third, and the sums.
    """
    loaded = rows.load(ring)
    loaded[:, 2].masked_fill_((rows.starts == 0)[:, None], _NO_KEY)
    # A token's numbers lie side by side: [L, R, C].
    k, v = (x.transpose(0, 1).contiguous() for x in (k, v))
    states = k.new_empty(len(k) + 1, *loaded.shape)
    states[0] = loaded
    tops = states[:, :, 2]
    for before, key, after in zip(tops[:-1].unbind(), k.unbind(), tops[1:].unbind(), strict=True):
        torch.maximum(torch.add(before, decay, out=after), key, out=after)
    old = torch.exp(tops[:-1] + decay - tops[1:])[:, :, None]
    torch.exp(k - tops[1:], out=states[1:, :, 1])
    torch.mul(states[1:, :, 1], v, out=states[1:, :, 0])
    sums = states[:, :, :2]
    for before, fade, after in zip(
        sums[:-1].unbind(), old.unbind(), sums[1:].unbind(), strict=True
    ):
        after.addcmul_(fade, before)
    for token in range(max(0, len(k) - ring.shape[1]), len(k)):
        rows.store(ring, token, states[token + 1])
    values, weights, most = states[:-1].unbind(2)
    own = k + first
    top = torch.maximum(most, own)
    faded = torch.exp(most - top)
    new = torch.exp(own.sub_(top))
    return ((faded * values + new * v) / (faded * weights + new)).transpose(0, 1)


class TimeMixer(RecurrentMixer):
    """Base of the halves of a layer: shares `mixes` of a token and of the one before, by
    channel."""

    def __init__(self, *mixes: str, size: int, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__(prefix)
        dtype = torch_dtype(vllm_config.model.dtype)
        self.mixes = mixes
        for name in mixes:
            share = nn.Parameter(torch.empty(1, 1, size, dtype=dtype), requires_grad=False)
            self.register_parameter(f"time_mix_{name}", share)

    def mixed(self, x: Tensor) -> list[Tensor]:
        """x [T, H] -> the input [T, H] of each of `mixes`."""
        before = torch.zeros_like(x, dtype=torch.float32)
        for rows, (ring, *_) in self.steps():
            before[rows.tokens] = shifted(x[rows.tokens].float(), ring, rows)
        before = before.to(x.dtype)
        shares = [self.get_parameter(f"time_mix_{name}")[0] for name in self.mixes]
        return [x * share + before * (1 - share) for share in shares]


class RwkvAttention(TimeMixer):
    """x [T, H] -> [T, H]. The channels are this rank's."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        config = HFConfig(vllm_config.hf_config)
        size = config.require("hidden_size", int)
        inner = config.get("attention_hidden_size", int, size)
        super().__init__(
            "key", "value", "receptance", size=size, vllm_config=vllm_config, prefix=prefix
        )
        channels = Shard.even(inner, vllm_config.parallel, f"channels of {prefix}")
        self.time_decay = head_parameter(channels)
        self.time_first = head_parameter(channels)
        for name in self.mixes:
            self.add_module(
                name,
                ColumnParallelLinear(
                    size, inner, bias=False, vllm_config=vllm_config, prefix=join(prefix, name)
                ),
            )
        self.output = RowParallelLinear(
            inner, size, bias=False, vllm_config=vllm_config, prefix=join(prefix, "output")
        )
        self.inner_size = channels.size
        self.keep_states((size,), (3, channels.size), vllm_config=vllm_config)

    def forward(self, x: Tensor) -> Tensor:
        out = torch.empty(len(x), self.inner_size, dtype=torch.float32, device=x.device)
        self.run(x, out=out)
        result: Tensor = self.output(out.to(x.dtype))
        return result

    def compute(self, *inputs: Tensor, out: Tensor) -> None:
        mixed = zip(self.mixes, self.mixed(inputs[0]), strict=True)
        k, v, receptance = (self.get_submodule(name)(x).float() for name, x in mixed)
        out.zero_()
        decay = -torch.exp(self.time_decay)
        for rows, (_, states) in self.steps():
            at = rows.tokens
            out[at] = weighted_means(decay, self.time_first, k[at], v[at], states, rows)
        out.mul_(receptance.sigmoid_())


class RwkvFeedForward(TimeMixer):
    """x [T, H] -> [T, H]."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        config = HFConfig(vllm_config.hf_config)
        size = config.require("hidden_size", int)
        inner = config.get("intermediate_size", int, 4 * size)
        super().__init__("key", "receptance", size=size, vllm_config=vllm_config, prefix=prefix)
        self.key = ColumnParallelLinear(
            size, inner, bias=False, vllm_config=vllm_config, prefix=join(prefix, "key")
        )
        self.receptance = ReplicatedLinear(
            size, size, bias=False, vllm_config=vllm_config, prefix=join(prefix, "receptance")
        )
        self.value = RowParallelLinear(
            inner, size, bias=False, vllm_config=vllm_config, prefix=join(prefix, "value")
        )
        self.keep_states((size,), vllm_config=vllm_config)

    def forward(self, x: Tensor) -> Tensor:
        mixed = torch.empty(2, *x.shape, dtype=x.dtype, device=x.device)
        self.run(x, out=mixed)
        key, receptance = mixed.unbind()
        written: Tensor = self.value(self.key(key).relu().square())
        gated: Tensor = self.receptance(receptance).sigmoid() * written
        return gated

    def compute(self, *inputs: Tensor, out: Tensor) -> None:
        torch.stack(self.mixed(inputs[0]), out=out)


class RwkvBlock(nn.Module):
    """One layer: x [T, H] -> [T, H]. Deeper layers have smaller hidden states, half of them from
    every `rescale_every`-th on, which only the norms' epsilons tell."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str) -> None:
        super().__init__()
        config = HFConfig(vllm_config.hf_config)
        layer = layer_index(prefix)
        if layer == 0:
            self.pre_ln = layer_norm(config, vllm_config)
        self.ln1 = layer_norm(config, vllm_config)
        self.attention = RwkvAttention(vllm_config=vllm_config, prefix=join(prefix, "attention"))
        self.ln2 = layer_norm(config, vllm_config)
        self.feed_forward = RwkvFeedForward(
            vllm_config=vllm_config, prefix=join(prefix, "feed_forward")
        )
        every = config.get("rescale_every", int, 6)
        self.is_first = layer == 0
        self.scale = 0.5 ** (layer // every) if every > 0 else 1.0
        self.rescales = every > 0 and (layer + 1) % every == 0

    def forward(self, x: Tensor) -> Tensor:
        if self.is_first:
            x = self.pre_ln(x)
        x = x + self.scaled(self.attention(self.ln1(x)))
        x = x + self.scaled(self.feed_forward(self.ln2(x)))
        return x / 2 if self.rescales else x

    def scaled(self, x: Tensor) -> Tensor:
        return x if self.scale == 1 else x * self.scale


class RwkvModel(Decoder):
    """The embedding, the layers and the last norm."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__(vllm_config=vllm_config, prefix=prefix)
        config = HFConfig(vllm_config.hf_config)
        self.layers = make_layers(
            config.require("num_hidden_layers", int),
            lambda prefix: RwkvBlock(vllm_config=vllm_config, prefix=prefix),
            join(prefix, "layers"),
            vllm_config.parallel,
        )
        dtype = torch_dtype(vllm_config.model.dtype)
        size = config.require("hidden_size", int)
        # Its epsilon is torch's, whatever config.json says.
        self.norm = LayerNorm(size, dtype=dtype) if self.is_last else Absent()

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        *,
        inputs_embeds: Tensor | None = None,
        intermediate: IntermediateTensors | None = None,
    ) -> Tensor | IntermediateTensors:
        if intermediate is not None:
            x = intermediate["hidden_states"]
        else:
            x = self.embed_input_ids(input_ids) if inputs_embeds is None else inputs_embeds
        for layer in self.layers.owned:
            x = layer(x)
        return self.norm(x) if self.is_last else {"hidden_states": x}


class RwkvForCausalLM(CausalLM):
    """RWKV-4 with its language-modeling head."""

    renames = (
        (r"^rwkv\.", "model."),
        (r"^model\.embeddings\.", "model.embed_tokens."),
        (r"^model\.blocks\.", "model.layers."),
        (r"^model\.ln_out\.", "model.norm."),
        (r"^head\.", "lm_head."),
    )

    def make_decoder(self, prefix: str) -> RwkvModel:
        return RwkvModel(vllm_config=self.vllm_config, prefix=prefix)
