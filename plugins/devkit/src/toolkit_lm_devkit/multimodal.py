"""MultimodalConformance: what every model that takes pictures or recordings must do, shown through
renderer and engine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

import numpy as np
import pytest
import torch
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import ToolkitError
from torch import Tensor

from toolkit_lm_devkit.conformance import Conformance
from toolkit_lm_devkit.generation import Preemptions


class MultimodalReference(Protocol):
    """A checkpoint, and what transformers makes of it."""

    folder: Path
    """Folder of the checkpoint, with all files that a renderer reads."""
    mark: str
    """Text of an item's placeholder."""
    model: Any
    """It is called with what `inputs` gives, and has then `logits` [1, T, V]."""

    def items(self, count: int, *, seed: int = 0) -> Sequence[Any]:
        """Items of mixed sizes, 2 to 30 tokens each."""

    def inputs(self, text: str, items: Sequence[Any]) -> dict[str, Tensor]:
        """Inputs that the reference's own processor makes of a prompt: `input_ids` [1, T], and the
        rest."""

    def greedy(self, text: str, items: Sequence[Any], count: int) -> tuple[list[int], list[int]]:
        """Tokens of a prompt, and the `count` tokens that the reference draws after it."""


class MultimodalConformance(Conformance):
    """Subclass it as `class TestMine(MultimodalConformance)` in a module with a fixture `reference`
    -> MultimodalReference."""

    modality: ClassVar[str]
    """Name of the modality in prompts: `image`, `audio`."""
    hidden_size: ClassVar[int] = 64
    """Size of an item's embeddings."""
    max_tokens: ClassVar[int] = 12
    engine_options: ClassVar[Mapping[str, Any]] = {
        "device": "cpu",
        "max_model_len": 192,
        "num_kv_blocks": 200,
        "max_num_seqs": 8,
    }
    texts: ClassVar[Sequence[str]] = (
        "What is in these?\n{0}\nand {0}, or\n\n{0} together? Say it.",
        "{0}What is this?",
        "Nothing but text in this one.",
        "user\n{0}{0}",
    )
    """With as many items as places."""

    def num_scarce_blocks(self, reference: MultimodalReference) -> int | None:
        """Blocks of 4 that hold the longest prompt of `test_preempted_prompts`, but not all of its
        prompts. None if no number does.

        The engine reserves room without regard to sliding windows, which do not fill it."""
        return 26

    # Data that the tests share

    @property
    def params(self) -> SamplingParams:
        return SamplingParams(temperature=0, max_tokens=self.max_tokens, ignore_eos=True)

    def engine(self, reference: MultimodalReference, **options: Any) -> LLM:
        return LLM(str(reference.folder), **dict(self.engine_options) | options)

    def prompt(self, text: str, items: Sequence[Any]) -> Any:
        return (
            {"prompt": text, "multi_modal_data": {self.modality: items}}
            if items
            else {"prompt": text}
        )

    def drawn(
        self, llm: LLM, prompts: Sequence[Any], params: SamplingParams | None = None
    ) -> list[list[int]]:
        outputs = llm.generate(prompts, params or self.params, use_tqdm=False)
        return [list(output.outputs[0].token_ids) for output in outputs]

    def check(
        self, llm: LLM, reference: MultimodalReference, asked: Sequence[tuple[str, Sequence[Any]]]
    ) -> list[int]:
        """The tokens of prompts, and those drawn, are the reference's. Returns how many tokens came
        from the prefix cache, of each."""
        outputs = llm.generate(
            [self.prompt(*arguments) for arguments in asked], self.params, use_tqdm=False
        )
        for output, (text, items) in zip(outputs, asked, strict=True):
            assert (output.prompt_token_ids, list(output.outputs[0].token_ids)) == reference.greedy(
                text, items, self.max_tokens
            )
        return [output.num_cached_tokens for output in outputs]

    # Parity

    @pytest.mark.parametrize(
        "options",
        [
            {},
            {"max_num_batched_tokens": 29},
            {"max_num_batched_tokens": 29, "enable_prefix_caching": False, "block_size": 8},
            {"block_size": 4},
        ],
        ids=["whole", "chunked", "chunked and uncached", "small blocks"],
    )
    def test_greedy_tokens(self, reference: MultimodalReference, options: dict[str, Any]) -> None:
        asked = []
        pool = list(reference.items(sum(text.count("{0}") for text in self.texts)))
        for text in self.texts:
            count = text.count("{0}")
            asked.append((text.format(reference.mark), pool[:count]))
            del pool[:count]
        with self.engine(reference, **options) as llm:
            self.check(llm, reference, asked)
            self.check(llm, reference, asked)  # again, from the prefix cache

    def test_a_prefix_that_ends_inside_an_item(self, reference: MultimodalReference) -> None:
        """Blocks of 8: what two prompts share ends inside their last item, or the item is not the
        same."""
        a, b = reference.items(2, seed=5)
        with self.engine(reference, num_kv_blocks=2000, block_size=8) as llm:
            for items, ending in (
                ([a, b], " x"),
                ([a, b], " y"),
                ([a, a], " x"),
                ([b, b], " x"),
                ([a, b], ""),
            ):
                for num_letters in (0, 2, 5):
                    text = f"{'p' * num_letters}{reference.mark} and {reference.mark}{ending}"
                    [num_cached] = self.check(llm, reference, [(text, items)])
                    if items[0] is a and ending in (" y", ""):
                        assert num_cached >= len(reference.greedy(text, items, 1)[0]) - 16

    def test_preempted_prompts(self, reference: MultimodalReference) -> None:
        """More prompts than blocks have room for, computed again where they are thrown out."""
        items = reference.items(8, seed=9)
        count = 30
        preemptions = Preemptions()
        asked = [
            (f"{i} {reference.mark} is? {'o' * i}{reference.mark}", items[2 * i : 2 * i + 2])
            for i in range(4)
        ]
        expected = [reference.greedy(*arguments, count)[1] for arguments in asked]
        scarce = self.num_scarce_blocks(reference)
        if scarce is None:
            pytest.skip("its sliding windows leave room for all of the prompts")
        options = {"num_kv_blocks": scarce, "max_model_len": 96, "block_size": 4}
        with self.engine(reference, plugins=[preemptions], **options) as llm:
            params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True)
            assert (
                self.drawn(llm, [self.prompt(*arguments) for arguments in asked], params)
                == expected
            )
        assert preemptions.count

    def test_in_a_process_of_its_own(self, reference: MultimodalReference) -> None:
        items = reference.items(2, seed=4)
        text = f"{reference.mark} or {reference.mark}?"
        with self.engine(reference, engine_process=True) as llm:
            for _ in range(2):  # again, without the items' data
                self.check(llm, reference, [(text, items)] * 2)

    def test_several_sequences_of_a_prompt(self, reference: MultimodalReference) -> None:
        items = reference.items(2, seed=8)
        text = f"{reference.mark}, {reference.mark}!"
        expected = reference.greedy(text, items, self.max_tokens)[1]
        nearly_greedy = SamplingParams(
            temperature=1e-6, n=3, max_tokens=self.max_tokens, ignore_eos=True, seed=0
        )
        with self.engine(reference, max_num_batched_tokens=25) as llm:
            [output] = llm.generate([self.prompt(text, items)], nearly_greedy, use_tqdm=False)
        assert [list(completion.token_ids) for completion in output.outputs] == [expected] * 3

    def test_logprobs_of_prompts(self, reference: MultimodalReference) -> None:
        """At every token, those of items too: in steps that end anywhere."""
        items = reference.items(2, seed=6)
        params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=0)
        text = f"first {reference.mark} then {reference.mark} and the rest of it"
        inputs = reference.inputs(text, items)
        with torch.inference_mode():
            logprobs = reference.model(**inputs).logits[0].log_softmax(-1)
        tokens = inputs["input_ids"][0]
        expected = logprobs[:-1].gather(1, tokens[1:, None])[:, 0].tolist()
        for budget in (1024, 23):
            with self.engine(reference, max_num_batched_tokens=budget) as llm:
                found = llm.generate([self.prompt(text, items)], params, use_tqdm=False)[
                    0
                ].prompt_logprobs
            assert found is not None
            of_tokens = [
                dict(computed)[token].logprob
                for computed, token in zip(found[1:], tokens[1:].tolist(), strict=True)
                if computed is not None
            ]
            assert of_tokens == pytest.approx(expected, abs=1e-3)

    # Refusals: the engine goes on

    def test_what_does_not_fit_is_refused(self, reference: MultimodalReference) -> None:
        """Too few items, embeddings of a wrong shape, a modality that the model does not take;
        placeholders without an item."""
        text = f"{reference.mark}{reference.mark}"
        wrong_shape = [np.zeros((3, self.hidden_size - 1), np.float32)] * 2
        refused: list[tuple[dict[str, Any], str]] = [
            ({self.modality: reference.items(1)}, "placeholders"),
            ({self.modality: wrong_shape}, rf"{self.modality} 1: .*{self.hidden_size}\]"),
            ({"smell": [b"?", b"?"]}, "takes no smell"),
            ({self.modality: []}, f"2 placeholders of modality '{self.modality}'"),
            ({}, f"2 placeholders of modality '{self.modality}'"),
        ]
        with self.engine(reference) as llm:
            for data, message in refused:
                with pytest.raises(ToolkitError, match=message):
                    llm.generate(
                        [{"prompt": text, "multi_modal_data": data}], self.params, use_tqdm=False
                    )
            self.check(llm, reference, [(text, reference.items(2))])
