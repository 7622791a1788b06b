"""Late interaction through the whole engine, against transformers and NumPy: markers, filled
queries, lengths, tokens left out."""

from __future__ import annotations

import asyncio
import json
import string

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors
from toolkit_lm import LLM, AsyncLLM, PoolingParams, VllmConfig
from toolkit_lm.errors import CheckpointError, ConfigError, RequestError

CLS = 0
SEP = 1
MASK = 2
PAD = 3
QUERY_MARKER = 5
DOCUMENT_MARKER = 6
SPECIAL = ["[CLS]", "[SEP]", "[MASK]", "[PAD]", "[UNK]", "[unused0]", "[unused1]"]
LETTERS = [*string.ascii_lowercase, *string.punctuation]
VOCAB = {
    word: number
    for number, word in enumerate([*SPECIAL, *LETTERS, *(f"##{letter}" for letter in LETTERS)])
}
ADDED = {"[Q] ": len(VOCAB), "[D] ": len(VOCAB) + 1}
PUNCTUATION = {VOCAB[mark] for mark in string.punctuation}
QUERIES = ["Who is it?", "a", "which of them, then: this one, or the other one that is longer"]
DOCUMENTS = [
    "it is me.",
    "no",
    "!?.",
    "somebody else (I think), but who could tell, after such a long time?",
    "who?",
]
DIM = 12
WEIGHT = torch.randn(DIM, 32, generator=torch.Generator().manual_seed(5))


class Reference:
    """A BERT, what its tokenizer makes of a text, and vectors and scores by hand."""

    def __init__(self, folder):
        self.folder = folder
        tokenizer = Tokenizer(models.WordPiece(VOCAB, unk_token="[UNK]"))
        tokenizer.normalizer = normalizers.BertNormalizer()
        tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
        tokenizer.post_processor = processors.TemplateProcessing(
            single="[CLS] $A [SEP]", special_tokens=[("[CLS]", CLS), ("[SEP]", SEP)]
        )
        # PyLate saves them so: the text is lower-cased before they are looked for, so they are
        # never found in it.
        tokenizer.add_tokens(list(ADDED))
        tokenizer.save(str(folder / "tokenizer.json"))
        self.tokenizer = tokenizer
        self.write("tokenizer_config.json", {"mask_token": "[MASK]"})
        shape = {
            "hidden_size": 32,
            "intermediate_size": 64,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
        }
        config = transformers.BertConfig(
            vocab_size=len(VOCAB) + len(ADDED), max_position_embeddings=64, **shape
        )
        self.model = transformers.BertModel(config).eval()
        generator = torch.Generator().manual_seed(7)
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(
                    torch.randn(parameter.shape, generator=generator) * 0.3
                    + float(name.endswith("LayerNorm.weight"))
                )
        self.model.save_pretrained(folder)

    def write(self, name, content):
        path = self.folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps(content))

    def pylate(self, **general):
        """The form of PyLate: a Dense is listed, the rest is said in one file."""
        paths = {
            "": "sentence_transformers.models.Transformer",
            "1_Dense": "pylate.models.Dense.Dense",
        }
        self.write(
            "modules.json",
            [
                {"idx": i, "name": str(i), "path": path, "type": paths[path]}
                for i, path in enumerate(paths)
            ],
        )
        self.dense()
        markers = {"query_prefix": "[Q] ", "document_prefix": "[D] "}
        self.write(
            "config_sentence_transformers.json",
            {"model_type": "ColBERT", "similarity_fn_name": "MaxSim", **markers, **general},
        )
        self.write("sentence_bert_config.json", {"max_seq_length": 40, "do_lower_case": False})

    def own(self, transformer, mask, **general):
        """The form of sentence-transformers: all is listed."""
        base = "sentence_transformers.base.modules"
        paths = {
            "": f"{base}.transformer.Transformer",
            "1_Dense": f"{base}.dense.Dense",
            "2_MultiVectorMask": (
                "sentence_transformers.multi_vector_encoder.modules.multi_vector_mask"
                ".MultiVectorMask"
            ),
            "3_Normalize": f"{base}.normalize.Normalize",
        }
        self.write(
            "modules.json",
            [
                {"idx": i, "name": str(i), "path": path, "type": paths[path]}
                for i, path in enumerate(paths)
            ],
        )
        names = {"module_input_name": "token_embeddings", "module_output_name": "token_embeddings"}
        self.dense(**names)
        self.write("2_MultiVectorMask/config.json", mask)
        self.write("3_Normalize/config.json", names)
        self.write("sentence_bert_config.json", transformer)
        self.write(
            "config_sentence_transformers.json", {"model_type": "MultiVectorEncoder", **general}
        )

    def dense(self, **names):
        config = {
            "in_features": 32,
            "out_features": DIM,
            "bias": False,
            "activation_function": "torch.nn.modules.linear.Identity",
        }
        self.write("1_Dense/config.json", config | names)
        save_file({"linear.weight": WEIGHT}, self.folder / "1_Dense" / "model.safetensors")

    def authors(self, metadata):
        """The form of ColBERT's authors: the projection lies among the weights."""
        tensors = {
            f"bert.{name}": tensor
            for name, tensor in load_file(self.folder / "model.safetensors").items()
        }
        save_file(tensors | {"linear.weight": WEIGHT}, self.folder / "model.safetensors")
        config = json.loads((self.folder / "config.json").read_text())
        self.write("config.json", config | {"architectures": ["HF_ColBERT"], "dim": DIM})
        if metadata is not None:
            self.write("artifact.metadata", {"similarity": "cosine", "nbits": 2, **metadata})

    def ids(self, text, marker=None, most=64):
        """[CLS], the marker, the text, [SEP]."""
        start = [CLS] if marker is None else [CLS, marker]
        return (
            start
            + self.tokenizer.encode(text, add_special_tokens=False).ids[: most - len(start) - 1]
            + [SEP]
        )

    def vectors(self, ids, num_attended=None):
        mask = torch.arange(len(ids))[None] < (num_attended or len(ids))
        with torch.inference_mode():
            states = (
                self.model(torch.tensor([ids]), attention_mask=mask.long()).last_hidden_state[0]
                @ WEIGHT.T
            )
        return torch.nn.functional.normalize(states, dim=-1).numpy()

    def compared(self, ids, left_out=frozenset()):
        return self.vectors(ids)[[token not in left_out for token in ids]]


@pytest.fixture
def reference(tmp_path):
    return Reference(tmp_path)


def filled(ids, length, token=MASK):
    return ids + [token] * (length - len(ids))


def max_sim(query, document):
    return sum(max(float(np.dot(one, other)) for other in document) for one in query)


def check(folder, queries, documents, score=max_sim):
    """`queries`, `documents`: token ids as they are to be read, and the vectors that are
    compared."""
    expected = [[score(query, document) for _, document in documents] for _, query in queries]
    # The scores show what is tested.
    assert np.ptp(expected) > 0.05
    with LLM(str(folder)) as llm:
        for text, scores in zip(QUERIES, expected, strict=True):
            np.testing.assert_allclose(
                [one.outputs.score for one in llm.score(text, DOCUMENTS, use_tqdm=False)],
                scores,
                rtol=1e-5,
                atol=1e-5,
            )
            ranked = [one.index for one in llm.rerank(text, DOCUMENTS, use_tqdm=False)]
            assert ranked == sorted(range(len(scores)), key=lambda i: -scores[i])
        for name, texts, roles in (("query", QUERIES, queries), ("document", DOCUMENTS, documents)):
            outputs = llm.encode(
                texts, pooling_task="token_embed", prompt_name=name, use_tqdm=False
            )
            for output, (ids, vectors) in zip(outputs, roles, strict=True):
                assert output.prompt_token_ids == ids
                compared = llm.engine.processor.pooling.texts.roles[name].compared(
                    output.prompt_token_ids
                )
                np.testing.assert_allclose(output.outputs.data[compared], vectors, atol=1e-5)


class TestPyLate:
    @pytest.fixture
    def written(self, reference):
        reference.pylate(query_length=24, document_length=41, attend_to_expansion_tokens=True)
        return reference

    def query(self, reference, text):
        return filled(reference.ids(text, ADDED["[Q] "], 24), 24)

    def test_scores(self, written):
        # Documents have 41 tokens at most, although PyLate's own count, which leaves out the
        # marker, is 40.
        documents = [written.ids(text, ADDED["[D] "], 41) for text in DOCUMENTS]
        assert max(map(len, documents)) == 41
        queries = [self.query(written, text) for text in QUERIES]
        assert [ids.count(MASK) for ids in queries] == [13, 20, 0]
        check(
            written.folder,
            [(ids, written.vectors(ids)) for ids in queries],
            [(ids, written.compared(ids, PUNCTUATION)) for ids in documents],
        )

    def test_other_requests_have_no_role(self, written):
        text = QUERIES[0]
        ids = written.ids(QUERIES[0])
        with LLM(str(written.folder)) as llm:
            assert llm.engine.tasks == ("token_embed",)
            with pytest.raises(RequestError, match="Supported: token_embed"):
                llm.embed(text)
            plain, tokens = llm.encode(
                [text, {"prompt_token_ids": ids}], pooling_task="token_embed", use_tqdm=False
            )
            [cut] = llm.encode(
                text,
                pooling_task="token_embed",
                prompt_name="query",
                truncate_prompt_tokens=6,
                use_tqdm=False,
            )
            with pytest.raises(RequestError, match="Known: document, query"):
                llm.encode(text, pooling_task="token_embed", prompt_name="passage")
        for output in (plain, tokens):
            assert output.prompt_token_ids == ids
            np.testing.assert_allclose(output.outputs.data, written.vectors(ids), atol=1e-5)
        # The text is cut, and the query filled up all the same.
        assert cut.prompt_token_ids == filled(written.ids(text, ADDED["[Q] "], 6), 24)

    def test_async(self, written):
        async def encode():
            async with AsyncLLM(VllmConfig.make(model=str(written.folder))) as llm:
                return await llm.encode_many(
                    [QUERIES[0]], PoolingParams(task="token_embed"), prompt_name="query"
                )

        [output] = asyncio.run(encode())
        np.testing.assert_allclose(
            output.outputs.data, written.vectors(self.query(written, QUERIES[0])), atol=1e-5
        )

    def test_no_expansion(self, reference):
        reference.pylate(
            do_query_expansion=False,
            query_length=9,
            document_length=15,
            skiplist_words=["i"],
            query_prefix="[X]",
        )
        # A marker that is no token is text.
        queries = [reference.ids(f"[X]{text}", None, 9) for text in QUERIES]
        documents = [reference.ids(text, ADDED["[D] "], 15) for text in DOCUMENTS]
        check(
            reference.folder,
            [(ids, reference.vectors(ids)) for ids in queries],
            [(ids, reference.compared(ids, {VOCAB["i"]})) for ids in documents],
        )

    def test_prompts_follow_the_marker(self, reference):
        reference.pylate(
            query_length=30,
            attend_to_expansion_tokens=True,
            prompts={"query": "search: ", "document": "[D] text: "},
        )
        queries = [
            filled(reference.ids(f"search: {text}", ADDED["[Q] "], 30), 30) for text in QUERIES
        ]
        documents = [reference.ids(f"text: {text}", ADDED["[D] "])[:64] for text in DOCUMENTS]
        reference.write("sentence_bert_config.json", {"max_seq_length": 64})
        check(
            reference.folder,
            [(ids, reference.vectors(ids)) for ids in queries],
            [(ids, reference.compared(ids, PUNCTUATION)) for ids in documents],
        )


class TestSentenceTransformers:
    def test_queries_of_a_least_length(self, reference):
        expansion = {"strategy": "min", "length": 16, "attend": True, "token": "[PAD]"}
        skiplist = {
            "skiplist_words": ["o", "?", "missing"],
            "skiplist_tasks": ["query", "document"],
        }
        prompts = {"query": "q ", "document": "d "}
        reference.own(
            {"query_expansion": expansion, "query_length": 28, "document_length": 20},
            skiplist,
            prompts=prompts,
        )
        queries = [filled(reference.ids(f"q {text}", None, 28), 16, PAD) for text in QUERIES]
        assert [len(ids) for ids in queries] == [16, 16, 28]
        documents = [reference.ids(f"d {text}", None, 20) for text in DOCUMENTS]
        left_out = {VOCAB["o"], VOCAB["?"]}
        check(
            reference.folder,
            [(ids, reference.compared(ids, left_out)) for ids in queries],
            [(ids, reference.compared(ids, left_out)) for ids in documents],
        )

    def test_the_mean(self, reference):
        reference.own(
            {},
            {"skiplist_words": [*string.punctuation], "skiplist_tasks": []},
            similarity_fn_name="meanmaxsim",
        )
        check(
            reference.folder,
            [(ids, reference.vectors(ids)) for ids in map(reference.ids, QUERIES)],
            [(ids, reference.vectors(ids)) for ids in map(reference.ids, DOCUMENTS)],
            lambda query, document: max_sim(query, document) / len(query),
        )

    def test_only_some_tokens_are_kept(self, reference):
        kept = [VOCAB["!"], VOCAB["?"]]
        reference.own({}, {"skiplist_words": ["!"], "keep_only_token_ids": kept})
        queries = [(ids, reference.vectors(ids)) for ids in map(reference.ids, QUERIES)]
        others = frozenset(range(200)) - {VOCAB["?"]}
        documents = [
            (ids, reference.compared(ids, others)) for ids in map(reference.ids, DOCUMENTS)
        ]
        # A document without tokens to compare fits worst.
        check(
            reference.folder,
            queries,
            documents,
            lambda query, document: max_sim(query, document) if len(document) else -1e9,
        )

    def test_unattended_tokens_that_nobody_compares_change_nothing(self, reference):
        reference.own({"query_expansion": {"strategy": "fixed", "length": 8}}, {})
        modules = json.loads((reference.folder / "modules.json").read_text())
        reference.write(
            "modules.json", [module for module in modules if "Mask" not in module["type"]]
        )
        queries = [reference.ids(text, None, 8) for text in QUERIES]
        check(
            reference.folder,
            [(ids, reference.vectors(ids)) for ids in queries],
            [(ids, reference.vectors(ids)) for ids in map(reference.ids, DOCUMENTS)],
        )


class TestAuthors:
    @pytest.mark.parametrize("mask_punctuation", [True, False])
    def test_scores(self, reference, mask_punctuation):
        lengths = {"query_maxlen": 20, "doc_maxlen": 30}
        reference.authors(
            lengths | {"attend_to_mask_tokens": True, "mask_punctuation": mask_punctuation}
        )
        queries = [filled(reference.ids(text, QUERY_MARKER, 20), 20) for text in QUERIES]
        documents = [reference.ids(text, DOCUMENT_MARKER, 30) for text in DOCUMENTS]
        left_out = PUNCTUATION if mask_punctuation else frozenset()
        check(
            reference.folder,
            [(ids, reference.vectors(ids)) for ids in queries],
            [(ids, reference.compared(ids, left_out)) for ids in documents],
        )

    def test_markers_and_defaults(self, reference):
        reference.authors(
            {"attend_to_mask_tokens": True, "query_token_id": "[PAD]", "doc_token_id": "z"}
        )
        queries = [filled(reference.ids(text, PAD, 32), 32) for text in QUERIES]
        documents = [reference.ids(text, VOCAB["z"]) for text in DOCUMENTS]
        check(
            reference.folder,
            [(ids, reference.vectors(ids)) for ids in queries],
            [(ids, reference.compared(ids, PUNCTUATION)) for ids in documents],
        )

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("similarity", "l2"),
            ("interaction", "flipr"),
            ("query_maxlen", 0),
            ("doc_maxlen", "180"),
        ],
    )
    def test_what_is_not_understood_is_refused(self, reference, key, value):
        reference.authors({"attend_to_mask_tokens": True, key: value})
        with pytest.raises(CheckpointError, match=rf"artifact\.metadata.*{key}"):
            LLM(str(reference.folder))


class TestUnattended:
    """Queries are filled up with tokens that attention does not see: no token's vector depends on
    them, and they are compared."""

    @pytest.mark.parametrize("form", ["PyLate", "authors"])
    def test_scores(self, reference, form):
        if form == "PyLate":
            reference.pylate(document_length=30)
            markers = tuple(ADDED.values())
        else:
            reference.authors({"doc_maxlen": 30})
            markers = QUERY_MARKER, DOCUMENT_MARKER
        texts = [reference.ids(text, markers[0], 32) for text in QUERIES]
        assert [len(ids) for ids in texts] == [11, 4, 32]
        documents = [reference.ids(text, markers[1], 30) for text in DOCUMENTS]
        check(
            reference.folder,
            [(filled(ids, 32), reference.vectors(filled(ids, 32), len(ids))) for ids in texts],
            [(ids, reference.compared(ids, PUNCTUATION)) for ids in documents],
        )

    def test_a_least_length(self, reference):
        reference.own({"query_expansion": {"strategy": "min", "length": 16}}, {})
        texts = [reference.ids(text) for text in QUERIES]
        check(
            reference.folder,
            [(filled(ids, 16), reference.vectors(filled(ids, 16), len(ids))) for ids in texts],
            [(ids, reference.vectors(ids)) for ids in map(reference.ids, DOCUMENTS)],
        )

    def test_language_models_cannot(self, make_llama, tmp_path):
        _, model = make_llama("late", hidden_size=32, num_attention_heads=4)
        reference = Reference(tmp_path)
        model.save_pretrained(tmp_path)
        reference.pylate()
        with pytest.raises(CheckpointError, match="Only encoders can do that"):
            LLM(str(tmp_path))


class TestRefused:
    def test_lengths_that_contradict_each_other(self, reference):
        reference.own(
            {
                "query_expansion": {"strategy": "fixed", "length": 16, "attend": True},
                "query_length": 12,
            },
            {},
        )
        with pytest.raises(CheckpointError, match="pads queries to 16 tokens, but cuts them to 12"):
            LLM(str(reference.folder))

    @pytest.mark.parametrize("token", [None, "[MISSING]"])
    def test_no_token_to_fill_up_with(self, reference, token):
        reference.own(
            {
                "query_expansion": {
                    "strategy": "fixed",
                    "length": 16,
                    "attend": True,
                    "token": token,
                }
            },
            {},
        )
        if token is None:
            text = (reference.folder / "tokenizer.json").read_text()
            (reference.folder / "tokenizer.json").write_text(text.replace("[MASK]", "[GONE]"))
        with pytest.raises(
            CheckpointError, match=r"(mask token|MISSING).*tokenizer\.json' does not have"
        ):
            LLM(str(reference.folder))

    def test_no_room_for_a_filled_up_query(self, reference):
        reference.pylate(query_length=24, attend_to_expansion_tokens=True)
        with pytest.raises(
            ConfigError, match=r"max_model_len is 20.*pads its queries to 24 tokens"
        ):
            LLM(str(reference.folder), max_model_len=20)
