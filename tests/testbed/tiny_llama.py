"""A Llama with random weights and a byte-level tokenizer, written to a folder: real vLLM needs no more.

Random weights make sharp, varied distributions that expose any difference in sampler state, and need no training.
"""

import json
from pathlib import Path

#: A layer takes 0.8 ms of processor time a decode step.
LAYERS, WIDTH, HEADS, VOCABULARY = 2, 128, 4, 288
EOS = 257


def build(folder: Path, *, seed: int = 0, max_model_len: int = 1024) -> Path:
    """Writes config.json, weights and tokenizer to the folder, which is made where it is missing; returns it."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=VOCABULARY,
        hidden_size=WIDTH,
        intermediate_size=2 * WIDTH,
        num_hidden_layers=LAYERS,
        num_attention_heads=HEADS,
        num_key_value_heads=HEADS // 2,
        max_position_embeddings=max_model_len,
        bos_token_id=256,
        eos_token_id=EOS,
        tie_word_embeddings=False,
        initializer_range=0.08,
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    folder.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(folder, safe_serialization=True)
    write_tokenizer(folder)
    return folder


def write_tokenizer(folder: Path) -> None:
    """Writes one letter a byte, and specials up to VOCABULARY."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {letter: index for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    specials = ["<bos>", "<eos>", *(f"<extra{i}>" for i in range(VOCABULARY - 258))]
    tokenizer.add_special_tokens([AddedToken(name, special=True) for name in specials])
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<bos>", "eos_token": "<eos>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
