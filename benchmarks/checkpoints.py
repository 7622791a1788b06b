"""Random checkpoints in Hugging Face layout, of the shapes that benchmarks use."""

from __future__ import annotations

import json
from pathlib import Path

VOCAB_SIZE = 32000


def make_llama_160m(folder: Path, positions: int = 4096, layers: int = 12) -> Path:
    """A Llama of 153 M random parameters in bf16, with the tokenizer of save_tokenizer. Needs
    torch, transformers and tokenizers."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    if (folder / "config.json").exists():
        return folder
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=VOCAB_SIZE,
        hidden_size=768,
        intermediate_size=3072,
        num_hidden_layers=layers,
        num_attention_heads=12,
        num_key_value_heads=4,
        max_position_embeddings=positions,
        rms_norm_eps=1e-5,
        tie_word_embeddings=False,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        dtype="bfloat16",
    )
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def make_qwen3_600m(folder: Path, positions: int = 4096) -> Path:
    """A Qwen3 of 473 M random parameters in bf16, of the 0.6B's shape but for the vocabulary. The
    same tokenizer."""
    import torch
    from transformers import Qwen3Config, Qwen3ForCausalLM

    if (folder / "config.json").exists():
        return folder
    torch.manual_seed(0)
    config = Qwen3Config(
        vocab_size=VOCAB_SIZE,
        hidden_size=1024,
        intermediate_size=3072,
        num_hidden_layers=28,
        num_attention_heads=16,
        num_key_value_heads=8,
        head_dim=128,
        max_position_embeddings=positions,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=3,
        dtype="bfloat16",
    )
    Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    save_tokenizer(folder)
    return folder


def make_minilm(folder: Path) -> Path:
    """An encoder of MiniLM-L6's shape with random parameters, mean pooling, and a WordPiece
    vocabulary of words "w0", "w1", ..."""
    import torch
    from transformers import BertConfig, BertModel, BertTokenizerFast

    if (folder / "config.json").exists():
        return folder
    torch.manual_seed(0)
    special = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]"]
    vocabulary = special + [f"w{i}" for i in range(30522 - len(special))]
    config = BertConfig(
        vocab_size=len(vocabulary),
        hidden_size=384,
        intermediate_size=1536,
        num_hidden_layers=6,
        num_attention_heads=12,
        max_position_embeddings=512,
    )
    BertModel(config).save_pretrained(folder)
    BertTokenizerFast(
        vocab={word: i for i, word in enumerate(vocabulary)}, model_max_length=512
    ).save_pretrained(folder)
    parts = [("Transformer", ""), ("Pooling", "1_Pooling"), ("Normalize", "2_Normalize")]
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.models.{kind}"}
        for i, (kind, path) in enumerate(parts)
    ]
    (folder / "modules.json").write_text(json.dumps(modules))
    (folder / "sentence_bert_config.json").write_text(
        json.dumps({"max_seq_length": 512, "do_lower_case": False})
    )
    (folder / "1_Pooling").mkdir()
    pooling = {"word_embedding_dimension": config.hidden_size, "pooling_mode_mean_tokens": True}
    (folder / "1_Pooling" / "config.json").write_text(json.dumps(pooling))
    (folder / "2_Normalize").mkdir()
    return folder


def save_tokenizer(folder: Path) -> None:
    """Its tokens are the bytes, and words that tell their ids: " w260", " w261", ..."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    # A space is written as G with a dot above.
    words = [f"\u0120w{i}" for i in range(4 + len(alphabet), VOCAB_SIZE)]
    tokenizer = Tokenizer(
        models.BPE(vocab={token: i + 4 for i, token in enumerate([*alphabet, *words])}, merges=[])
    )
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
