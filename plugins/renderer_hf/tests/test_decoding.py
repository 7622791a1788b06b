"""Streams: what comes out in pieces is the text of the whole, and never half a character."""

from __future__ import annotations

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from toolkit_lm_renderer_hf.detokenizer import Detokenizer, TextStream

SHARED = settings(
    suppress_health_check=[HealthCheck.function_scoped_fixture], deadline=None, max_examples=200
)
LISTS = st.lists(st.lists(st.integers(0, 450), max_size=5), max_size=12)
TEXT = st.text(st.characters(codec="utf-8", exclude_categories=["Cs"]), min_size=1, max_size=40)


def stream_all(detokenizer, lists, skip=True) -> str:
    stream = TextStream(detokenizer, skip)
    return "".join([stream.push(ids) for ids in lists]) + stream.flush()


@SHARED
@given(lists=LISTS, skip=st.booleans())
def test_pushes_and_flush_make_the_decoded_text(tokenizer, lists, skip):
    detokenizer = Detokenizer(tokenizer)
    together = [token_id for ids in lists for token_id in ids]
    assert stream_all(detokenizer, lists, skip) == detokenizer.decode(
        together, skip_special_tokens=skip
    )


@SHARED
@given(ids=st.lists(st.integers(0, 450), max_size=30), skip=st.booleans())
def test_byte_level_decoding_equals_that_of_tokenizers(byte_level, ids, skip):
    assert Detokenizer(byte_level).decode(ids, skip_special_tokens=skip) == byte_level.decode(
        ids, skip_special_tokens=skip
    )


@SHARED
@given(text=TEXT, skip=st.booleans())
def test_decoding_of_real_text_equals_that_of_tokenizers(tokenizer, text, skip):
    ids = tokenizer.encode(text).ids
    assert stream_all(Detokenizer(tokenizer), [[i] for i in ids], skip) == tokenizer.decode(
        ids, skip_special_tokens=skip
    )


@SHARED
@given(pieces=st.lists(st.integers(261, 419), max_size=30))
def test_decoding_of_any_pieces_equals_that_of_tokenizers(tokenizer, pieces):
    assert Detokenizer(tokenizer).decode(pieces, skip_special_tokens=True) == tokenizer.decode(
        pieces
    )


def test_an_unfinished_character_is_held_back(tokenizer):
    ids = tokenizer.encode("a😀").ids
    stream = TextStream(Detokenizer(tokenizer), True)
    texts = [stream.push([token_id]) for token_id in ids]
    assert texts[-1] == "😀"
    assert "�" not in "".join(texts)
    cut = TextStream(Detokenizer(tokenizer), True)
    assert [cut.push([token_id]) for token_id in ids[:-1]][-1] == ""
    assert cut.flush() == "�"


def test_bytes_that_make_no_character_are_not_held_for_ever(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    last = tokenizer.encode("😀").ids[-1]
    stream = TextStream(detokenizer, True)
    assert "".join(stream.push([last]) for _ in range(10)) == "�" * 10


def test_a_skipped_token_does_not_count_as_the_first(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    ids = tokenizer.encode("The cat").ids
    assert detokenizer.decode([1, *ids, 2], skip_special_tokens=True) == "The cat"
    assert detokenizer.decode([1, *ids], skip_special_tokens=False) == tokenizer.decode(
        [1, *ids], skip_special_tokens=False
    )


def test_output_goes_on_from_the_prompts_text(tokenizer):
    detokenizer = Detokenizer(tokenizer)
    prompt = tokenizer.encode("The cat").ids
    output = tokenizer.encode("The dog").ids
    after = TextStream(detokenizer, True, [1, *prompt, 4])
    assert detokenizer.decode(prompt, skip_special_tokens=True) + after.push(
        output
    ) == tokenizer.decode(prompt + output)
    assert TextStream(detokenizer, True, [1]).push(output) == "The dog"


def test_token_texts(make_renderer, tokenizer):
    renderer = make_renderer(tokenizer)
    ids = tokenizer.encode("The cat").ids
    assert "".join(renderer.token_texts(ids)).strip() == "The cat"
    assert renderer.token_texts([2, 4]) == ["</s>", "<|im_end|>"]
    assert renderer.token_texts([tokenizer.encode("😀").ids[-1]]) == ["�"]


def test_vocabulary_texts(make_renderer, tokenizer):
    """Token strings of vLLM: entries of the vocabulary, and an empty text if an id has none."""
    ids = tokenizer.encode("The cat").ids
    texts = make_renderer(tokenizer).vocabulary_texts([*ids, 10**6])
    assert texts == [*tokenizer.encode("The cat").tokens, ""]


def _trained(model, trainer, pre_tokenizer, decoder) -> Tokenizer:
    tokenizer = Tokenizer(model)
    tokenizer.pre_tokenizer = pre_tokenizer
    tokenizer.decoder = decoder
    tokenizer.train_from_iterator(
        ["the cat sat on the mat unbelievably", "don't stop , now !"] * 5, trainer
    )
    return tokenizer


OTHERS = {
    "wordpiece": lambda: _trained(
        models.WordPiece(unk_token="[UNK]"),
        trainers.WordPieceTrainer(vocab_size=60, special_tokens=["[UNK]"], show_progress=False),
        pre_tokenizers.BertPreTokenizer(),
        decoders.WordPiece(),
    ),
    "unigram": lambda: _trained(
        models.Unigram(),
        trainers.UnigramTrainer(
            vocab_size=40, special_tokens=["<unk>"], unk_token="<unk>", show_progress=False
        ),
        pre_tokenizers.Metaspace(),
        decoders.Metaspace(),
    ),
    "words": lambda: _trained(
        models.WordLevel(unk_token="[UNK]"),
        trainers.WordLevelTrainer(special_tokens=["[UNK]"], show_progress=False),
        pre_tokenizers.Whitespace(),
        None,
    ),
}


@pytest.mark.parametrize("kind", list(OTHERS))
def test_other_decoders(kind):
    tokenizer = OTHERS[kind]()
    detokenizer = Detokenizer(tokenizer)

    @settings(deadline=None, max_examples=100)
    @given(st.lists(st.integers(1, tokenizer.get_vocab_size() - 1), max_size=20))
    def check(ids):
        assert stream_all(detokenizer, [[i] for i in ids]) == tokenizer.decode(ids)

    check()
