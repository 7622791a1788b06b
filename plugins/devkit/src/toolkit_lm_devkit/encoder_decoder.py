"""EncoderDecoderConformance: what every encoder-decoder model must do, shown through the whole
engine."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from toolkit_lm import LLM, SamplingParams
from toolkit_lm.errors import ConfigError, RequestError, UnsupportedError
from toolkit_lm.outputs import RequestOutput
from toolkit_lm.prompts import ExplicitEncoderDecoderPrompt
from torch import Tensor

from toolkit_lm_devkit.equality import assert_same_logits, assert_same_tokens
from toolkit_lm_devkit.forward import encoder_decoder_logits, load_checkpoint
from toolkit_lm_devkit.generation import Generated, Preemptions, logprobs_of
from toolkit_lm_devkit.model import BLOCK_SIZE, CHUNK, ModelConformance, Subject
from toolkit_lm_devkit.thread_ranks import run_ranks

EncoderDecoderReference = Callable[[Sequence[int], Sequence[int]], Tensor]
"""Token ids of the encoder, and of the decoder -> logits [T, V] at each of the decoder's."""


class EncoderDecoderConformance(ModelConformance):
    """Subclass it as `class TestMine(EncoderDecoderConformance)`, and write checkpoints in
    `make_checkpoint`, as of a ModelConformance.

    Its reference is an EncoderDecoderReference. The decoder start token must be in config.json.
    """

    lengths: ClassVar[Sequence[int]] = (3, 1, 9, 2, 24, 5, 1, 4)
    """Lengths of the decoder prompts."""
    encoder_lengths: ClassVar[Sequence[int]] = (17, 40, 1, 33, 5, 8, 21, 9)
    """Lengths of the encoder prompts."""
    pipeline_stages: ClassVar[int] = 1

    def make_checkpoint(self, folder: Path, **variant: Any) -> Any:
        """Writes a checkpoint with random float32 weights and a tokenizer (see `write_checkpoint`);
        returns the EncoderDecoderReference."""
        raise NotImplementedError(
            f"{type(self).__name__} must define make_checkpoint(folder, **variant)"
        )

    def both_prompts(self, subject: Subject) -> list[ExplicitEncoderDecoderPrompt]:
        """Random token ids, of the lengths in `encoder_lengths` and `lengths`. Decoder prompts
        begin with the decoder start token."""
        generator = torch.Generator().manual_seed(7)
        start = subject.checkpoint.hf_config["decoder_start_token_id"]
        vocab_size = subject.checkpoint.hf_config["vocab_size"]

        def draw(length: int) -> list[int]:
            drawn: list[int] = torch.randint(3, vocab_size, (length,), generator=generator).tolist()
            return drawn

        return [
            {
                "encoder_prompt": {"prompt_token_ids": draw(read)},
                "decoder_prompt": {"prompt_token_ids": [start, *draw(length - 1)]},
            }
            for read, length in zip(self.encoder_lengths, self.lengths, strict=True)
        ]

    def run(
        self, subject: Subject, params: SamplingParams | None = None, **options: Any
    ) -> tuple[list[RequestOutput], int]:
        """`both_prompts` through the engine, and how often requests were preempted."""
        counter = Preemptions()
        vocab_size = subject.checkpoint.hf_config["vocab_size"]
        greedy = SamplingParams(
            temperature=0, max_tokens=self.max_tokens, ignore_eos=True, logprobs=vocab_size
        )
        made = {
            "block_size": BLOCK_SIZE,
            "max_model_len": self.max_model_len,
            "num_kv_blocks": 1024,
            "max_logprobs": vocab_size,
        }
        with LLM(
            str(subject.folder), plugins=[counter], **made | dict(self.engine_options) | options
        ) as llm:
            outputs = llm.generate(self.both_prompts(subject), params or greedy, use_tqdm=False)
        return outputs, counter.count

    def generate_all(self, subject: Subject, **options: Any) -> Generated:
        outputs, preemptions = self.run(subject, **options)
        vocab_size = subject.checkpoint.hf_config["vocab_size"]
        answers = [output.outputs[0] for output in outputs]
        logprobs = [logprobs_of(answer, vocab_size) for answer in answers]
        return Generated([list(answer.token_ids) for answer in answers], logprobs, preemptions)

    def check(self, subject: Subject, **options: Any) -> int:
        """Greedy tokens and log probabilities are those of the reference. Returns how often
        requests were preempted."""
        vocab_size = subject.checkpoint.hf_config["vocab_size"]
        outputs, preemptions = self.run(subject, **options)
        for output in outputs:
            [completion] = output.outputs
            assert output.encoder_prompt_token_ids is not None
            with torch.inference_mode():
                reference: Any = subject.reference
                logits = reference(
                    output.encoder_prompt_token_ids,
                    [*output.prompt_token_ids, *completion.token_ids],
                ).float()
            expected = torch.log_softmax(logits[len(output.prompt_token_ids) - 1 : -1], dim=-1)
            assert_same_logits(logprobs_of(completion, vocab_size), expected)
            assert_same_tokens(completion.token_ids, expected)
        return preemptions

    # Parity

    def test_parity_of_mixed_lengths(
        self, subjects: Callable[[str], Subject], variant: str
    ) -> None:
        assert self.check(subjects(variant)) == 0

    def test_parity_chunked_and_preempted(
        self, subjects: Callable[[str], Subject], variant: str
    ) -> None:
        """The pool holds the longest sequence and not all; the decoder's prompts are computed in
        chunks."""
        subject = subjects(variant)
        longest = max(self.lengths) + self.max_tokens
        most_encoded = max(self.encoder_lengths)
        small = {
            "max_model_len": longest,
            "max_encoder_len": most_encoded,
            "max_num_batched_tokens": most_encoded + CHUNK,
        }
        # Size of the first pool; the others are made in proportion.
        least = self.kv_cache(subject).max_blocks(longest, most_encoded + CHUNK, most_encoded)[0]
        for mode in ("recompute", "swap"):
            options = small | {
                "num_kv_blocks": least + 1,
                "preemption_mode": mode,
                "swap_memory": "8MiB",
            }
            assert self.check(subject, max_num_seqs=len(self.lengths), **options) > 0, (
                "the pool was meant to be too small"
            )

    def test_parity_of_one_token_at_a_time(self, first: Subject) -> None:
        self.check(first, max_num_seqs=1, enable_prefix_caching=False)

    def test_sequences_share_what_the_encoder_made(self, first: Subject) -> None:
        """n sequences of a request, and requests that follow with the same encoder prompt, are
        those of requests alone."""
        alone, _ = self.run(first, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True))
        several, _ = self.run(
            first, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True, n=4)
        )
        with LLM(
            str(first.folder), **{"max_model_len": self.max_model_len} | dict(self.engine_options)
        ) as llm:
            prompts = self.both_prompts(first)
            again = [
                llm.generate(
                    prompts,
                    SamplingParams(temperature=0, max_tokens=6, ignore_eos=True),
                    use_tqdm=False,
                )
                for _ in range(2)
            ]
        for found in (several, *again):
            for result, other in zip(alone, found, strict=True):
                assert [c.token_ids for c in other.outputs] == [result.outputs[0].token_ids] * len(
                    other.outputs
                )

    def test_the_decoder_start_token_comes_first(self, first: Subject) -> None:
        start = first.checkpoint.hf_config["decoder_start_token_id"]
        with LLM(
            str(first.folder), **{"max_model_len": self.max_model_len} | dict(self.engine_options)
        ) as llm:
            params = SamplingParams(max_tokens=1)
            tokens = {"prompt_token_ids": [5, 6, 7]}
            asked: list[Any] = [tokens, {"encoder_prompt": tokens, "decoder_prompt": tokens}]
            alone: Any = {"decoder_prompt": tokens}
            default, explicit = llm.generate(asked, params, use_tqdm=False)
            with pytest.raises(RequestError, match="encoder_prompt"):
                llm.generate([alone], params, use_tqdm=False)
        assert default.encoder_prompt_token_ids == explicit.encoder_prompt_token_ids == [5, 6, 7]
        assert default.prompt_token_ids[0] == start
        assert explicit.prompt_token_ids == [start, 5, 6, 7]

    def test_pooling_without_a_cache(
        self, subjects: Callable[[str], Subject], variant: str
    ) -> None:
        """It is not converted into a pooling model, unless it has an encoder that is one."""
        subject = subjects(variant)
        with pytest.raises(ConfigError, match="encoder-decoder"):
            LLM(str(subject.folder), convert="classify", **self.engine_options)
        model_class = self.model_class(subject)
        if "encoder" in model_class.parts and model_class.embedder is None:
            with pytest.raises(UnsupportedError, match="no encoder that embeds"):
                LLM(str(subject.folder), convert="embed", **self.engine_options)

    def test_ranks_and_stages_compute_the_whole(self, first: Subject, ranks: int) -> None:
        """Ranks that each hold a shard give the logits of one rank."""
        tokens = torch.arange(3, 20), torch.arange(2, 11)

        def compute(rank: int, ranks: int) -> Tensor:
            model = load_checkpoint(
                self.model_class(first), first.folder, rank=rank, tensor_parallel_size=ranks
            )
            return encoder_decoder_logits(model, *tokens)

        expected = compute(0, 1)
        for rank, ours in enumerate(run_ranks(lambda rank: compute(rank, ranks), ranks)):
            assert (ours - expected).abs().max() <= 1e-4, (
                f"rank {rank} of {ranks} gives other logits than one alone"
            )
