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
    from transformers.models.qwen2_vl.video_processing_qwen2_vl import Qwen2VLVideoProcessor
    from transformers.video_utils import VideoMetadata

    made = []
    for frames, config, fps, options in pickle.loads(path.read_bytes()):  # noqa: S301 # our own
        processor = Qwen2VLVideoProcessor(**config)
        metadata = VideoMetadata(
            total_num_frames=len(frames) if not isinstance(frames, int) else frames, fps=fps
        )
        if isinstance(frames, int):
            made.append(processor.sample_frames(metadata, **options).tolist())
            continue
        found = processor(
            frames,
            do_resize=False,
            video_metadata=[metadata],
            return_metadata=True,
            return_tensors="np",
            **options,
        )
        seconds = processor.temporal_patch_size / found["video_metadata"][0].sampled_fps
        made.append((found["pixel_values_videos"], found["video_grid_thw"], seconds))
    path.write_bytes(pickle.dumps(made))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
