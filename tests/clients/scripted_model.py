"""A model for real vLLM that says what agents' programs need: a call first, and an answer when it is told its result.

Its next token follows from the last one alone, so that the length of a prompt is no matter. Its chat template chooses
what a prompt ends with, and so what is said.
"""

import json
from pathlib import Path
from typing import Any

#: What is run says so with words that the request does not have.
COMMAND, RESULT, ANSWER = "echo from-$((6 * 7))", "from-42", "It is 18 degrees."
CALLS: dict[str, dict[str, Any]] = {
    "exec_command": {"cmd": COMMAND},
    "Bash": {"command": COMMAND, "description": "Echo"},
}
LENGTH, WIDTH = 1 << 17, 32
TEMPLATE = """{% for message in messages %}<{{ message['role'] }}>{{ message['content'] }}
{%- for call in message['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>{% endfor %}
{%- endfor %}
{% set told = messages | selectattr('role', 'equalto', 'tool') | map(attribute='content') | join %}
{% set tools = (tools or []) | map(attribute='function.name') | list %}
{{- '<told>' if 'RESULT' in told else '<lost>' if told else '<Bash>' if 'Bash' in tools else '<exec_command>' }}"""


def build(folder: Path) -> Path:
    """Write its configuration, weights, tokenizer and template; return the folder."""
    import torch
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import LlamaConfig, LlamaForCausalLM

    words = {
        name: f"<tool_call>{json.dumps({'name': name, 'arguments': call})}</tool_call>" for name, call in CALLS.items()
    }
    words |= {"told": ANSWER, "lost": "Lost."}
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={letter: index for index, letter in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(f"<{name}>", special=True) for name in ("eos", *words)])
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in words.values()])
    end = tokenizer.token_to_id("<eos>")
    config = LlamaConfig(
        vocab_size=tokenizer.get_vocab_size(),
        hidden_size=WIDTH,
        intermediate_size=WIDTH,
        num_hidden_layers=1,
        num_attention_heads=1,
        num_key_value_heads=1,
        max_position_embeddings=LENGTH,
        bos_token_id=end,
        eos_token_id=end,
        tie_word_embeddings=False,
    )
    model = LlamaForCausalLM(config).to(torch.float32)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            weight.fill_(1.0 if "norm" in name else 0.0)
        seen, said = model.model.embed_tokens.weight, model.lm_head.weight
        for place, (name, text) in enumerate(words.items()):
            seen[tokenizer.token_to_id(f"<{name}>"), place] = said[tokenizer.token_to_id(text), place] = 100.0
            seen[tokenizer.token_to_id(text), -1] = said[end, -1] = 100.0
    model.save_pretrained(folder, safe_serialization=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eos>"}
    settings["chat_template"] = TEMPLATE.replace("RESULT", RESULT)
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder
