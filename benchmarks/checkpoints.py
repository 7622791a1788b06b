"""Random checkpoints in Hugging Face layout, of the shapes that benchmarks use."""

from __future__ import annotations

from pathlib import Path

VOCAB_SIZE = 32000


def make_llama_160m(folder: Path) -> Path:
    """A Llama of 153 M random parameters in bf16. Its tokens are the bytes, and words that tell their ids: " w260", " w261", ...

    Needs torch, transformers and tokenizers.
    """
    import torch
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

    if (folder / "config.json").exists():
        return folder
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=4096,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # A space is written as G with a dot above.
    words = [f"\u0120w{i}" for i in range(4 + len(alphabet), VOCAB_SIZE)]
    tokenizer = Tokenizer(models.BPE(vocab={token: i + 4 for i, token in enumerate([*alphabet, *words])}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder
