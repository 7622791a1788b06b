"""Language models that see as embedders: the vector of a prompt with pictures is the hidden state
that transformers has of its last token."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from qwen_harness import IMAGE, qwen2_vl, qwen3_vl, random_qwen
from test_paligemma import make_pali
from test_qwen2_vl_rendered import ITEM, write_checkpoint
from toolkit_lm import LLM
from toolkit_lm.errors import RequestError
from toolkit_lm_devkit import randomize
from toolkit_lm_vllm_names.pairs import pair_prompts
from transformers import AutoImageProcessor, PreTrainedTokenizerFast
from vision_checkpoints import drawings

OPTIONS = {"device": "cpu", "runner": "pooling", "max_model_len": 320, "max_num_seqs": 8}
TEXTS = [f"What is {ITEM} beside {ITEM}?", f"{ITEM}Represent it.", "No picture here."]


@pytest.fixture(scope="module", params=["qwen2_vl", "qwen3_vl"])
def subject(request, tmp_path_factory):
    """A folder, the model of transformers, and its processor."""
    theirs = random_qwen(request.param)
    folder = tmp_path_factory.mktemp("qwen")
    path = write_checkpoint(theirs, folder)
    read = PreTrainedTokenizerFast(tokenizer_file=str(path), pad_token="<pad>")
    return theirs, folder, AutoImageProcessor.from_pretrained(folder, backend="pil"), read


@torch.inference_mode()
def hidden_states(subject, text, pictures):
    """[tokens, H] of transformers."""
    theirs, _, images, tokenizer = subject
    inputs = (
        dict(images(pictures, return_tensors="pt", input_data_format="channels_last"))
        if pictures
        else {}
    )
    counts = [int(grid.prod()) // 4 for grid in inputs.get("image_grid_thw", ())]
    parts = text.split("<|image_pad|>")
    whole = parts[0] + "".join(
        "<|image_pad|>" * count + part for count, part in zip(counts, parts[1:], strict=True)
    )
    ids = tokenizer(whole, return_tensors="pt", add_special_tokens=False)["input_ids"]
    theirs.model.rope_deltas = None
    return theirs.model(
        input_ids=ids, **inputs, mm_token_type_ids=(ids == IMAGE).long()
    ).last_hidden_state[0]


def prompt_of(text, pictures):
    return {"prompt": text, "multi_modal_data": {"image": pictures}} if pictures else text


def unit(vectors):
    return torch.nn.functional.normalize(vectors, dim=-1).numpy()


@pytest.mark.parametrize("options", [{}, {"enable_prefix_caching": True, "num_kv_blocks": 200}])
def test_vectors_equal_transformers(subject, options):
    pictures = drawings(4, 3)
    given = [(text, [pictures.pop() for _ in range(text.count(ITEM))]) for text in TEXTS]
    expected = [hidden_states(subject, text, images) for text, images in given]
    prompts = [prompt_of(text, images) for text, images in given]
    with LLM(str(subject[1]), **OPTIONS, **options) as llm:
        for _ in range(2):
            found = llm.embed(prompts)
            for output, states in zip(found, expected, strict=True):
                assert output.error is None
                assert np.abs(output.outputs.embedding - unit(states[-1])).max() < 1e-4
        for output, states in zip(
            llm.encode(prompts, pooling_task="token_embed"), expected, strict=True
        ):
            assert np.abs(output.outputs.data - unit(states)).max() < 1e-4
        scores = llm.score(prompts[2], prompts[:2])
        for output, states in zip(scores, expected, strict=False):
            wanted = float(unit(expected[2][-1]) @ unit(states[-1]))
            assert output.outputs.score == pytest.approx(wanted, abs=1e-4)


def test_a_conversation_in_the_place_of_a_text(subject):
    (picture,) = drawings(1, 5)
    content = [{"type": "image", "image": picture}, {"type": "text", "text": "Say it."}]
    expected = unit(hidden_states(subject, f"[user]{ITEM}Say it.", [picture])[-1])
    with LLM(str(subject[1]), **OPTIONS) as llm:
        [output] = llm.embed({"content": content})
        assert np.abs(output.outputs.embedding - expected).max() < 1e-4


def test_other_pictures_give_other_vectors_in_one_cache(subject):
    """Prompts of the same tokens share no prefix where their pictures differ."""
    first, second = (drawings(1, seed)[0] for seed in (1, 2))
    with LLM(
        str(subject[1]), **OPTIONS, enable_prefix_caching=True, num_kv_blocks=200, block_size=8
    ) as llm:
        text = f"{ITEM}{'What is this? ' * 3}"
        for picture in (first, second, first):
            [output] = llm.embed(prompt_of(text, [picture]), cache_salt="a")
            expected = unit(hidden_states(subject, text, [picture])[-1])
            assert np.abs(output.outputs.embedding - expected).max() < 1e-4


def test_paligemma_reads_in_both_directions(tmp_path):
    pali = make_pali(tmp_path, 62)
    picture = pali.items(1)[0]
    inputs = pali.inputs("<image> and", [picture])
    with torch.inference_mode():
        states = pali.model.model(**inputs).last_hidden_state[0]
    with LLM(str(tmp_path), **{**OPTIONS, "max_model_len": 256}) as llm:
        [output] = llm.embed(prompt_of("<image> and", [picture]))
    assert np.abs(output.outputs.embedding - unit(states[-1])).max() < 1e-4


@pytest.mark.parametrize(
    ("prompt", "options", "reason"),
    [
        ({"prompt": "no place", "multi_modal_data": {"image": drawings(1)}}, {}, "placeholder"),
        ({"prompt": f"{ITEM} alone"}, {}, "placeholders of modality 'image'"),
        ({"multi_modal_data": {"image": drawings(1)}}, {}, "a text with a placeholder for each"),
        ({"content": "text"}, {}, "must be a list of parts"),
        (
            {"prompt": ITEM, "multi_modal_data": {"image": drawings(1)}},
            {"truncate_prompt_tokens": 3},
            "prompts with media are not truncated",
        ),
    ],
)
def test_refusals(subject, prompt, options, reason):
    with LLM(str(subject[1]), **OPTIONS) as llm:
        with pytest.raises(RequestError, match=reason):
            llm.embed(prompt, **options)
        assert llm.embed("next")[0].error is None


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("family", [qwen2_vl, qwen3_vl])
def test_a_classifier_of_rows_of_the_head(family, tied, tmp_path):
    """The head of a model that sees, or its tied embedding, is that of its language part."""
    theirs = family(tie_word_embeddings=tied)
    randomize(theirs)
    path = write_checkpoint(theirs.eval(), tmp_path)
    read = PreTrainedTokenizerFast(tokenizer_file=str(path), pad_token="<pad>")
    images = AutoImageProcessor.from_pretrained(tmp_path, backend="pil")
    (picture,) = drawings(1, 9)
    options = {
        "convert": "classify",
        "classifier_method": "from_2_way_softmax",
        "classifier_tokens": ["n", "y"],
        "score_template": "pair",
        "use_activation": False,
    }
    no, yes = (read.encode(word)[0] for word in "ny")
    rows = theirs.lm_head.weight.detach()
    with LLM(str(tmp_path), **OPTIONS, **options) as llm:
        prompts = [prompt_of(TEXTS[1], [picture]), "plain"]
        for output, (text, items) in zip(
            llm.classify(prompts), [(TEXTS[1], [picture]), ("plain", [])], strict=True
        ):
            states = hidden_states((theirs, tmp_path, images, read), text, items)[-1]
            expected = float((rows[yes] - rows[no]) @ states.detach())
            assert float(output.outputs.data[0]) == pytest.approx(expected, abs=1e-3)
        # vLLM's `LLM.score` reads a pair so, by a template of the two roles.
        page = {"content": [{"type": "image", "image": picture}]}
        template = "{% for m in messages %}[{{ m['role'] }}]{% if m['content'] is string %}"
        template += "{{ m['content'] }}{% else %}" + ITEM + "{% endif %}{% endfor %}"
        asked = pair_prompts("y", [page, "plain"], template, llm.engine)
        for output, (text, items) in zip(
            llm.classify(asked),
            [(f"[query]y[document]{ITEM}", [picture]), ("[query]y[document]plain", [])],
            strict=True,
        ):
            states = hidden_states((theirs, tmp_path, images, read), text, items)[-1]
            expected = float((rows[yes] - rows[no]) @ states.detach())
            assert float(output.outputs.data[0]) == pytest.approx(expected, abs=1e-3)
        with pytest.raises(RequestError, match="on both sides"):
            pair_prompts("y", [{"content": 3}], template, llm.engine)
        # The template "pair" has the document right behind the query.
        [output] = llm.score("a", [page])
        states = hidden_states((theirs, tmp_path, images, read), f"a{ITEM}", [picture])[-1]
        expected = float((rows[yes] - rows[no]) @ states.detach())
        assert float(output.outputs.data[0]) == pytest.approx(expected, abs=1e-3)
