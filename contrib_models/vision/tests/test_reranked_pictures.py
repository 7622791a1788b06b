"""Qwen3-VL-Reranker: scores of pairs with pictures are those of its authors' procedure with
transformers' model, in Python and over HTTP."""

from __future__ import annotations

import json

import pytest
import torch
from qwen_harness import qwen3_vl
from test_pooled_pictures import hidden_states
from test_pooled_routes import answers, part_of, url_of
from test_qwen2_vl_rendered import ITEM, write_checkpoint
from toolkit_lm import LLM
from toolkit_lm.errors import RequestError
from toolkit_lm_devkit import randomize
from transformers import AutoImageProcessor, PreTrainedTokenizerFast
from vision_checkpoints import drawings

OPTIONS = {"device": "cpu", "max_model_len": 700, "max_num_seqs": 8, "dtype": "float32"}
RERANKER = {"runner": "pooling", "convert": "classify"}
WORDS = {"<|im_start|>": 20, "<|im_end|>": 21, "yes": 22, "no": 23}
DEFAULT = "Given a search query, retrieve relevant candidates that answer the query."
CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{% for p in m['content'] %}"
    "{% if p['type'] == 'image' %}" + ITEM + "{% else %}{{ p['text'] }}{% endif %}{% endfor %}"
    "<|im_end|>\n{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
"""Qwen3-VL's chat template, as far as the authors' procedure needs it."""
SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct "
    'provided. Note that the answer can only be "yes" or "no".'
)
QUERY = "Which bird is it?"
PICTURE = {"type": "image"}
pytestmark = pytest.mark.anyio


@pytest.fixture
def anyio_backend():
    return "asyncio"


def words(*texts):
    return [{"type": "text", "text": text} for text in texts]


class Reference:
    """A checkpoint folder, and scores by the authors' `qwen3_vl_reranker.py`."""

    def __init__(self, folder) -> None:
        self.folder = folder
        self.model = qwen3_vl(tie_word_embeddings=True, max_position_embeddings=1024)
        randomize(self.model)
        path = write_checkpoint(self.model.eval(), folder)
        found = json.loads(path.read_text())
        flags = found["added_tokens"][0]
        found["added_tokens"] += [
            {**flags, "id": number, "content": word, "single_word": word.isalpha()}
            for word, number in WORDS.items()
        ]
        found["model"]["vocab"] |= WORDS
        path.write_text(json.dumps(found))
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(path), pad_token="<pad>")
        images = AutoImageProcessor.from_pretrained(folder, backend="pil")
        self.tokenizer = tokenizer
        self._subject = self.model, folder, images, tokenizer

    def text(self, query, document, instruction=DEFAULT):
        """The prompt of two lists of parts."""
        asked = [*words(f"<Instruct>: {instruction}", "<Query>:"), *query]
        messages = [
            {"role": "system", "content": words(SYSTEM)},
            {"role": "user", "content": [*asked, *words("\n<Document>:"), *document]},
        ]
        return self.tokenizer.apply_chat_template(
            messages, chat_template=CHAT, tokenize=False, add_generation_prompt=True
        )

    @torch.inference_mode()
    def score(self, query, document, pictures, instruction=DEFAULT):
        states = hidden_states(self._subject, self.text(query, document, instruction), pictures)
        no, yes = (self.model.lm_head.weight[WORDS[word]] for word in ("no", "yes"))
        return float(torch.sigmoid((yes - no) @ states[-1]))


@pytest.fixture(scope="module")
def reference(tmp_path_factory):
    return Reference(tmp_path_factory.mktemp("reranker"))


@pytest.fixture(scope="module")
def llm(reference):
    with LLM(str(reference.folder), **OPTIONS, **RERANKER) as llm:
        yield llm


def test_scores_of_pictures_and_texts(reference, llm):
    assert "score" in llm.engine.processor.tasks
    first, second = drawings(2, 11)
    documents = [
        "A robin sings.",
        {"multi_modal_data": {"image": first}},
        {"content": [{"type": "image", "image": second}, *words("A page.")]},
        {"multi_modal_data": {"image": [first, second]}},
    ]
    expected = [
        reference.score(words(QUERY), words("A robin sings."), []),
        reference.score(words(QUERY), [PICTURE], [first]),
        reference.score(words(QUERY), [PICTURE, *words("A page.")], [second]),
        reference.score(words(QUERY), [PICTURE, PICTURE], [first, second]),
    ]
    assert len({round(score, 4) for score in expected}) == len(expected)
    scores = [output.outputs.score for output in llm.score(QUERY, documents)]
    assert scores == pytest.approx(expected, abs=1e-4)
    ranked = llm.rerank(QUERY, documents, top_n=2)
    order = sorted(range(4), key=lambda index: -expected[index])
    assert [result.index for result in ranked] == order[:2]
    [output] = llm.score({"multi_modal_data": {"image": first}}, ["a text"])
    alone = reference.score([PICTURE], words("a text"), [first])
    assert output.outputs.score == pytest.approx(alone, abs=1e-4)


def test_an_instruction_takes_the_place_of_the_default(reference, llm):
    (page,) = drawings(1, 12)
    document = {"multi_modal_data": {"image": page}}
    [output] = llm.score(QUERY, [document], instruction="Find it.")
    expected = reference.score(words(QUERY), [PICTURE], [page], "Find it.")
    assert output.outputs.score == pytest.approx(expected, abs=1e-4)


def test_marks_in_texts_stay_text(reference, llm):
    """A query that looks like a place of the template, or like a picture, is neither."""
    (page,) = drawings(1, 13)
    document = {"multi_modal_data": {"image": page}}
    [output] = llm.score("{document}", [document])
    expected = reference.score(words("{document}"), [PICTURE], [page])
    assert output.outputs.score == pytest.approx(expected, abs=1e-4)
    [typed] = llm.score("<|image_pad|>", [document])
    assert typed.error is None
    assert len(typed.prompt_token_ids) > len(output.prompt_token_ids)


@pytest.mark.parametrize(
    ("query", "document", "options", "reason"),
    [
        ("", {"multi_modal_data": {"image": drawings(1)}}, {}, "the text is empty"),
        (QUERY, {"multi_modal_data": {"video": [3]}}, {}, "video"),
        (QUERY, {"content": [{"type": "sound"}]}, {}, "sound"),
        (QUERY, {"content": "text"}, {}, "must be {'content': "),
        (QUERY, {"prompt": ITEM, "multi_modal_data": {"image": drawings(1)}}, {}, "of its own"),
        (
            QUERY,
            {"multi_modal_data": {"image": drawings(1)}},
            {"truncate_prompt_tokens": 20},
            "prompts with media are not truncated",
        ),
    ],
)
def test_refusals(llm, query, document, options, reason):
    with pytest.raises(RequestError, match=reason):
        llm.score(query, [document], **options)
    assert llm.score(QUERY, ["next"])[0].error is None


async def test_routes(reference):
    first, second = drawings(2, 14)
    documents = [{"image": url_of(first)}, {"content": [part_of(second), *words("A page.")]}, "b"]
    expected = [
        reference.score(words(QUERY), [PICTURE], [first]),
        reference.score(words(QUERY), [PICTURE, *words("A page.")], [second]),
        reference.score(words(QUERY), words("b"), []),
    ]
    found = await answers(
        reference.folder,
        [
            ("/score", {"queries": QUERY, "documents": documents}),
            ("/rerank", {"query": QUERY, "documents": documents}),
            ("/v2/rerank", {"query": QUERY, "documents": documents}),
            ("/score", {"queries": {"image": url_of(first)}, "documents": ["b"]}),
            ("/rerank", {"query": QUERY, "documents": [{"image": "data:,"}]}),
        ],
        **{**OPTIONS, **RERANKER},
    )
    assert [status for status, _ in found] == [200, 200, 200, 200, 400], found
    scores = [item["score"] for item in found[0][1]["data"]]
    assert scores == pytest.approx(expected, abs=1e-4)
    order = sorted(range(3), key=lambda index: -expected[index])
    for _, ranked in found[1:3]:
        assert [result["index"] for result in ranked["results"]] == order
        assert [result["relevance_score"] for result in ranked["results"]] == pytest.approx(
            sorted(expected, reverse=True), abs=1e-4
        )
    alone = reference.score([PICTURE], words("b"), [first])
    assert found[3][1]["data"][0]["score"] == pytest.approx(alone, abs=1e-4)
