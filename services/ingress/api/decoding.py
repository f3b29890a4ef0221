"""Request bodies to Structs, with errors that name the field."""

from __future__ import annotations

import re
from typing import Any, TypeVar, cast

import msgspec

from services.ingress.api.errors import ApiError

T = TypeVar("T", bound=msgspec.Struct)

_UNKNOWN = re.compile(r"^Object contains unknown field `(?P<name>[^`]*)`")
_MISSING = re.compile(r"^Object missing required field `(?P<name>[^`]*)`")
_PATH = re.compile(r" - at `(?:key in )?\$(?P<path>[^`]*)`$")
_MEDIA_NAMES = {
    "image_url": "Images",
    "input_image": "Images",
    "input_audio": "Audio inputs",
    "audio_url": "Audio inputs",
    "video_url": "Videos",
    "file": "Files",
}
_MEDIA = re.compile(rf"^Invalid enum value '(?P<name>{'|'.join(_MEDIA_NAMES)})'$")
_decoders: dict[type[Any], msgspec.json.Decoder[Any]] = {}

#: Parameters of vLLM 0.32 that no request struct here has, each with what to do instead.
_OF_VLLM = {
    "request_id": "send it as the header `x-request-id`",
    "session_id": "requests are placed by what is cached of their prompts; leave it out",
    "cache_salt": "prefix caches are shared by all keys",
    "kv_transfer_params": "KV is moved by Millrace; leave it out",
    "ec_transfer_params": "only text is served",
    "mm_processor_kwargs": "only text is served",
    "media_io_kwargs": "only text is served",
    "mm_payload": "only text is served",
    "return_mm_kwargs": "only text is served",
    "thinking_token_budget": "use `max_tokens`",
    "include_reasoning": "reasoning is not told apart from text; leave it out",
    "truncation_side": "shorten the prompt",
    "logprob_token_ids": "use `logprobs`",
    "return_token_offsets": "use `/tokenize` on the text",
    "return_prompt_text": "leave it out",
    "repetition_detection": "use `repetition_penalty`",
    "stream_interval": "each message of the engine is one event; leave it out",
    "vllm_xargs": "leave it out",
    "watermarking": "leave it out",
}


def decode_body(body: bytes, kind: type[T]) -> T:
    """Read a JSON body.

    Raises:
        ApiError: 400 for what is no JSON, no UTF-8, an unknown or missing field, or a value of the wrong type or out
            of bounds.
    """
    decoder = _decoders.get(kind)
    if decoder is None:
        decoder = _decoders[kind] = msgspec.json.Decoder(kind)
    try:
        return cast("T", decoder.decode(body))
    except msgspec.ValidationError as error:
        raise _invalid(str(error)) from None
    except msgspec.DecodeError as error:
        reason = "The body is empty" if not body else f"The body is not valid JSON: {error}"
        raise ApiError(400, f"{reason}.", code="invalid_json") from None
    except UnicodeDecodeError as error:
        raise ApiError(400, f"The body is not valid UTF-8: {error.reason}.", code="invalid_utf8") from None
    except RecursionError:
        raise ApiError(400, "The body is nested too deeply.", code="invalid_json") from None


def _invalid(text: str) -> ApiError:
    at = _PATH.search(text)
    path = at.group("path").lstrip(".") if at else ""
    sentence = text[: at.start()] if at else text
    media = _MEDIA.match(sentence)
    if media and ".content[" in path:
        message = f"{_MEDIA_NAMES[media.group('name')]} are not supported: a content part must be of type `text`."
        return ApiError(400, message, param=path, code="unsupported_parameter")
    for pattern, word, code in ((_UNKNOWN, "Unknown", "unknown_parameter"), (_MISSING, "Missing", "missing_parameter")):
        named = pattern.match(sentence)
        if named:
            param = f"{path}.{named.group('name')}" if path else named.group("name")
            if word == "Unknown" and param in _OF_VLLM:
                message = f"`{param}` is not supported: {_OF_VLLM[param]}."
                return ApiError(400, message, param=param, code="unsupported_parameter")
            return ApiError(400, f"{word} parameter: `{param}`.", param=param, code=code)
    if not path:
        return ApiError(400, f"The body is wrong: {sentence}.", code="invalid_type")
    return ApiError(400, f"Invalid value for `{path}`: {sentence}.", param=path, code="invalid_value")
