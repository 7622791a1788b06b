"""How `coverage.py` builds, runs and compares the classes of each mapping of transformers."""

from __future__ import annotations

import copy
import itertools
import json
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import torch
from coverage_reasons import brief
from huggingface_hub.errors import StrictDataclassError
from toolkit_lm import LLM, PoolingParams, SamplingParams
from toolkit_lm_devkit import assert_same_logits, assert_same_tokens
from toolkit_lm_devkit.generation import logprobs_of
from transformers.models.auto import modeling_auto as auto

sys.path.append(str(Path(__file__).with_name("recipes")))
import audio
import image_text as images
import tiny_models as recipes
from given_pictures import FIRST_SPECIAL, Given

MAPPINGS = {
    "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "image-text": auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
    "encoder-decoder": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    "masked": {
        model_type: name
        for model_type, name in auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES.items()
        if name not in auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES.values()
    },
    "embedding": auto.MODEL_FOR_TEXT_ENCODING_MAPPING_NAMES,
    "classification": auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "speech": auto.MODEL_FOR_SPEECH_SEQ_2_SEQ_MAPPING_NAMES,
    "CTC": auto.MODEL_FOR_CTC_MAPPING_NAMES,
    # transformers lists them in no mapping of a task.
    "retrieval": {
        "colmodernvbert": "ColModernVBertForRetrieval",
        "colpali": "ColPaliForRetrieval",
        "colqwen2": "ColQwen2ForRetrieval",
    },
}
CHANGES: Mapping[str, Mapping[str, Any]] = {
    # Tokens that a checkpoint forces are not the model's.
    "encoder-decoder": {
        "decoder_start_token_id": 3,
        "forced_bos_token_id": None,
        "forced_eos_token_id": None,
    },
    "classification": {
        "num_labels": 3,
        "decoder_start_token_id": 3,
        # MPNet takes token 1 for padding, whatever its config says.
        "bos_token_id": 1,
        "eos_token_id": 0,
    },
}
"""Fields of config.json, by mapping."""
LENGTHS = (5, 17, 33, 3, 1)
SHORTEST = {"funnel": 5}
"""Tokens of the shortest prompts that code of transformers runs, where one token is too few."""
MAX_TOKENS = 8
OPTIONS: Mapping[str, Any] = {
    "dtype": "float32",
    "renderer": "tokens",
    "max_model_len": 64,
    "max_num_seqs": 8,
}
STEPS: Mapping[str, Any] = {"max_num_batched_tokens": 12, "block_size": 4, "num_kv_blocks": 200}
"""Options of engines that generate: prompts come in chunks."""
MOST_TOKENS = 64
"""Of a picture in these steps."""
WIDE: Mapping[str, Any] = {"max_num_batched_tokens": 192, "max_model_len": 448}
"""Options of engines whose pictures have more."""
TOLERANCE = 1e-4
"""Most difference of a hidden state, as a share of the largest one where that is above 1."""


NOT_BUILT = (
    *(ArithmeticError, AssertionError, AttributeError, ImportError, LookupError, RuntimeError),
    *(TypeError, ValueError, StrictDataclassError),
)
"""Errors of transformers, and of the recipes, where they make no model of a config."""


class UnbuiltError(Exception):
    """The recipes make no request that a class could be compared by."""


class Case(NamedTuple):
    """A class of transformers, by the mapping that names it."""

    mapping: str
    model_type: str
    architecture: str

    @property
    def key(self) -> str:
        return f"{self.mapping}/{self.model_type}/{self.architecture}"


def prompts() -> list[list[int]]:
    generator = torch.Generator().manual_seed(7)
    return [
        torch.randint(3, recipes.VOCAB_SIZE, (length,), generator=generator).tolist()
        for length in LENGTHS
    ]


class Run:
    """How the classes of a mapping are compared."""

    note = ""
    """What an equal class was not compared by."""

    def save(self, case: Case, folder: Path) -> Any:
        """Writes a checkpoint, and returns the model of transformers. Where its parts have configs
        of their own that are large by default, they are made small one by one."""
        changes = CHANGES.get(case.mapping, {})
        options = {"architecture": case.architecture}
        try:
            return recipes.save(
                case.model_type, folder, decodes=case.mapping == "causal", **options, **changes
            )
        except NOT_BUILT:
            config = audio.tiny_config(case.model_type)
            for name, value in changes.items():
                setattr(config, name, value)
            return recipes.save(case.model_type, folder, config=config, **options)


class Generation(Run):
    """Classes that continue prompts."""

    options: Mapping[str, Any] = STEPS
    allowed: list[int] | None = None
    """Tokens that an output may have; None: all."""

    def plain(self, model: Any) -> None:
        """Raises what transformers raises where it cannot run it."""
        self.logits(model, 1, [5, 6, 7])

    @torch.inference_mode()
    def logits(self, model: Any, index: int, tokens: list[int]) -> torch.Tensor:
        """[T, V] of the prompt `index` and what follows it, by transformers alone."""
        found: torch.Tensor = model(torch.tensor([tokens]), use_cache=False).logits[0].float()
        return found

    def request(self, prompt: list[int]) -> Any:
        return {"prompt_token_ids": prompt}

    def engine(self, folder: Path) -> list[Any]:
        params = SamplingParams(
            temperature=0,
            max_tokens=MAX_TOKENS,
            ignore_eos=True,
            logprobs=recipes.VOCAB_SIZE,
            allowed_token_ids=self.allowed,
        )
        # Tokens that a checkpoint forces or forbids are not the model's.
        options = {"max_logprobs": recipes.VOCAB_SIZE, "generation_config": "none"}
        with LLM(str(folder), **{**options, **OPTIONS, **self.options}) as llm:
            outputs = llm.generate(
                [self.request(prompt) for prompt in prompts()], params, use_tqdm=False
            )
        return list(outputs)

    def compare(self, model: Any, ours: list[Any]) -> None:
        for index, (prompt, output) in enumerate(zip(prompts(), ours, strict=True)):
            (completion,) = output.outputs
            tokens = list(completion.token_ids)
            start = self.start(prompt, output)
            places = slice(len(start) - 1, -1)
            reference = self.logits(model, index, start + tokens)[places].log_softmax(dim=-1)
            found = logprobs_of(completion, recipes.VOCAB_SIZE)
            try:
                assert_same_logits(found, reference)
            except AssertionError as error:
                reference = self.exact(model, index, start + tokens, error)[places].log_softmax(-1)
                assert_same_logits(found, reference)
            if self.allowed is not None:
                reference = reference[:, self.allowed]
            assert_same_tokens(tokens, reference)

    def exact(
        self, model: Any, index: int, tokens: list[int], error: AssertionError
    ) -> torch.Tensor:
        """`logits` computed in float64: what float32 rounds may be the difference. Raises `error`
        where transformers cannot compute so."""
        double = copy.deepcopy(model).double()
        # Others have no products in float64.
        double.set_experts_implementation("eager")
        try:
            return self.logits(double, index, tokens)
        except NOT_BUILT:
            raise error from None

    def start(self, prompt: list[int], output: Any) -> list[int]:
        """The decoder's tokens before its first output."""
        return list(output.prompt_token_ids)


class ImageText(Generation):
    """Classes that read pictures: each prompt has one, two of them two, and the first none. The
    encoder of one that has an encoder reads a picture at most."""

    options = {
        **STEPS,
        "max_num_batched_tokens": 96,
        "max_model_len": 256,
        "renderer": "given_pictures",
        "plugins": [Given()],
    }
    """A step takes a picture whole."""
    allowed = list(range(FIRST_SPECIAL))
    """No tokens of pictures, for which there would be none."""
    modality = "image"

    def save(self, case: Case, folder: Path) -> Any:
        config = images.tiny_config(case.model_type)
        model = recipes.save(case.model_type, folder, architecture=case.architecture, config=config)
        self.encodes = bool(getattr(model.config, "is_encoder_decoder", False))
        self.pictures = []
        self.token = FIRST_SPECIAL
        self.note = ""
        self.missing = ""
        try:
            images.logits(model, torch.tensor([5, 6, 7]), [])
            self.token = images.image_token(model.config.to_dict())
            self.pictures = [images.picture(model, seed) for seed in range(2)]
        except NOT_BUILT as error:
            # Some are listed as models of text, too. Others may be refused, whatever they read.
            if case.architecture not in MAPPINGS["causal"].values():
                self.missing = brief(error)
                (folder / "preprocessor_config.json").write_text("{}", encoding="utf-8")
            self.note = "text alone"
        else:
            (folder / "preprocessor_config.json").write_text("{}", encoding="utf-8")
            longest = max(len(picture["input_ids"]) for picture in self.pictures)
            self.options = {**ImageText.options, **(WIDE if longest > MOST_TOKENS else {})}
        return model

    def plain(self, model: Any) -> None:
        """Was done when it was saved."""

    def engine(self, folder: Path) -> list[Any]:
        if not self.missing:
            return super().engine(folder)
        with LLM(str(folder), **{**OPTIONS, **self.options}):
            raise UnbuiltError(self.missing)

    def given(self, index: int) -> list[dict[str, torch.Tensor]]:
        pictures = self.pictures[: index % 3]
        return pictures[-1:] if self.encodes else pictures

    def logits(self, model: Any, index: int, tokens: list[int]) -> torch.Tensor:
        given = self.given(index)
        if not self.encodes:
            return images.logits(model, torch.tensor(tokens), given, MAX_TOKENS)
        read: list[int] = []
        for token in self.request(prompts()[index])["encoder_prompt"]["prompt_token_ids"]:
            read += [token] * (len(given[0]["input_ids"]) if token == self.token else 1)
        return images.logits(
            model, torch.tensor(read), given, decoder_input_ids=torch.tensor([tokens])
        )

    def request(self, prompt: list[int]) -> Any:
        index = prompts().index(prompt)
        arrays = [
            {name: array.numpy() for name, array in picture.items()}
            for picture in self.given(index)
        ]
        tokens = [3 + token % (FIRST_SPECIAL - 3) for token in prompt]
        # Some code takes pictures without a token between them for one.
        places = [token for number in range(len(arrays)) for token in (self.token, 4 + number)]
        asked = {
            "prompt_token_ids": [*tokens[:1], *places, *tokens[1:]],
            "multi_modal_data": {self.modality: arrays},
        }
        if not self.encodes:
            return asked
        return {"encoder_prompt": asked, "decoder_prompt": {"prompt_token_ids": [3]}}


class Hearing(ImageText):
    """Classes that hear: a decoder whose prompts have recordings, as `ImageText` has pictures; or
    one whose encoder reads a recording for each prompt."""

    modality = "audio"
    options = {**ImageText.options, "max_num_batched_tokens": 320}

    def save(self, case: Case, folder: Path) -> Any:
        config = audio.tiny_config(case.model_type)
        model = recipes.save(case.model_type, folder, architecture=case.architecture, config=config)
        self.note = self.missing = ""
        self.encodes = model.config.is_encoder_decoder
        self.token = audio.audio_token(model) or FIRST_SPECIAL
        try:
            first = audio.sound(model)
            count = len(first["input_ids"]) if "input_ids" in first else None
            self.pictures = [first, audio.sound(model, 1, count)]
        except ValueError as error:
            # The engine may refuse it, whatever it hears.
            self.missing = brief(error)
        extractor = {"feature_size": audio.MELS, "chunk_length": audio.FRAMES // 100}
        (folder / "preprocessor_config.json").write_text(json.dumps(extractor), encoding="utf-8")
        return model

    def given(self, index: int) -> list[dict[str, torch.Tensor]]:
        return [self.pictures[index % 2]] if self.encodes else super().given(index)

    def logits(self, model: Any, index: int, tokens: list[int]) -> torch.Tensor:
        return audio.logits(model, torch.tensor(tokens), self.given(index))

    def request(self, prompt: list[int]) -> Any:
        if not self.encodes:
            return super().request(prompt)
        (arrays,) = self.given(prompts().index(prompt))
        (name,) = {"input_features", "input_values"} & arrays.keys()
        return {
            "encoder_prompt": {"features": arrays[name][0].numpy()},
            "decoder_prompt": {"prompt_token_ids": [3]},
        }


class Labelling(Hearing):
    """Classes that label frames: the labels of three recordings, whose lengths differ."""

    def save(self, case: Case, folder: Path) -> Any:
        config = audio.tiny_config(case.model_type)
        model = recipes.save(case.model_type, folder, architecture=case.architecture, config=config)
        audio.vary(model)
        model.save_pretrained(folder)
        whole = audio.sound(model)
        (name,) = {"input_features", "input_values"} & whole.keys()
        length = whole[name].shape[1]
        self.given_features = [
            whole[name][0, :count] for count in (length, length // 2, length - 9)
        ]
        return model

    def engine(self, folder: Path) -> list[Any]:
        blank = json.loads((folder / "config.json").read_text(encoding="utf-8"))["pad_token_id"]
        params = SamplingParams(temperature=0, stop_token_ids=[blank], ignore_eos=True)
        params.max_tokens = None
        options = {**OPTIONS, "max_model_len": 256, "num_kv_blocks": 600, "block_size": 4}
        requests = [{"encoder_prompt": {"features": each.numpy()}} for each in self.given_features]
        with LLM(str(folder), **{**options, "max_num_batched_tokens": 600}) as llm:
            return list(llm.generate(requests, params, use_tqdm=False))

    @torch.inference_mode()
    def compare(self, model: Any, ours: list[Any]) -> None:
        blank = model.config.pad_token_id
        for features, output in zip(self.given_features, ours, strict=True):
            frames = model(features[None]).logits[0].argmax(dim=-1).tolist()
            text = [label for label, _ in itertools.groupby(frames) if label != blank]
            (found,) = output.outputs
            tokens = [token for token in found.token_ids if token != blank]
            assert tokens == text, f"labels {tokens}, not {text}"
            assert len(set(text)) > 1, "the recipe gives its frames no labels"


class EncoderDecoder(Generation):
    """Classes whose encoder reads the prompt."""

    options = {**STEPS, "max_encoder_len": 64}

    @torch.inference_mode()
    def logits(self, model: Any, index: int, tokens: list[int]) -> torch.Tensor:
        found: torch.Tensor = model(
            input_ids=torch.tensor([prompts()[index]]),
            decoder_input_ids=torch.tensor([tokens]),
            use_cache=False,
        ).logits
        return found[0].float()

    def request(self, prompt: list[int]) -> Any:
        return {
            "encoder_prompt": {"prompt_token_ids": prompt},
            "decoder_prompt": {"prompt_token_ids": [3]},
        }

    def start(self, prompt: list[int], output: Any) -> list[int]:
        return [3]


class Pooling(Run):
    """Classes that give hidden states or logits of a prompt."""

    params = PoolingParams(task="token_embed", normalize=False)
    end: tuple[int, ...] = ()
    """Tokens after each prompt."""

    def save(self, case: Case, folder: Path) -> Any:
        shortest = SHORTEST.get(case.model_type, 1)
        self.prompts = [prompt for prompt in prompts() if len(prompt) >= shortest]
        self.note = f"prompts of {shortest} tokens or more" if shortest > 1 else ""
        return super().save(case, folder)

    def plain(self, model: Any) -> None:
        self.vectors(model, [*self.prompts[0], *self.end])

    @torch.inference_mode()
    def vectors(self, model: Any, tokens: list[int]) -> torch.Tensor:
        """[T, H], or [labels], of a prompt by transformers alone."""
        found: torch.Tensor = model.base_model(torch.tensor([tokens]))[0]
        return found[0].float()

    def engine(self, folder: Path) -> list[torch.Tensor]:
        with LLM(str(folder), **OPTIONS) as llm:
            outputs = llm.encode(
                [{"prompt_token_ids": [*prompt, *self.end]} for prompt in self.prompts],
                self.params,
                use_tqdm=False,
            )
        for output in outputs:
            if output.error is not None:
                raise RuntimeError(output.error)
        return [torch.tensor(output.outputs.data) for output in outputs]

    def compare(self, model: Any, ours: list[torch.Tensor]) -> None:
        for prompt, found in zip(self.prompts, ours, strict=True):
            reference = self.vectors(model, [*prompt, *self.end])
            assert found.shape == reference.shape, (
                f"shape {list(found.shape)}, not {list(reference.shape)}"
            )
            difference = (found - reference).abs().max().item()
            allowed = TOLERANCE * max(1.0, reference.abs().max().item())
            assert difference <= allowed, f"vectors differ by {difference:.3g}"


class Classification(Pooling):
    """Classes with a classifier of sequences."""

    params = PoolingParams(task="classify", use_activation=False)
    end = (0,)
    """Encoder-decoder classifiers read the end of the text."""

    @torch.inference_mode()
    def vectors(self, model: Any, tokens: list[int]) -> torch.Tensor:
        found: torch.Tensor = model(torch.tensor([tokens])).logits
        return found[0].float()


class Retrieval(Pooling):
    """Classes that give vectors of queries and of pictures, here those of texts."""

    params = PoolingParams(task="token_embed")

    def save(self, case: Case, folder: Path) -> Any:
        self.prompts = prompts()
        config = images.tiny_config(case.model_type)
        model = recipes.save(case.model_type, folder, architecture=case.architecture, config=config)
        tokens = json.dumps({"bos_token": "<s>", "pad_token": "<pad>"})
        (folder / "tokenizer_config.json").write_text(tokens, encoding="utf-8")
        self.note = "text alone"
        return model

    @torch.inference_mode()
    def vectors(self, model: Any, tokens: list[int]) -> torch.Tensor:
        ids = torch.tensor([tokens])
        # The marks of its processor: a prefix.
        more = {"token_type_ids": torch.zeros_like(ids)} if "Pali" in type(model).__name__ else {}
        found: torch.Tensor = model(input_ids=ids, **more).embeddings
        return found[0].float()


RUNS: Mapping[str, Any] = {
    "causal": Generation(),
    "image-text": ImageText(),
    "encoder-decoder": EncoderDecoder(),
    "masked": Pooling(),
    "embedding": Pooling(),
    "classification": Classification(),
    "speech": Hearing(),
    "CTC": Labelling(),
    "retrieval": Retrieval(),
}


def run_of(case: Case) -> Any:
    """How a class is compared."""
    if case.mapping == "encoder-decoder" and case.model_type in audio.LANGUAGE_MODELS:
        return RUNS["speech"]
    return RUNS[case.mapping]
