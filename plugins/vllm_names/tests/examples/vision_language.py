from vllm import LLM, SamplingParams
from vllm.assets.image import ImageAsset
from vllm.multimodal.image import convert_image_mode


def main():
    image = convert_image_mode(ImageAsset("stop_sign").pil_image, "RGB")
    llm = LLM(model="tiny-vision", max_num_seqs=5, limit_mm_per_prompt={"image": 1})
    sampling_params = SamplingParams(temperature=0.0, max_tokens=16)
    placeholder = llm.get_tokenizer().decode(
        [llm.model_config.hf_config.image_token_id], skip_special_tokens=False
    )
    inputs = [
        {
            "prompt": f"{placeholder}What shape is it?",
            "multi_modal_data": {"image": image},
            "multi_modal_uuids": {"image": f"uuid_{i}"},
        }
        for i in range(2)
    ]
    for o in llm.generate(inputs, sampling_params=sampling_params):
        print(f"Generated: {o.outputs[0].text!r}")


if __name__ == "__main__":
    main()
