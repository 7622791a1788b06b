"""ColPali, ColQwen2 and ColModernVBERT: vectors of pictures and queries are those of transformers'
model for the inputs of its processor, and scores are its processor's."""

from __future__ import annotations

import base64
import io
import json

import numpy as np
import pytest
import torch
from PIL import Image
from qwen_harness import qwen2_vl
from test_paligemma import made
from test_qwen2_vl_rendered import write_checkpoint
from tile_checkpoints import TILE, TILE_MARKS
from tokenizers import Tokenizer, processors
from toolkit_lm import LLM
from toolkit_lm.errors import RequestError, ToolkitError
from toolkit_lm_devkit import randomize
from transformers import (
    AutoImageProcessor,
    ColModernVBertConfig,
    ColModernVBertForRetrieval,
    ColPaliConfig,
    ColPaliForRetrieval,
    ColQwen2Config,
    ColQwen2ForRetrieval,
    ModernBertConfig,
    ModernVBertConfig,
    PreTrainedTokenizerFast,
    SiglipVisionConfig,
)
from transformers.models.colmodernvbert.processing_colmodernvbert import ColModernVBertProcessor
from transformers.models.colpali.processing_colpali import ColPaliProcessor
from transformers.models.colqwen2.processing_colqwen2 import ColQwen2Processor
from transformers.models.idefics3.image_processing_pil_idefics3 import Idefics3ImageProcessorPil
from transformers.models.siglip.image_processing_pil_siglip import SiglipImageProcessorPil
from vision_checkpoints import drawings, write_vision_tokenizer
from vision_families import IMAGE, TEXT

MOST = 1e-4
OPTIONS = {"device": "cpu", "max_model_len": 256, "max_num_seqs": 8}
QUERIES = ["Is a sum paid in May?", "which animal", "a"]


class Reference:
    """A checkpoint folder, and what transformers makes of it."""

    def __init__(self, folder, model, processor) -> None:
        self.folder = folder
        self.model = model
        self.processor = processor

    @torch.inference_mode()
    def vectors(self, batch):
        """[tokens, D] of one input, and its tokens."""
        self.model.vlm.rope_deltas = None
        batch.pop("labels", None)
        return self.model(**batch).embeddings[0], batch["input_ids"][0].tolist()

    def query(self, text):
        return self.vectors(self.processor.process_queries([text], return_tensors="pt"))

    def picture(self, pixels):
        # Its own resizing is that of tensors; the files say which one is used.
        image = [Image.fromarray(pixels)]
        return self.vectors(self.processor.process_images(image, return_tensors="pt"))


def with_tokens(folder):
    path = folder / "tokenizer_config.json"
    found = json.loads(path.read_text()) if path.is_file() else {}
    named = {"bos_token": "<s>", "pad_token": "<pad>"}
    path.write_text(json.dumps({**found, **named}))


def make_colpali(folder, window):
    config = ColPaliConfig(vlm_config=made(window).config, embedding_dim=24)
    model = ColPaliForRetrieval(config)
    randomize(model)
    model.eval().save_pretrained(folder)
    tokenizer = write_vision_tokenizer(folder)
    with_tokens(folder)
    images = SiglipImageProcessorPil(size={"height": 28, "width": 28})
    images.image_seq_length = 4
    images.save_pretrained(folder)
    return Reference(folder, model, ColPaliProcessor(images, tokenizer))


def make_colqwen2(folder, tied):
    config = ColQwen2Config(vlm_config=qwen2_vl(tie_word_embeddings=tied).config, embedding_dim=24)
    model = ColQwen2ForRetrieval(config)
    randomize(model)
    path = write_checkpoint(model.eval(), folder)
    with_tokens(folder)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_file=str(path), pad_token="<pad>", eos_token="</s>"
    )
    images = AutoImageProcessor.from_pretrained(folder, backend="pil")
    return Reference(folder, model, ColQwen2Processor(images, tokenizer))


def make_colmodernvbert(folder, *, split, marked):
    """`split`: pictures are cut into tiles. `marked`: special tokens stand around each text."""
    text = {key: value for key, value in TEXT.items() if key != "num_key_value_heads"}
    vlm = ModernVBertConfig(
        text_config=ModernBertConfig(
            **{**text, "num_hidden_layers": 4},
            global_attn_every_n_layers=2,
            local_attention=12,
            cls_token_id=0,
            sep_token_id=1,
        ),
        vision_config=SiglipVisionConfig(**TILE),
        image_token_id=IMAGE,
        pixel_shuffle_factor=2,
    )
    model = ColModernVBertForRetrieval(ColModernVBertConfig(vlm_config=vlm, embedding_dim=24))
    randomize(model)
    model.eval().save_pretrained(folder)
    tokenizer = write_vision_tokenizer(folder, TILE_MARKS)
    with_tokens(folder)
    if marked:
        path = str(folder / "tokenizer.json")
        whole = Tokenizer.from_file(path)
        ends = [(mark, whole.token_to_id(mark)) for mark in ("<s>", "</s>")]
        whole.post_processor = processors.TemplateProcessing("<s> $A </s>", None, ends)
        whole.save(path)
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=path, pad_token="<pad>")
    images = Idefics3ImageProcessorPil(
        size={"longest_edge": 56}, max_image_size={"longest_edge": 28}, do_image_splitting=split
    )
    images.save_pretrained(folder)
    return Reference(folder, model, ColModernVBertProcessor(images, tokenizer, image_seq_len=4))


KINDS = {
    "colmodernvbert of tiles": lambda folder: make_colmodernvbert(folder, split=True, marked=True),
    "colmodernvbert": lambda folder: make_colmodernvbert(folder, split=False, marked=False),
    "colpali of Gemma": lambda folder: make_colpali(folder, None),
    "colpali of Gemma 2": lambda folder: make_colpali(folder, 62),
    "colqwen2": lambda folder: make_colqwen2(folder, False),
    "colqwen2 tied": lambda folder: make_colqwen2(folder, True),
}


@pytest.fixture(scope="module", params=KINDS)
def reference(request, tmp_path_factory):
    return KINDS[request.param](tmp_path_factory.mktemp("retrieval"))


@pytest.fixture(scope="module")
def llm(reference):
    with LLM(str(reference.folder), **OPTIONS) as llm:
        yield llm


def media(pixels):
    return {"multi_modal_data": {"image": pixels}}


def same(output, expected):
    vectors, token_ids = expected
    assert output.error is None
    assert output.prompt_token_ids == token_ids
    assert np.abs(output.outputs.data - vectors.numpy()).max() <= MOST


def test_vectors_of_queries_and_pictures(reference, llm):
    pictures = drawings(4, 1)
    assert llm.engine.processor.tasks == ("token_embed",)
    found = llm.encode([*QUERIES], pooling_task="token_embed", prompt_name="query")
    for output, text in zip(found, QUERIES, strict=True):
        same(output, reference.query(text))
    found = llm.encode([media(pixels) for pixels in pictures], pooling_task="token_embed")
    for output, pixels in zip(found, pictures, strict=True):
        same(output, reference.picture(pixels))
    again = [media(pictures[2]), QUERIES[0], media(pictures[2])]
    names = [None, "query", "document"]
    mixed = llm.encode(again, pooling_task="token_embed", prompt_name=names)
    for output, expected in zip(
        mixed,
        (
            reference.picture(pictures[2]),
            reference.query(QUERIES[0]),
            reference.picture(pictures[2]),
        ),
        strict=True,
    ):
        same(output, expected)


def test_scores_are_the_processors(reference, llm):
    pictures = drawings(3, 2)
    pages = [reference.picture(pixels)[0] for pixels in pictures]
    for text in QUERIES:
        # One page at a time: with zeros for padding, another's length would change its score.
        expected = [
            float(reference.processor.score_retrieval([reference.query(text)[0]], [page])[0, 0])
            for page in pages
        ]
        found = llm.score(text, [media(pixels) for pixels in pictures])
        assert [output.outputs.score for output in found] == pytest.approx(expected, abs=1e-3)
        ranked = llm.rerank(text, [media(pixels) for pixels in pictures], top_n=2)
        order = sorted(range(3), key=lambda index: -expected[index])[:2]
        assert [result.index for result in ranked] == order
        assert ranked[0].document == media(pictures[order[0]])
    both = llm.score([QUERIES[0], media(pictures[0])], [media(pictures[1]), QUERIES[1]])
    wanted = [
        (reference.query(QUERIES[0])[0], pages[1]),
        (pages[0], reference.query(QUERIES[1])[0]),
    ]
    assert [output.outputs.score for output in both] == pytest.approx(
        [float((one @ other.T).max(1).values.sum()) for one, other in wanted], abs=1e-3
    )


def test_content_of_messages_as_documents(reference, llm):
    pixels = drawings(1, 7)[0]
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "PNG")
    url = "data:image/png;base64," + base64.b64encode(file.getvalue()).decode()
    expected = reference.picture(pixels)
    for part in (
        {"type": "image_url", "image_url": {"url": url}},
        {"type": "image", "image": pixels},
    ):
        [output] = llm.encode({"content": [part]}, pooling_task="token_embed")
        same(output, expected)


def test_a_long_query_is_cut_before_its_end(reference, llm):
    [output] = llm.encode(
        "a" * 200, pooling_task="token_embed", prompt_name="query", truncate_prompt_tokens=40
    )
    whole = reference.query("a" * 200)[1]
    assert output.prompt_token_ids == whole[:29] + whole[-11:]


@pytest.mark.parametrize(
    ("prompt", "reason"),
    [
        ({"content": [{"type": "text", "text": "a"}] * 2}, "a text, or one image"),
        ({"content": [{"type": "video_url", "video_url": {"url": "a"}}]}, "a text, or one image"),
        ({"multi_modal_data": {"image": drawings(2)}}, "image"),
        ({"multi_modal_data": {"video": drawings(2)}}, "takes no video"),
    ],
)
def test_refusals(llm, prompt, reason):
    with pytest.raises(RequestError, match=reason):
        llm.encode(prompt, pooling_task="token_embed")
    with pytest.raises(RequestError, match=reason):
        llm.score("a", [prompt])
    with pytest.raises(RequestError, match="token_embed"):
        llm.embed("a")


def test_a_tokenizer_without_its_tokens(tmp_path):
    folder = make_colqwen2(tmp_path, False).folder
    (folder / "tokenizer_config.json").write_text("{}")
    with pytest.raises(ToolkitError, match="states no 'pad_token'"):
        LLM(str(folder), **OPTIONS)
