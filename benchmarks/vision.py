"""Images in prompts: seconds to the first token where an image is new and where it was seen before,
and against transformers.

    python benchmarks/vision.py [--dtype bfloat16] [--rounds 5] [--engine-process]

A LLaVA of random weights: SigLIP base (384 x 384, patches of 16: 576 tokens an image) and a Llama
of 160 M parameters. Images are PNGs of 1600 x 1200. `seen, other text before it`: no prefix is
cached, the image's data and embeddings are. `seen, other text after it`: the prefix is cached too.
Prints medians, and the ratio to an image that is new.
"""

from __future__ import annotations

import argparse
import io
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from toolkit_lm import LLM, SamplingParams
from toolkit_lm_devkit import write_tokenizer
from transformers import (
    LlamaConfig,
    LlavaConfig,
    LlavaForConditionalGeneration,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
)
from transformers.models.llava.processing_llava import LlavaProcessor
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil

VOCAB = 32000
IMAGE_TOKEN = 7
SIZE = 384
MARK = "<image>"
ONE_TOKEN = SamplingParams(temperature=0, max_tokens=1)


def make(folder: Path) -> tuple[Any, Any]:
    """Writes a checkpoint. Returns transformers' model and processor."""
    vision = SiglipVisionConfig(image_size=SIZE, patch_size=16, vision_use_head=False)
    text = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    layers = {"vision_feature_layer": -1, "vision_feature_select_strategy": "full"}
    model = LlavaForConditionalGeneration(
        LlavaConfig(vision_config=vision, text_config=text, image_token_index=IMAGE_TOKEN, **layers)
    )
    model.eval().save_pretrained(folder)
    write_tokenizer(folder, VOCAB)
    path = folder / "tokenizer.json"
    tokenizer = json.loads(path.read_text())
    tokenizer["added_tokens"].append(
        {**tokenizer["added_tokens"][0], "id": IMAGE_TOKEN, "content": MARK}
    )
    tokenizer["model"]["vocab"][MARK] = IMAGE_TOKEN
    path.write_text(json.dumps(tokenizer))
    images = SiglipImageProcessorPil(size={"height": SIZE, "width": SIZE})
    fast = PreTrainedTokenizerFast(
        tokenizer_file=str(path),
        extra_special_tokens={"image_token": MARK},
        bos_token="<s>",
        pad_token="<pad>",
    )
    processor = LlavaProcessor(
        images, fast, patch_size=16, vision_feature_select_strategy="full", image_token=MARK
    )
    images.save_pretrained(folder)
    return model, processor


def picture(seed: int) -> bytes:
    """A PNG that compresses as photographs do not, and drawings do."""
    rng = np.random.default_rng(seed)
    coarse = Image.fromarray(rng.integers(0, 256, (30, 40, 3), np.uint8))
    out = io.BytesIO()
    coarse.resize((1600, 1200)).save(out, "PNG")
    return out.getvalue()


def timed(work: Callable[[], object]) -> float:
    start = time.perf_counter()
    work()
    return time.perf_counter() - start


def measure(llm: LLM, model: Any, processor: Any, rounds: int) -> dict[str, list[float]]:
    def ours(text: str, *images: bytes) -> float:
        prompt: Any = {"prompt": text, "multi_modal_data": {"image": list(images)}}
        return timed(lambda: llm.generate([prompt], ONE_TOKEN, use_tqdm=False))

    @torch.inference_mode()
    def theirs(text: str, image: bytes) -> None:
        inputs = processor(
            text=text, images=[Image.open(io.BytesIO(image)).convert("RGB")], return_tensors="pt"
        )
        inputs["pixel_values"] = inputs["pixel_values"].to(model.dtype)
        model.generate(**inputs, do_sample=False, max_new_tokens=1)

    found: dict[str, list[float]] = {}
    for number in range(rounds + 1):
        image = picture(number)
        times = {
            "new": ours(f"a {number} {MARK} what is it", image),
            "seen, other text before it": ours(f"b {number} {MARK} what is it", image),
            "seen, other text after it": ours(f"b {number} {MARK} how many are there", image),
            "text alone, as many tokens": ours(f"c {number} " + "x " * 576),
            "transformers, new": timed(lambda image=image: theirs(f"a {MARK} what is it", image)),
        }
        if number:
            for name, seconds in times.items():
                found.setdefault(name, []).append(seconds)
    return found


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--engine-process", action="store_true")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        model, processor = make(Path(name))
        options = {
            "dtype": args.dtype,
            "max_model_len": 2048,
            "kv_cache_memory": "2GiB",
            "engine_process": args.engine_process,
        }
        with LLM(name, device="cpu", **options) as llm:
            found = measure(llm, model.to(getattr(torch, args.dtype)), processor, args.rounds)
    new = statistics.median(found["new"])
    print(
        "| first token | ms | an image that is new takes so many times as long |\n| --- | --- | "
        "--- |"
    )
    for name, seconds in found.items():
        print(
            f"| {name} | {1000 * statistics.median(seconds):.0f} | "
            f"{new / statistics.median(seconds):.2f} |"
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
