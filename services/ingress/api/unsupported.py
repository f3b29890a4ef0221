"""Parameters of OpenAI, Anthropic and vLLM 0.32 that no request has here: what to do instead, what changes nothing."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from services.ingress.api.errors import unsupported
from services.ingress.api.requests import BatchRequest

_GUIDED = "use `structured_outputs` or `response_format`"
_BEAMS = "there is no beam search"
_CUT = "use `truncate_prompt_tokens`"
_STATELESS = "send the whole conversation as `input`"
_TEXT = "the output is text"
_NOTHING = "leave it out"
_ALONE = "send such a chat alone"


class Unsupported(NamedTuple):
    """A parameter: what to do instead, and the values besides null that mean the same as leaving it out."""

    instead: str
    harmless: tuple[Any, ...] = ()


UNSUPPORTED: dict[str, Unsupported] = {
    "audio": Unsupported(_TEXT),
    "best_of": Unsupported("use `n`", (1,)),
    "chat_template": Unsupported("the model's own template is used"),
    "chat_template_kwargs": Unsupported("only chats have a template", ({},)),
    "container": Unsupported("run code yourself"),
    "context_management": Unsupported("shorten the input", ([],)),
    "conversation": Unsupported(_STATELESS),
    "documents": Unsupported("put them into a message", ([],)),
    "early_stopping": Unsupported(_BEAMS, (False,)),
    "ec_transfer_params": Unsupported("engines encode images themselves; leave it out"),
    "embed_dtype": Unsupported("round the numbers yourself", ("float32",)),
    "enable_response_messages": Unsupported("use `/tokenize` on the messages", (False,)),
    "endianness": Unsupported("base64 is little-endian", ("native", "little")),
    "function_call": Unsupported("use `tool_choice`", ("none",)),
    "functions": Unsupported("use `tools`", ([],)),
    "guided_choice": Unsupported(_GUIDED),
    "guided_decoding_backend": Unsupported(_GUIDED),
    "guided_grammar": Unsupported(_GUIDED),
    "guided_json": Unsupported(_GUIDED),
    "guided_regex": Unsupported(_GUIDED),
    "inference_geo": Unsupported(_NOTHING),
    "instruction": Unsupported("put it into the query"),
    "kv_transfer_params": Unsupported("KV is moved by Millrace; leave it out"),
    "length_penalty": Unsupported(_BEAMS, (1.0,)),
    "logprob_token_ids": Unsupported("use `logprobs`"),
    "max_tokens_per_doc": Unsupported(_CUT, (0,)),
    "max_tokens_per_query": Unsupported(_CUT, (0,)),
    "mcp_servers": Unsupported("call the tools yourself", ([],)),
    "media_io_kwargs": Unsupported("images become RGB on white"),
    "mm_payload": Unsupported("send images in `messages`"),
    "mm_processor_kwargs": Unsupported("images are processed as the model's folder says; leave it out"),
    "modalities": Unsupported(_TEXT, (["text"],)),
    "moderation": Unsupported(_NOTHING),
    "padding": Unsupported(_NOTHING, ("do_not_pad",)),
    "prediction": Unsupported(_NOTHING),
    "previous_input_messages": Unsupported(_STATELESS),
    "priority": Unsupported("all requests have one priority", (0,)),
    "prompt": Unsupported("send `messages` or `input`"),
    "prompt_embeds": Unsupported("send text or token ids"),
    "repetition_detection": Unsupported("use `repetition_penalty`"),
    "request_id": Unsupported("send it as the header `x-request-id`"),
    "return_mm_kwargs": Unsupported(_NOTHING),
    "return_prompt_text": Unsupported("use `/detokenize` on `prompt_token_ids`"),
    "return_token_offsets": Unsupported("use `/tokenize` on the text"),
    "routed_experts_prompt_start": Unsupported(_NOTHING),
    "session_id": Unsupported("requests are placed by what is cached of their prompts; leave it out"),
    "spaces_between_special_tokens": Unsupported(_NOTHING, (True,)),
    "stream_interval": Unsupported("each message of the engine is one event; leave it out"),
    "suffix": Unsupported(_NOTHING, ("",)),
    "truncation": Unsupported("shorten the input", ("disabled",)),
    "use_beam_search": Unsupported(_BEAMS, (False,)),
    "verbosity": Unsupported(_NOTHING),
    "vllm_xargs": Unsupported(_NOTHING),
    "watermarking": Unsupported(_NOTHING),
    "web_search_options": Unsupported(_NOTHING),
}
#: Fields of a chat that a batch has none of.
OF_ONE_CHAT: dict[str, Unsupported] = {
    "continue_final_message": Unsupported(_ALONE, (False,)),
    "echo": Unsupported(_ALONE, (False,)),
    "kv_transfer_params": Unsupported(_ALONE),
    "n": Unsupported(_ALONE, (1,)),
    "prompt_logprobs": Unsupported(_ALONE),
    "stream": Unsupported(_ALONE, (False,)),
    "stream_options": Unsupported(_ALONE),
    "tool_choice": Unsupported(_ALONE, ("none",)),
    "tools": Unsupported(_ALONE, ([],)),
}


def without_unsupported(body: bytes, kind: type[msgspec.Struct]) -> bytes | None:
    """A JSON object without the unsupported parameters that ask for nothing; None where it has none.

    Raises:
        ApiError: 400 naming one that asks for something.
    """
    fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
    unknown = [name for name in UNSUPPORTED if name in fields and name not in kind.__struct_fields__]
    for name in unknown:
        _refuse(name, UNSUPPORTED[name], msgspec.json.decode(fields.pop(name)))
    return msgspec.json.encode(fields) if unknown else None


def refuse_of_one_chat(batch: BatchRequest) -> None:
    """Check that a batch asks for nothing that only a single chat can have.

    Raises:
        ApiError: 400 naming it.
    """
    for name, parameter in OF_ONE_CHAT.items():
        _refuse(name, parameter, msgspec.to_builtins(getattr(batch, name)))


def _refuse(name: str, parameter: Unsupported, value: Any) -> None:
    # A bool equals an int in Python: `best_of: true` is not `best_of: 1`.
    same = any(value == each and isinstance(value, bool) == isinstance(each, bool) for each in parameter.harmless)
    if value is not None and not same:
        raise unsupported(name, f"`{name}` is not supported: {parameter.instead}.")
