"""Every family keeps the contract of encoder-decoder models: the kit's tests."""

from encdec_families import VARIANTS, make_model, reference_logits
from toolkit_lm_devkit import EncoderDecoderConformance, write_tokenizer
from torch import tensor

VOCAB_SIZE = 272
"""At least 259, for the tokenizer of the kit."""
# Heads that four ranks can share, and as many positions as the kit asks for.
BART_LIKE = {"vocab_size": VOCAB_SIZE, "decoder_attention_heads": 4, "max_position_embeddings": 512}
UNBOUNDED = {"device": "cpu", "max_model_len": 112}


class EncDecConformance(EncoderDecoderConformance):
    """Conformance of one architecture of transformers."""

    architecture: str
    may_lack = ("final_logits_bias",)
    """Weights that a checkpoint need not have, or that an error calls by another name."""

    def make_checkpoint(self, folder, **variant):
        model = make_model(self.architecture, variant)
        model.save_pretrained(folder)
        write_tokenizer(folder, VOCAB_SIZE)
        return lambda encoder_ids, token_ids: reference_logits(
            model, tensor(list(encoder_ids)), tensor(list(token_ids))
        )

    def checked_weights(self, subject):
        yield from (
            name for name in super().checked_weights(subject) if not name.endswith(self.may_lack)
        )


def variants_of(architecture, **changes):
    """But for those whose decoder has a vocabulary of its own: the kit draws its prompts from the
    encoder's."""
    return {
        name: {**fields, **changes}
        for name, fields in VARIANTS[architecture].items()
        if "decoder_vocab_size" not in fields
    }


class TestBart(EncDecConformance):
    architecture = "BartForConditionalGeneration"
    variants = variants_of(architecture, **BART_LIKE)


class TestMBart(EncDecConformance):
    architecture = "MBartForConditionalGeneration"
    variants = variants_of(architecture, **BART_LIKE)


class TestPegasus(EncDecConformance):
    architecture = "PegasusForConditionalGeneration"
    variants = variants_of(architecture, **BART_LIKE)
    may_lack = ("final_logits_bias", "embed_positions.weight")


class TestMarian(EncDecConformance):
    architecture = "MarianMTModel"
    variants = variants_of(architecture, **BART_LIKE)


class TestT5(EncDecConformance):
    architecture = "T5ForConditionalGeneration"
    variants = variants_of(architecture, vocab_size=VOCAB_SIZE)
    engine_options = UNBOUNDED


class TestMT5(EncDecConformance):
    architecture = "MT5ForConditionalGeneration"
    variants = variants_of(architecture, vocab_size=VOCAB_SIZE)
    engine_options = UNBOUNDED


class TestT5Gemma(EncDecConformance):
    architecture = "T5GemmaForConditionalGeneration"
    variants = {
        name: {
            **fields,
            "vocab_size": VOCAB_SIZE,
            **{side: {**fields[side], "vocab_size": VOCAB_SIZE} for side in ("encoder", "decoder")},
        }
        for name, fields in VARIANTS[architecture].items()
    }
    engine_options = UNBOUNDED
    # Ranks cannot share the decoder's KV heads.
    tensor_parallel_sizes = (2,)
