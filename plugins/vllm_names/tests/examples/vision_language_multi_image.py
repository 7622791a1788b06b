from vllm import LLM, SamplingParams
from vllm.assets.image import ImageAsset
from vllm.multimodal.utils import encode_image_url

QUESTION = "What shape is it?"


def main():
    image_urls = [encode_image_url(ImageAsset(name).pil_image) for name in ("stop_sign", "hato")]
    llm = LLM(model="tiny-vision", max_num_seqs=2, limit_mm_per_prompt={"image": 2})
    sampling_params = SamplingParams(temperature=0.0, max_tokens=16)
    outputs = llm.chat(
        [
            {
                "role": "user",
                "content": [
                    {"type": "text", "text": QUESTION},
                    *({"type": "image_url", "image_url": {"url": url}} for url in image_urls),
                ],
            }
        ],
        sampling_params=sampling_params,
    )
    for o in outputs:
        print(f"Generated: {o.outputs[0].text!r}")


if __name__ == "__main__":
    main()
