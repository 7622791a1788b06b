"""AttentionBackendConformance: what every attention backend must do."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import msgspec
import torch
from toolkit_lm.attention import AttentionBackend, AttentionSpec, AttentionType
from toolkit_lm.kv import FullSpec, KVCacheSpec, WindowSpec

from toolkit_lm_devkit.attention_step import BIASES, CACHES, LAYER, AttentionStep
from toolkit_lm_devkit.conformance import Conformance
from toolkit_lm_devkit.equality import assert_bf16_error
from toolkit_lm_devkit.pairs import Case, all_pairs

BATCHES = {
    "decode": [(1, 23), (1, 1), (1, 40), (1, 16), (1, 17)],
    "uneven": [(1, 3), (1, 150), (1, 70)],
    "prefill": [(19, 19), (1, 1), (33, 33)],
    "chunks": [(7, 20), (16, 48), (2, 30)],
    "mixed": [(1, 20), (18, 18), (5, 29), (1, 35), (1, 1), (9, 16)],
}
"""Rows of (queries, keys)."""
UNSEEN = [(32, 4), (7, 7), (32, 32), (32, 19), (9, 1), (32, 32)]
TOLERANCE = 1e-5
"""Most difference of outputs in float32, for values of unit variance."""
FACTORS: Mapping[str, list[Any]] = {
    "kind": ["decoder", "uncached", "encoder", "cross"],
    "batch": list(BATCHES),
    "dtype": ["float32", "bfloat16", "float16"],
    "heads": [(4, 4), (6, 2), (4, 1)],
    "head_size": [16, 64, 80, 128],
    "block_size": [1, 16, 17, 32],
    "window": [None, 1, 8],
    "soft_cap": [None, 2.0],
    "scale": [None, 0.03],
    "sinks": [False, True],
    "bias": [None, *BIASES],
    "spans": [False, True],
    "cache": [None, *CACHES],
}


class _StrangeSpec(KVCacheSpec, frozen=True, kw_only=True, tag="strange"):
    @property
    def page_bytes(self) -> int:
        return 64


class AttentionBackendConformance(Conformance):
    """Subclass it as `class TestMine(AttentionBackendConformance)` and name `backend`.

    Layers of all types, shapes, dtypes and features that the backend does not refuse are run, in
    batches of all kinds, and compared with the formula in float64: in float32 within 1e-5, in half
    precision with an error that is at most 1.5 times that of transformers' eager attention.
    Whatever is in a cache slot that no query sees is NaN, so that a read of it shows.
    """

    backend: ClassVar[type[AttentionBackend]]
    device: ClassVar[str] = "cpu"
    factors: ClassVar[Mapping[str, list[Any]]] = FACTORS
    """The values that cases are made of. A subclass may add sizes of its own."""

    @classmethod
    def step(
        cls, kind: str = "decoder", batch: str = "mixed", dtype: str = "float32", **fields: Any
    ) -> AttentionStep:
        """The step of a case; `fields` are those of AttentionStep."""
        rows = BATCHES[batch]
        if kind in ("uncached", "encoder"):
            rows = [(keys, keys) for _, keys in rows]
        return AttentionStep(
            cls.backend,
            rows,
            type=AttentionType.DECODER if kind == "uncached" else AttentionType(kind),
            cached=kind in ("decoder", "cross"),
            dtype=getattr(torch, dtype),
            device=cls.device,
            **fields,
        )

    @classmethod
    def spec(cls, case: Case) -> AttentionSpec:
        """Spec of a case's layer."""
        kind = case["kind"]
        return AttentionSpec(
            layer=LAYER,
            type=AttentionType.DECODER if kind == "uncached" else AttentionType(kind),
            num_heads=case["heads"][0],
            num_kv_heads=case["heads"][1],
            head_size=case["head_size"],
            dtype=case["dtype"],
            device=torch.device(cls.device).type,
            kv_cache=cls.kv_cache(case) if kind in ("decoder", "cross") else None,
            window=case["window"],
            soft_cap=case["soft_cap"],
            sinks=case["sinks"],
            bias=case["bias"] is not None,
            spans=case["spans"],
        )

    @classmethod
    def kv_cache(cls, case: Case) -> KVCacheSpec:
        """KV cache spec of a case's layer."""
        shape = {
            "block_size": case["block_size"],
            "num_kv_heads": case["heads"][1],
            "head_size": case["head_size"],
            "dtype": case["dtype"],
        }
        if case["cache"] is not None:
            shape |= CACHES[case["cache"]]
        return (
            FullSpec(**shape)
            if case["window"] is None
            else WindowSpec(window=case["window"], **shape)
        )

    @classmethod
    def runs(cls, case: Case) -> bool:
        """Whether the case makes sense, and the backend can run it."""
        # Windows and biases relate positions of one sequence, and cross attention has two.
        if case["kind"] == "cross" and (case["window"] or case["bias"]):
            return False
        if case["cache"] and case["kind"] not in ("decoder", "cross"):
            return False
        # The spans of a decoder.
        if case["spans"] and case["kind"] not in ("decoder", "uncached"):
            return False
        return cls.backend.refuses(cls.spec(case)) is None

    @classmethod
    def parameters(cls) -> Mapping[str, Mapping[str, Any]]:
        cases = all_pairs(cls.factors, cls.runs) if hasattr(cls, "backend") else []
        values = {
            f"{name}={value}": (name, value)
            for name, values in cls.factors.items()
            for value in values
        }
        return {
            "case": {" ".join(str(v) for v in case.values()): case for case in cases},
            "changed": values,
        }

    def test_equals_the_formula(self, case: Case) -> None:
        step = self.step(**case)
        ours = step.run()
        exact = torch.from_numpy(step.naive())
        assert ours.isfinite().all(), "a slot that no query sees leaks into the output"
        if step.dtype is torch.float32:
            assert (ours - exact).abs().max() <= TOLERANCE
        else:
            assert_bf16_error([ours], [step.eager()], [exact])

    def test_padding_is_not_stored(self) -> None:
        """Padding rows do not change the results of others either."""
        for batch in BATCHES:
            plain, padded = (self.step(batch=batch, padding=padding) for padding in (0, 3))
            if (
                self.backend.refuses(
                    plain.layer.attention_spec(torch.device(self.device), cached=True)
                )
                is None
            ):
                expected, before = plain.run_and_keep()
                out, after = padded.run_and_keep()
                assert before is not None and after is not None
                for tensor, other in zip(before, after, strict=True):
                    assert torch.equal(tensor.view(torch.uint8), other.view(torch.uint8)), (
                        "padding is stored"
                    )
                assert (out - expected).abs().max() <= TOLERANCE, (
                    "padding changes what other rows give"
                )

    def test_encoder_of_tokens_that_are_not_seen(self) -> None:
        asked: list[dict[str, Any]] = [
            {},
            {"window": 8},
            {"bias": "table"},
            {"window": 8, "bias": "alibi"},
            {"soft_cap": 2.0},
        ]
        for features in asked:
            step = AttentionStep(
                self.backend,
                UNSEEN,
                type=AttentionType.ENCODER,
                cached=False,
                device=self.device,
                **features,
            )
            if (
                self.backend.refuses(
                    step.layer.attention_spec(torch.device(self.device), cached=False)
                )
                is None
            ):
                assert (step.run() - torch.from_numpy(step.naive())).abs().max() <= TOLERANCE, (
                    features
                )

    def test_runs_some_layers(self) -> None:
        assert self.parameters()["case"], (
            f"{self.backend.__name__} refuses every layer on {self.device}"
        )

    def test_refuses_with_a_reason(self, changed: tuple[str, Any]) -> None:
        name, value = changed
        case = {factor: values[0] for factor, values in self.factors.items()} | {name: value}
        refusal = self.backend.refuses(self.spec(case))
        assert refusal is None or (isinstance(refusal, str) and refusal.strip())
        assert refusal == self.backend.refuses(self.spec(case))

    def test_refuses_what_it_does_not_know(self) -> None:
        plain = self.spec({factor: values[0] for factor, values in self.factors.items()})
        assert self.backend.refuses(msgspec.structs.replace(plain, dtype="int3")), (
            "a dtype that does not exist is not refused"
        )
        sideways: Any = "sideways"
        assert self.backend.refuses(msgspec.structs.replace(plain, type=sideways)), (
            "an attention type that does not exist is not refused"
        )
        strange = msgspec.structs.replace(plain, kv_cache=_StrangeSpec(block_size=16))
        assert self.backend.refuses(strange), (
            "a cache of a kind that the backend cannot know is not refused"
        )

    def test_page_layout_fills_the_page(self) -> None:
        for case in self.parameters()["case"].values():
            spec = self.spec(case).kv_cache
            if spec is not None:
                layout = [
                    torch.empty(tensor.shape, dtype=getattr(torch, tensor.dtype), device="meta")
                    for tensor in self.backend.page_layout(spec)
                ]
                assert sum(tensor.nbytes for tensor in layout) == spec.page_bytes, (
                    "the tensors of a page are not its bytes"
                )
