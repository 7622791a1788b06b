"""Texts and pairs joined from lists, against the package tokenizers."""

from __future__ import annotations

import time
import tracemalloc

import pytest
from tokenizers import Tokenizer, models, pre_tokenizers, processors
from toolkit_lm_renderer_hf.joining import Joiner

VOCAB = {token: i for i, token in enumerate(["[UNK]", "[CLS]", "[SEP]", "<s>", "</s>", *"bcdefgh"])}
SPECIAL = [(token, VOCAB[token]) for token in ("[CLS]", "[SEP]", "<s>", "</s>")]
PROCESSORS = {
    "none": None,
    "bert": processors.BertProcessing(("[SEP]", 2), ("[CLS]", 1)),
    "roberta": processors.RobertaProcessing(("</s>", 4), ("<s>", 3)),
    "template": processors.TemplateProcessing(
        single="<s> $A </s>", pair="<s> $A [SEP]:1 [SEP]:1 $B:1 </s>:1", special_tokens=SPECIAL
    ),
    "end only": processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B", special_tokens=SPECIAL
    ),
}


def make(name: str) -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel(VOCAB, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if PROCESSORS[name] is not None:
        tokenizer.post_processor = PROCESSORS[name]
    return tokenizer


@pytest.mark.parametrize("name", PROCESSORS)
@pytest.mark.parametrize("most", [None, 4, 5, 6, 7, 9, 12])
@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("b c d e", None),
        ("b c", "f"),
        ("b c d e f", "g h"),
        ("b", "c d e f g h"),
        ("b c d e", "f g h f g"),
    ],
)
def test_tokens_are_those_of_the_package(name, most, first, second):
    tokenizer = make(name)
    joiner = Joiner(make(name))
    ids = joiner.token_ids([first] if second is None else [first, second])
    ours = joiner.join(ids[first], None if second is None else ids[second], most)
    if most is not None:
        tokenizer.enable_truncation(most, strategy="longest_first")
    theirs = tokenizer.encode(first, second)
    assert ours.token_ids == theirs.ids
    if second is None:
        assert ours.second_text_start is None
    else:
        begin = (
            theirs.type_ids.index(1)
            if 1 in theirs.type_ids
            else next((i for i, t in enumerate(theirs.ids) if t in ids[second]), None)
        )
        # Where nothing of the second is left, and nothing has its type, there is no place to
        # compare.
        assert begin in (None, ours.second_text_start)


def test_each_text_is_tokenized_once(monkeypatch):
    joiner = Joiner(make("bert"))
    tokenized = []
    plain = Joiner._tokenize
    monkeypatch.setattr(
        Joiner, "_tokenize", lambda self, texts: tokenized.extend(texts) or plain(self, texts)
    )
    ids = joiner.token_ids(["b c", "d", "b c", "e", "b c"])
    assert tokenized == ["b c", "d", "e"] and ids["b c"] == [VOCAB["b"], VOCAB["c"]]


def test_long_pairs_are_cut_in_little_time_and_memory():
    """With the package's own truncation each of these pairs is 25,000 encodings."""
    joiner = Joiner(make("bert"))
    query = "b c " * 5000
    tracemalloc.start()
    begin = time.thread_time()
    ids = joiner.token_ids([query, *(f"{query} d" for _ in range(200))])
    joined = [joiner.join(ids[query], ids[f"{query} d"], 64) for _ in range(200)]
    seconds = time.thread_time() - begin
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert {len(one.token_ids) for one in joined} == {64}
    assert peak < 20 * 2**20 and seconds < 5
