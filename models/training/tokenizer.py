"""The tokenizer that all the models share: every byte is a token, and so is every word of the task family.

A word in the vocabulary becomes one token; anything else falls back to its bytes, so any UTF-8 text comes back exactly.
There are no merges: digits and the letters of a word that nobody knows stay one token each, which is what copying,
reversing and adding need.
"""

import argparse
import json
from pathlib import Path
from typing import Any, NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, processors

from models.training import words

PAD, BOS, EOS = "<|pad|>", "<|bos|>", "<|eos|>"
ROLES = ("system", "user", "assistant")
SPECIAL_TOKENS = (PAD, BOS, EOS, *(f"<|{role}|>" for role in ROLES))
VOCABULARY_SIZE = 704
POSITIONS = 4096

# Functions are named, not described: the models are not trained on them. A call that is forced is shaped by its schema.
CHAT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}{{ '<|system|>Functions:' }}"
    "{% for tool in tools %}{{ ' ' + tool['function']['name'] }}{% endfor %}{{ eos_token }}{% endif %}"
    "{% for message in messages %}"
    "{% set role = {'developer': 'system', 'tool': 'user'}.get(message['role'], message['role']) %}"
    "{% if role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('This model knows the roles system, user, assistant and tool, not ' + role + '.') }}{% endif %}"
    "{{ '<|' + role + '|>' + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ call['function']['name'] + ' ' + (call['function']['arguments'] | tojson) }}{% endfor %}"
    "{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)
# Functions are listed with their parameters; a call stands between tags, as in the models of Hermes and Qwen.
AGENT_TEMPLATE = (
    "{{ bos_token }}"
    "{% if tools %}{{ '<|system|>Functions:' }}{% for tool in tools %}{% set function = tool['function'] %}"
    "{{ '\n' + function['name'] + '(' }}"
    "{% for key, value in ((function['parameters'] or {}).get('properties') or {}).items() %}"
    "{{ key + ': ' }}{{ value['enum'] | join('|') if value['enum'] else "
    "value['type'] if value['type'] is string else 'any' }}"
    "{{ '' if loop.last else ', ' }}{% endfor %}"
    "{{ ') ' + (function['description'] or '')[:100] }}{% endfor %}{{ eos_token }}{% endif %}"
    "{% for message in messages %}"
    "{% set role = {'developer': 'system', 'tool': 'user'}.get(message['role'], message['role']) %}"
    "{% if role not in ['system', 'user', 'assistant'] %}"
    "{{ raise_exception('This model knows the roles system, user, assistant and tool, not ' + role + '.') }}{% endif %}"
    "{{ '<|' + role + '|>' + ('Result: ' if message['role'] == 'tool' else '') + (message['content'] or '') }}"
    "{% for call in message['tool_calls'] or [] %}"
    "{{ '' if loop.first else '\n' }}"
    "{{ '<tool_call>{\"name\": \"' + call['function']['name'] + '\", \"arguments\": ' }}"
    "{{ (call['function']['arguments'] | tojson) + '}</tool_call>' }}{% endfor %}"
    "{{ eos_token }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|assistant|>' }}{% endif %}"
)


class Flavour(NamedTuple):
    """Template, and words of the vocabulary in place of unused ones.

    Attributes:
        tags: Tokens that are found in any text, as they stand.
        words: Further words that are one token each, in the byte-level alphabet (Ġ is a blank).
    """

    template: str
    tags: tuple[str, ...] = ()
    words: tuple[str, ...] = ()


TASKS = Flavour(CHAT_TEMPLATE)
AGENT = Flavour(
    AGENT_TEMPLATE,
    ("<tool_call>", "</tool_call>"),
    ("Functions", "Result", "name", "arguments", "parameters", "Ġstring", "Ġinteger", "Ġnumber", "Ġboolean"),
)

# Without them a model of this size writes digits, or a string, up to max_tokens.
SCHEMA_BOUNDS = {
    "number_max": 999_999_999,
    "string_characters_max": 40,
    "array_items_max": 4,
    "object_properties_max": 4,
}

# Letters with the blank before them, then runs of anything else: a word and its blank are one piece, as in GPT-2.
_PIECES = Regex(r" ?\p{L}+|[^\p{L} ]+| ")


def build_tokenizer(flavour: Flavour = TASKS) -> Tokenizer:
    """Builds the tokenizer of a flavour; the same one every time."""
    listed = dict.fromkeys((*SPECIAL_TOKENS, *_byte_symbols(), *_word_tokens(), *flavour.tags, *flavour.words))
    vocabulary = {token: index for index, token in enumerate(listed)}
    for index in range(len(vocabulary), VOCABULARY_SIZE):
        vocabulary[f"<|unused_{index}|>"] = index
    # With ignore_merges a piece that is in the vocabulary is one token, though no merges lead to it.
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(_PIECES, behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{BOS} $A", pair=f"{BOS} $A $B", special_tokens=[(BOS, vocabulary[BOS])]
    )
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS])
    tokenizer.add_tokens([AddedToken(tag, special=False, normalized=False) for tag in flavour.tags])
    return tokenizer


def _byte_symbols() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def _word_tokens() -> list[str]:
    """A word that may open a text has a token without a blank before it, one that may follow another has one with it.

    The blank is Ġ in the byte-level alphabet; letters of ASCII stand for themselves.
    """
    listed = [word for group in words.CATEGORIES.values() for word in group] + words.UNITS + words.TENS
    following = [*words.INNER_WORDS, *listed, *words.ADJECTIVES, *words.VERBS, *words.OPENERS]
    return list(dict.fromkeys([*words.OPENING_WORDS, *listed, *(f"Ġ{word}" for word in following)]))


def token_id(tokenizer: Tokenizer, token: str) -> int:
    """The id of a token. Raises KeyError when there is no such token."""
    found = tokenizer.token_to_id(token)
    if found is None:
        raise KeyError(token)
    return found


def tokenizer_config(flavour: Flavour = TASKS) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "bos_token": BOS,
        "eos_token": EOS,
        "pad_token": PAD,
        "additional_special_tokens": list(SPECIAL_TOKENS[3:]),
        "add_bos_token": True,
        "clean_up_tokenization_spaces": False,
        "model_max_length": POSITIONS,
        "chat_template": flavour.template,
    }


def write_tokenizer(folder: Path, flavour: Flavour = TASKS) -> None:
    """Writes tokenizer.json and tokenizer_config.json as Hugging Face reads them, and ingress's schema_bounds.json."""
    folder.mkdir(parents=True, exist_ok=True)
    build_tokenizer(flavour).save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(tokenizer_config(flavour), indent=2) + "\n")
    (folder / "schema_bounds.json").write_text(json.dumps(SCHEMA_BOUNDS, indent=2) + "\n")


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    write_tokenizer(parser.parse_args().folder)
