"""Greedy answers behind a grammar, as ingress and vLLM make one of a request's schema.

The schema is the one that ingress sends (its bounds included), the grammar the one that vLLM's default backend compiles
with ``disable_any_whitespace``, which Millrace's workers set.
"""

import json

import msgspec
import torch
import xgrammar
from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerFast

from models.training.conversations import COMPACT, Conversation
from models.training.model import Llama
from models.training.tokenizer import EOS, SCHEMA_BOUNDS, VOCABULARY_SIZE, token_id
from services.ingress.api.model_schema_bounds import SchemaBounds, bounded_output
from services.ingress.api.requests import ChatRequest
from services.ingress.api.structured_outputs import structured_output
from services.ingress.api.tokenizer import TemplateTraits
from services.ingress.api.tools import plan_tools

TOKENS_MAX = 300
BOUNDS = SchemaBounds(**SCHEMA_BOUNDS)
_TRAITS = TemplateTraits(tools=True, hermes_calls=True, content_parts=False, developer=False)


def schema_text(conversation: Conversation) -> str | None:
    """JSON Schema that constrains the answer to a conversation's request; None for free text."""
    turns = [{"role": turn["role"], "content": turn["content"]} for turn in conversation.messages]
    fields = {"model": "agent", "messages": turns, "tools": conversation.tools or None, **conversation.demand}
    request = msgspec.convert(fields, ChatRequest)
    wanted = bounded_output(plan_tools(request, _TRAITS).structured or structured_output(request), BOUNDS)
    return wanted.json_schema if wanted is not None else None


class GrammarDecoder:
    """Greedy decoding of one model behind grammars."""

    def __init__(self, model: Llama, tokenizer: Tokenizer) -> None:
        self._model, self._tokenizer = model, tokenizer
        self._end = token_id(tokenizer, EOS)
        whole = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token=EOS)
        told = xgrammar.TokenizerInfo.from_huggingface(whole, vocab_size=VOCABULARY_SIZE, stop_token_ids=[self._end])
        self._compiler = xgrammar.GrammarCompiler(told, max_threads=1)
        self._mask = xgrammar.allocate_token_bitmask(1, VOCABULARY_SIZE)

    def is_right(self, prompt: list[int], conversation: Conversation) -> bool:
        """Whether the answer to a conversation's prompt is the JSON value that it should be."""
        schema = schema_text(conversation)
        assert schema is not None, "nothing constrains the answer"
        text = self._tokenizer.decode(self.answer(prompt, schema))
        try:
            return bool(json.loads(text) == json.loads("".join(part for part, _ in conversation.answer)))
        except ValueError:  # cut off at TOKENS_MAX
            return False

    @torch.inference_mode()
    def answer(self, prompt: list[int], schema: str) -> list[int]:
        """Tokens of the answer to a prompt, without its end."""
        grammar = self._compiler.compile_json_schema(schema, any_whitespace=False, separators=COMPACT)
        matcher = xgrammar.GrammarMatcher(grammar)
        tokens = list(prompt)
        while len(tokens) < len(prompt) + TOKENS_MAX:
            matcher.fill_next_token_bitmask(self._mask)
            allowed = allowed_tokens(self._mask[0])
            token = allowed[0] if len(allowed) == 1 else self._likeliest(tokens, allowed)
            if token == self._end:
                break
            matcher.accept_token(token)
            tokens.append(token)
        return tokens[len(prompt) :]

    def _likeliest(self, tokens: list[int], allowed: list[int]) -> int:
        last = self._model.hidden(torch.tensor([tokens]))[0, -1]
        return allowed[int((self._model.model.embed_tokens.weight[allowed] @ last).argmax())]


def allowed_tokens(mask: torch.Tensor) -> list[int]:
    """Tokens whose bits are set in an int32 mask of 32 tokens a word."""
    bits = (mask[:, None] >> torch.arange(32)) & 1
    return torch.nonzero(bits.flatten()).flatten().tolist()
