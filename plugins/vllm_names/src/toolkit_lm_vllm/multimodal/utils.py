"""vLLM's `vllm.multimodal.utils`: media as data URLs."""

from toolkit_lm_vllm_names.absent import absent
from toolkit_lm_vllm_names.media import (
    encode_audio_base64,
    encode_image_base64,
    encode_image_url,
    fetch_image,
)

__all__ = ["encode_audio_base64", "encode_image_base64", "encode_image_url", "fetch_image"]

__getattr__ = absent(__name__)
