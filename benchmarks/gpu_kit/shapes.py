"""Other shapes than language models, with random weights from a config.json: BART, Whisper small,
LLaVA, MiniLM.

usage: python -m gpu_kit.shapes [--quick]

Each is measured twice, and the second time counts. Their results are those of tests; here they run
on a card at their real sizes, and every number of theirs is finite. --quick runs small ones on a
CPU.
"""

from __future__ import annotations

import argparse
import gc
import io
import json
import math
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from gpu_kit.report import MissedError, checking, die_with_the_kit

TOKENS = 32
IDS = {"bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2, "decoder_start_token_id": 2}
IMAGE_TOKEN = 7
IMAGE = "<image>"


def write_config(folder: Path, family: str, model: str, **fields: Any) -> None:
    """config.json of a class of transformers."""
    import transformers

    config = getattr(transformers, f"{family}Config")(**fields)
    config.architectures = [model]
    config.save_pretrained(folder)


def layers(quick: bool, count: int) -> int:
    return 2 if quick else count


def bart(folder: Path, quick: bool) -> None:
    """BART large."""
    size, heads = (32, 2) if quick else (1024, 16)
    each = {"layers": layers(quick, 12), "ffn_dim": 4 * size, "attention_heads": heads}
    both = {
        f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in each.items()
    }
    fields = {
        "vocab_size": 512 if quick else 50265,
        "d_model": size,
        "max_position_embeddings": 1024,
        "dropout": 0.0,
    }
    write_config(
        folder,
        "Bart",
        "BartForConditionalGeneration",
        **both,
        **fields,
        **IDS,
        forced_eos_token_id=None,
    )


def whisper(folder: Path, quick: bool) -> None:
    """Whisper small."""
    size, heads = (32, 2) if quick else (768, 12)
    each = {"layers": layers(quick, 12), "ffn_dim": 4 * size, "attention_heads": heads}
    both = {
        f"{side}_{name}": value for side in ("encoder", "decoder") for name, value in each.items()
    }
    fields = {
        "vocab_size": 512 if quick else 51865,
        "d_model": size,
        "suppress_tokens": None,
        "begin_suppress_tokens": None,
    }
    write_config(folder, "Whisper", "WhisperForConditionalGeneration", **both, **fields, **IDS)


def llava(folder: Path, quick: bool) -> None:
    """LLaVA 1.5 of 7B: CLIP large of 336 x 336 in patches of 14, and a Llama of 7B."""
    from toolkit_lm_devkit import write_tokenizer

    side, vision, text = (28, 32, 32) if quick else (336, 1024, 4096)
    vocab_size = 512 if quick else 32064
    pictures = {
        "model_type": "clip_vision_model",
        "hidden_size": vision,
        "intermediate_size": 4 * vision,
        "num_hidden_layers": layers(quick, 24),
        "num_attention_heads": vision // (16 if quick else 64),
        "image_size": side,
        "patch_size": 14,
        "projection_dim": 32 if quick else 768,
    }
    words = {
        "model_type": "llama",
        "vocab_size": vocab_size,
        "hidden_size": text,
        "intermediate_size": 64 if quick else 11008,
        "num_hidden_layers": layers(quick, 32),
        "num_attention_heads": text // (16 if quick else 128),
        "max_position_embeddings": 4096,
    }
    fields = {
        "image_token_index": IMAGE_TOKEN,
        "vision_feature_layer": -2,
        "vision_feature_select_strategy": "default",
    }
    write_config(
        folder,
        "Llava",
        "LlavaForConditionalGeneration",
        vision_config=pictures,
        text_config=words,
        **fields,
    )
    tokenizer = write_tokenizer(folder, vocab_size) / "tokenizer.json"
    told = json.loads(tokenizer.read_text())
    told["added_tokens"].append({**told["added_tokens"][0], "id": IMAGE_TOKEN, "content": IMAGE})
    told["model"]["vocab"][IMAGE] = IMAGE_TOKEN
    tokenizer.write_text(json.dumps(told))
    images = {
        "image_processor_type": "CLIPImageProcessor",
        "do_resize": True,
        "size": {"shortest_edge": side},
        "do_center_crop": True,
        "crop_size": {"height": side, "width": side},
        "do_rescale": True,
        "rescale_factor": 1 / 255,
        "do_normalize": True,
        "image_mean": [0.5, 0.5, 0.5],
        "image_std": [0.5, 0.5, 0.5],
        "do_convert_rgb": True,
        "resample": 3,
    }
    (folder / "preprocessor_config.json").write_text(json.dumps(images))


def minilm(folder: Path, quick: bool) -> None:
    """MiniLM of 6 layers."""
    from toolkit_lm_devkit import write_tokenizer

    size = 32 if quick else 384
    vocab_size = 512 if quick else 30522
    fields = {
        "hidden_size": size,
        "intermediate_size": 4 * size,
        "num_hidden_layers": layers(quick, 6),
    }
    fields |= {
        "num_attention_heads": 2 if quick else 12,
        "vocab_size": vocab_size,
        "max_position_embeddings": 512,
    }
    write_config(folder, "Bert", "BertModel", **fields)
    write_tokenizer(folder, vocab_size)


def ids(count: int, length: int) -> list[list[int]]:
    return [[(row * 31 + place * 7) % 200 + 10 for place in range(length)] for row in range(count)]


def encoded(llm: Any, quick: bool) -> int:
    """Texts through an encoder, and tokens after them. Returns how many tokens."""
    prompts = [
        {"encoder_prompt": {"prompt_token_ids": one}}
        for one in ids(4 if quick else 32, 24 if quick else 512)
    ]
    return generate(llm, prompts)


def heard(llm: Any, quick: bool) -> int:
    """Windows of 30 s, and tokens after them."""
    import numpy as np

    windows = (
        np.random.default_rng(0).normal(size=(2 if quick else 16, 80, 3000)).astype(np.float32)
    )
    return generate(llm, [{"encoder_prompt": {"features": one}} for one in windows])


def seen(llm: Any, quick: bool) -> int:
    """Pictures in prompts, other ones in each call, and tokens after them."""
    import numpy as np
    from PIL import Image

    prompts = []
    for number in range(2 if quick else 8):
        out = io.BytesIO()
        pixels = np.random.default_rng([time.time_ns(), number]).integers(
            0, 256, (30, 40, 3), np.uint8
        )
        Image.fromarray(pixels).resize((640, 480)).save(out, "PNG")
        prompts.append(
            {"prompt": f"{IMAGE} what is it", "multi_modal_data": {"image": [out.getvalue()]}}
        )
    return generate(llm, prompts)


def embedded(llm: Any, quick: bool) -> int:
    """Texts as vectors. Returns how many texts."""
    import numpy as np

    texts = [{"prompt_token_ids": one} for one in ids(8 if quick else 512, 32 if quick else 128)]
    for output in llm.embed(texts, use_tqdm=False):
        if not np.isfinite(np.asarray(output.outputs.embedding)).all():
            raise MissedError("a vector is not finite")
    return len(texts)


def generate(llm: Any, prompts: list[Any]) -> int:
    from toolkit_lm import SamplingParams

    params = SamplingParams(temperature=0, max_tokens=TOKENS, ignore_eos=True, logprobs=0)
    count = 0
    for output in llm.generate(prompts, params, use_tqdm=False):
        if not all(
            math.isfinite(one.logprob)
            for step in output.outputs[0].logprobs
            for one in step.values()
        ):
            raise MissedError("a log probability is not finite")
        count += len(output.outputs[0].token_ids)
    return count


Write = Callable[[Path, bool], None]
Ask = Callable[[Any, bool], int]
SHAPES: dict[str, tuple[Write, Ask, str, dict[str, Any]]] = {
    "BART large": (bart, encoded, "tokens", {"max_model_len": 128, "renderer": "tokens"}),
    "Whisper small": (whisper, heard, "tokens", {"max_model_len": 128, "renderer": "tokens"}),
    "LLaVA 1.5 7B": (llava, seen, "tokens", {"max_model_len": 1024}),
    "MiniLM": (minilm, embedded, "texts", {"runner": "pooling", "max_model_len": 256}),
}
"""Writer of the config, runner, counted unit and options, by name."""


def measure(name: str, quick: bool, found: dict[str, Any]) -> None:
    from toolkit_lm import LLM

    write, ask, what, options = SHAPES[name]
    device = (
        {"device": "cpu", "dtype": "float32"} if quick else {"device": "cuda", "dtype": "bfloat16"}
    )
    cache = (
        {}
        if options.get("runner") == "pooling"
        else {"kv_cache_memory": "64MiB" if quick else "4GiB"}
    )
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder), quick)
        begun = time.perf_counter()
        with LLM(folder, load_format="dummy", **device, **options, **cache) as llm:
            found["start_seconds"] = round(time.perf_counter() - begun, 2)
            ask(llm, quick)
            begun = time.perf_counter()
            count = ask(llm, quick)
            found[f"{what}_per_second"] = round(count / (time.perf_counter() - begun), 1)
        del llm
        gc.collect()


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--quick", action="store_true")
    args = parser.parse_args()
    die_with_the_kit()
    for name in SHAPES:
        with checking(name) as found:
            measure(name, args.quick, found)


if __name__ == "__main__":
    main()
