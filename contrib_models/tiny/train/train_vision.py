"""Train the tiny vision-chat model from scratch on drawings, save it in bfloat16 and judge it.

Usage: ``python train/train_vision.py --out DIR --minutes 40``

The exit status is 1 when the saved model answers fewer than 90% of the questions about held-out
drawings right.
"""

from __future__ import annotations

import argparse
import math
import sys
import time
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from random import Random

import torch
from judge_vision import BAR, judge_checkpoint
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from toolkit_lm_tiny.drawing_questions import ask, ask_blind, ask_pair
from toolkit_lm_tiny.drawings import Drawing, draw
from torch import Tensor, nn
from torch.nn.functional import cross_entropy
from transformers import (
    CLIPImageProcessorPil,
    CLIPVisionConfig,
    GenerationConfig,
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    LlavaProcessor,
    PreTrainedTokenizerFast,
)
from vision_rows import (
    BOS,
    CHAT_TEMPLATE,
    END,
    IGNORED,
    IMAGE,
    LOOKS,
    MIX,
    MIX_WEIGHTS,
    NUM_PATCHES,
    PAD,
    PATCH,
    SIDE,
    START,
    SYSTEM,
    Rows,
    collate,
    looks,
    pictures,
)

VOCABULARY = 512
CONTEXT = 1024
BATCH = 16
PEAK_RATE = 2e-3
WARMUP = 0.02
WEIGHT_DECAY = 0.01
# The tower first learns alone to say what is at which patch, until it knows most kinds or for a
# share of the time. A head for it, which is not saved, goes on beside the chats.
ALONE = 0.4
ENOUGH = 0.95
LOOK_WEIGHT = 0.3
NOTHING_WEIGHT = 0.2
NOISE = 0.05
SAVE_EVERY = 1.0


def train_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Byte-level BPE over the texts of questions and answers: most words are one token each."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = [PAD, BOS, START, END, IMAGE]
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY,
        special_tokens=special,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(_texts(Random(seed), 20_000), trainer)
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=END,
        pad_token=PAD,
        additional_special_tokens=[START, IMAGE],
        chat_template=CHAT_TEMPLATE,
        clean_up_tokenization_spaces=False,
        model_max_length=CONTEXT,
    )


def _texts(random: Random, count: int) -> Iterator[str]:
    yield from ("user\n", "assistant\n", "system\n", *SYSTEM)
    for _ in range(count):
        first = draw(random)
        second = draw(random)
        for question in (
            ask(random, first),
            ask_pair(random, first, second),
            ask_blind(random, first),
        ):
            yield question.text
            yield question.answer


def make_processor(tokenizer: PreTrainedTokenizerFast) -> LlavaProcessor:
    """Pictures of any shape become squares; none of a picture is cut off."""
    side = {"height": SIDE, "width": SIDE}
    images = CLIPImageProcessorPil(
        size=side, crop_size=side, image_mean=[0.5] * 3, image_std=[0.5] * 3
    )
    return LlavaProcessor(
        images,
        tokenizer,
        patch_size=PATCH,
        vision_feature_select_strategy="default",
        num_additional_image_tokens=1,
        chat_template=CHAT_TEMPLATE,
    )


def make_model(tokenizer: PreTrainedTokenizerFast) -> LlavaForConditionalGeneration:
    """The untrained model."""
    vision = CLIPVisionConfig(
        hidden_size=128,
        intermediate_size=256,
        projection_dim=128,
        num_hidden_layers=3,
        num_attention_heads=4,
        image_size=SIDE,
        patch_size=PATCH,
    )
    text = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=128,
        intermediate_size=256,
        num_hidden_layers=3,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        max_position_embeddings=CONTEXT,
        rms_norm_eps=1e-5,
        initializer_range=0.05,
        tie_word_embeddings=True,
        rope_parameters={"rope_type": "default", "rope_theta": 10000.0},
        bos_token_id=tokenizer.bos_token_id,
        eos_token_id=tokenizer.eos_token_id,
        pad_token_id=tokenizer.pad_token_id,
    )
    model = LlavaForConditionalGeneration(
        LlavaConfig(
            vision_config=vision,
            text_config=text,
            image_token_index=tokenizer.convert_tokens_to_ids(IMAGE),
            image_seq_length=NUM_PATCHES,
            vision_feature_layer=-1,
            tie_word_embeddings=True,
        )
    )
    start_tower(model.model.vision_tower.embeddings)
    return model


@torch.no_grad()
def start_tower(embeddings: nn.Module) -> None:
    """Begin with waves, not with noise: a tower then learns in minutes what shapes are.

    Of a patch, the low frequencies of its brightness and colours, those that edges have little of
    made larger. Of its place, those of rows and columns.
    """
    patches = embeddings.patch_embedding.weight
    positions = embeddings.position_embedding.weight
    place = torch.arange(PATCH) + 0.5
    waves = torch.stack(
        [
            torch.cos(math.pi * place * i / PATCH) * math.sqrt((1 + (i > 0)) / PATCH)
            for i in range(PATCH)
        ]
    )
    order = sorted(
        ((i, j) for i in range(PATCH) for j in range(PATCH)), key=lambda pair: (sum(pair), pair)
    )
    colours = nn.functional.normalize(torch.tensor([[1.0, 1, 1], [1, -1, 0], [1, 1, -2]]))
    shares = [len(patches) // 2, len(patches) // 4, len(patches) // 4]
    chosen = [
        (colour, pair)
        for colour, share in zip(colours, shares, strict=True)
        for pair in order[:share]
    ]
    for weight, (colour, (i, j)) in zip(patches, chosen, strict=True):
        weight.copy_(
            colour[:, None, None]
            * torch.outer(waves[i], waves[j])
            * (0.25 if i + j == 0 else 0.4 * (i + j))
        )
    across = SIDE // PATCH
    width = positions.shape[1] // 4
    rows, columns = torch.meshgrid(torch.arange(across), torch.arange(across), indexing="ij")
    angles = [
        axis.flatten()[:, None] / 10 ** (torch.arange(width) / width) for axis in (rows, columns)
    ]
    positions[1:] = 0.3 * torch.cat(
        [wave(angle) for angle in angles for wave in (torch.sin, torch.cos)], -1
    )


class Trainer:
    """One run: the model, what it sees, and where it is saved."""

    def __init__(self, seed: int, out: Path, begin: Path | None = None) -> None:
        """`begin`: a checkpoint to go on from."""
        self.out = out
        self.tokenizer = (
            train_tokenizer(seed)
            if begin is None
            else PreTrainedTokenizerFast.from_pretrained(begin)
        )
        self.processor = make_processor(self.tokenizer)
        self.model = make_model(self.tokenizer)
        if begin is not None:
            for name in ("is_local", "local_files_only"):  # what reading it leaves there
                self.tokenizer.init_kwargs.pop(name, None)
            self.model.load_state_dict(
                LlavaForConditionalGeneration.from_pretrained(
                    begin, dtype=torch.float32
                ).state_dict()
            )
        self.look_head = nn.Linear(self.model.config.text_config.hidden_size, sum(LOOKS))
        encode = lru_cache(maxsize=50_000)(
            lambda text: self.tokenizer.encode(text, add_special_tokens=False)
        )
        self.rows = Rows(encode, self.model.config.image_token_id, seed)
        self._random = Random(seed)
        parameters = [*self.model.parameters(), *self.look_head.parameters()]
        self._optimizer = torch.optim.AdamW(
            parameters, lr=PEAK_RATE, weight_decay=WEIGHT_DECAY, betas=(0.9, 0.98)
        )
        self._means = dict.fromkeys(("looks", "kinds", "loss", "exact"), math.nan)
        self._start = time.process_time()
        self._saved = 0.0
        self._steps = 0
        self._weights = [
            torch.tensor([NOTHING_WEIGHT] + [1.0] * (classes - 1)) for classes in LOOKS
        ]

    def run(self, minutes: float, rate: float, alone_share: float = ALONE) -> None:
        """Train for `minutes` minutes of processor time; save now and then."""
        done = 0.0
        while done < alone_share and not self._means["kinds"] > ENOUGH:
            done = self._step(self.vision_loss, rate * min(1.0, done / WARMUP), minutes)
        alone = done
        print(f"the tower alone: {done:.0%} of the time", flush=True)
        while done < 1:
            part = (done - alone) / (1 - alone)
            done = self._step(
                self.chat_loss,
                rate * min(1.0, part / WARMUP, 0.5 * (1 + math.cos(math.pi * part))),
                minutes,
            )
        self.save()
        print(f"trained {self._steps} steps", flush=True)

    def fit_head(self, steps: int = 150) -> None:
        """Learn the head anew, for a tower that knows already."""
        optimizer = torch.optim.AdamW(self.look_head.parameters(), lr=1e-2)
        for _ in range(steps):
            loss, figures = self.vision_loss()
            self.look_head.zero_grad()
            loss.backward()  # type: ignore[no-untyped-call]
            optimizer.step()
        print(f"the head: {figures}", flush=True)

    def _step(
        self, loss_of: Callable[[], tuple[Tensor, dict[str, float]]], rate: float, minutes: float
    ) -> float:
        """One step of the optimizer; gives the share of the time that is gone."""
        for group in self._optimizer.param_groups:
            group["lr"] = rate
        loss, figures = loss_of()
        self._optimizer.zero_grad(set_to_none=True)
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(self._optimizer.param_groups[0]["params"], 1.0)
        self._optimizer.step()
        for name, value in figures.items():
            mean = self._means[name]
            self._means[name] = value if math.isnan(mean) else 0.97 * mean + 0.03 * value
        now = (time.process_time() - self._start) / 60
        if self._steps % 50 == 0:
            means = "  ".join(f"{name} {value:.4f}" for name, value in self._means.items())
            print(f"step {self._steps}  {now:.2f} min  {means}", flush=True)
        self._steps += 1
        if now - self._saved > SAVE_EVERY:
            self.save()
            self._saved = now
        return now / minutes

    def vision_loss(self) -> tuple[Tensor, dict[str, float]]:
        """Loss of the tower and the projector alone."""
        drawings = [self.rows.scatter() for _ in range(2 * BATCH)]
        pixels = self.preprocess(drawings)
        features = torch.stack(
            list(self.model.get_image_features(pixels, return_dict=True).pooler_output)
        )
        return self.look_loss(features, drawings)

    def chat_loss(self) -> tuple[Tensor, dict[str, float]]:
        """Loss of the answers, and of the kinds and colours at each patch."""
        rows = self.rows.make(self._random.choices(MIX, MIX_WEIGHTS)[0], BATCH)
        drawings = [drawing for row in rows for drawing in row.drawings]
        batch = collate(rows, self.tokenizer.pad_token_id)
        labels = batch.pop("labels")[:, 1:]
        outputs = self.model.model(**batch, pixel_values=self.preprocess(drawings), use_cache=False)
        learned = labels != IGNORED
        logits = self.model.lm_head(outputs.last_hidden_state[:, :-1][learned])
        loss = cross_entropy(logits, labels[learned])
        around, figures = self.look_loss(
            outputs.image_hidden_states.view(len(drawings), NUM_PATCHES, -1), drawings
        )
        exact = share_exact(
            logits.argmax(-1) == labels[learned], labels[learned] == self.tokenizer.eos_token_id
        )
        return loss + LOOK_WEIGHT * around, {**figures, "loss": loss.item(), "exact": exact}

    def preprocess(self, drawings: list[Drawing]) -> Tensor:
        """Preprocess like the processor, and add a little noise."""
        pixels = self.processor.image_processor(
            pictures(drawings), return_tensors="pt"
        ).pixel_values
        return pixels + NOISE * torch.randn_like(pixels)

    def look_loss(
        self, features: Tensor, drawings: list[Drawing]
    ) -> tuple[Tensor, dict[str, float]]:
        """Loss of the kinds and colours at each patch, and how many kinds are right at the centres
        of shapes."""
        logits = self.look_head(features).flatten(0, 1).split(LOOKS, -1)
        wanted = looks(drawings).flatten(0, 1).unbind(-1)
        loss = sum(
            cross_entropy(*pair, weight)
            for *pair, weight in zip(logits, wanted, self._weights, strict=True)
        )
        kinds = (logits[0].argmax(-1) == wanted[0])[wanted[2] == 1]
        return loss, {"looks": loss.item(), "kinds": kinds.float().mean().item()}

    def save(self) -> None:
        """Write a copy in bfloat16."""
        names = ("bos_token_id", "eos_token_id", "pad_token_id")
        copy = make_model(self.tokenizer)
        copy.load_state_dict(self.model.state_dict())
        copy.generation_config = GenerationConfig(
            **{name: getattr(self.tokenizer, name) for name in names}
        )
        copy.to(torch.bfloat16).save_pretrained(self.out)
        self.processor.save_pretrained(self.out)
        self.processor.image_processor.save_pretrained(
            self.out
        )  # a file of its own, where most programs look for it


def share_exact(right: Tensor, is_end: Tensor) -> float:
    """The share of answers that have every token right, each given the ones before: what greedy
    decoding would have right."""
    answer = torch.cumsum(is_end, 0) - is_end.long()
    wrong = torch.zeros(int(is_end.sum())).index_add_(0, answer, (~right).float())
    return float((wrong == 0).float().mean())


def main() -> int:
    """Train, save and judge; fail under the bar."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for the checkpoint")
    parser.add_argument("--minutes", type=float, default=40.0, help="of processor time")
    parser.add_argument(
        "--begin", type=Path, help="go on from this checkpoint, whose tower knows already"
    )
    parser.add_argument("--rate", type=float, default=PEAK_RATE, help="the highest learning rate")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_flush_denormal(True)
    torch.manual_seed(options.seed)
    trainer = Trainer(options.seed, options.out, options.begin)
    print(
        f"{trainer.model.num_parameters():,} parameters, {len(trainer.tokenizer)} tokens",
        flush=True,
    )
    if options.begin is None:
        trainer.run(options.minutes, options.rate)
    else:
        trainer.fit_head()
        trainer.run(options.minutes, options.rate, alone_share=0.0)
    return int(judge_checkpoint(options.out, 1000).accuracy < BAR)


if __name__ == "__main__":
    sys.exit(main())
