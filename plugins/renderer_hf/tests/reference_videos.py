"""The program that runs what is pure of transformers' video processor: all but the resizing, which
is torchvision's.

It reads cases (frames, options of the processor, fps, options of the call) from a file, and writes
what transformers makes of each.
"""

from __future__ import annotations

import pickle
import sys
from enum import Enum
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType


def stand_in() -> None:
    """In torchvision's place, with the two functions of it that are called."""
    functional = "torchvision.transforms.v2.functional"
    for name in (
        "torchvision",
        "torchvision.io",
        "torchvision.transforms",
        "torchvision.transforms.functional",
        "torchvision.transforms.v2",
        functional,
    ):
        module = ModuleType(name)
        module.__spec__ = ModuleSpec(name, None)
        module.__path__ = []
        sys.modules[name] = module
        parent, _, child = name.rpartition(".")
        if parent:
            setattr(sys.modules[parent], child, module)
    names = ["NEAREST", "NEAREST_EXACT", "BILINEAR", "BICUBIC", "BOX", "HAMMING", "LANCZOS"]
    sys.modules["torchvision.transforms"].InterpolationMode = Enum("InterpolationMode", names)
    sys.modules["torchvision.transforms.functional"].pil_to_tensor = None
    sys.modules[functional].InterpolationMode = sys.modules[
        "torchvision.transforms"
    ].InterpolationMode
    sys.modules[functional].normalize = normalize
    # Frames are RGB.
    sys.modules[functional].grayscale_to_rgb = lambda video: video
    sys.modules["torchvision"].__version__ = "0.28.0"


def normalize(image, mean, std, inplace=False):
    """Normalization of torchvision."""
    import torch

    mean, std = (
        torch.as_tensor(numbers, dtype=image.dtype)[:, None, None] for numbers in (mean, std)
    )
    return image.sub(mean).div_(std)


def main(path: Path) -> None:
    stand_in()
    from transformers.models.gemma4.video_processing_gemma4 import Gemma4VideoProcessor
    from transformers.models.glm4v.video_processing_glm4v import Glm4vVideoProcessor
    from transformers.models.glm46v.video_processing_glm46v import Glm46VVideoProcessor
    from transformers.models.internvl.video_processing_internvl import InternVLVideoProcessor
    from transformers.models.llava_onevision.video_processing_llava_onevision import (
        LlavaOnevisionVideoProcessor,
    )
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.models.qwen3_vl.processing_qwen3_vl import Qwen3VLProcessor
    from transformers.models.qwen3_vl.video_processing_qwen3_vl import Qwen3VLVideoProcessor
    from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor
    from transformers.video_utils import VideoMetadata

    known = {
        one.__name__: one
        for one in (
            Gemma4VideoProcessor,
            Glm4vVideoProcessor,
            Glm46VVideoProcessor,
            InternVLVideoProcessor,
            LlavaOnevisionVideoProcessor,
            Qwen2VLVideoProcessor,
            Qwen3VLVideoProcessor,
            SmolVLMVideoProcessor,
        )
    }
    made = []
    for frames, stated, fps, options in pickle.loads(path.read_bytes()):  # noqa: S301 # our own
        config = dict(stated)
        name = config.pop("video_processor_type", "Qwen2VLVideoProcessor")
        processor = known[name](**config)
        if isinstance(frames, tuple):
            # Only how many patches there are of a size.
            made.append(processor.get_num_of_video_patches(*frames))
            continue
        metadata = VideoMetadata(
            total_num_frames=len(frames) if not isinstance(frames, int) else frames, fps=fps
        )
        if isinstance(frames, int):
            own = {"num_frames": None, "fps": None, "initial_shift": True, **options}
            if "fps" not in options and name != "InternVLVideoProcessor":
                own.pop("fps")
            if name.startswith(("Glm", "Gemma", "Llava")):
                own = options
            if name == "SmolVLMVideoProcessor":
                own = {"num_frames": 64, "fps": 1, **options}
                metadata.duration = frames / fps
            made.append(processor.sample_frames(metadata, **own).tolist())
            continue
        found = processor(
            frames,
            do_resize=False,
            video_metadata=[metadata],
            return_metadata=True,
            return_tensors="np",
            **options,
        )
        if name in ("InternVLVideoProcessor", "LlavaOnevisionVideoProcessor"):
            made.append(found["pixel_values_videos"][0])
            continue
        if name == "SmolVLMVideoProcessor":
            made.append(found["pixel_values"])
            continue
        if name == "Gemma4VideoProcessor":
            made.append((found["pixel_values_videos"], found["video_position_ids"]))
            continue
        times = None
        if name == "Qwen3VLVideoProcessor":
            [of_video] = found["video_metadata"]
            # It fails where all frames are taken.
            taken = of_video.frames_indices
            indices = list(range(len(frames)) if taken is None else taken)
            times = Qwen3VLProcessor._calculate_timestamps(None, indices, of_video.fps or 24, 2)
        if name.startswith("Glm"):
            [of_video] = found["video_metadata"]
            taken = of_video.frames_indices
            indices = list(range(len(frames)) if taken is None else taken)
            times = [index / (of_video.fps or 24) for index in indices[::2]]
        seconds = processor.temporal_patch_size / found["video_metadata"][0].sampled_fps
        made.append((found["pixel_values_videos"], found["video_grid_thw"], times or seconds))
    path.write_bytes(pickle.dumps(made))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
