"""Images in chat messages: found and read from their ``data:`` URLs."""

from __future__ import annotations

import binascii
from base64 import b64decode
from hashlib import blake2b

from millrace.contracts.worker import Images

from services.ingress.api.errors import ApiError, bad_value, required, unsupported
from services.ingress.api.requests import ChatRequest
from services.ingress.api.tokenizer import ModelTokenizer

#: Bytes of a request's image files: they travel to the engine in one message of at most 1 MiB, beside token ids, each
#: of which takes up to five bytes there.
IMAGES_BYTES_MAX = 768_000
_MESSAGE_BYTES_MAX, _ID_BYTES_MAX = 1_040_000, 5


def image_files(request: ChatRequest, tokenizer: ModelTokenizer) -> list[bytes | str]:
    """The files of a chat's images, in the order of its messages; of one that has to be fetched its URL.

    Raises:
        ApiError: 400 where the model takes none, or an image cannot be read.
    """
    found: list[bytes | str] = []
    for i, message in enumerate(request.messages):
        for j, part in enumerate(message.content if isinstance(message.content, list) else ()):
            if part.type == "image_url":
                param = f"messages[{i}].content[{j}].image_url"
                if tokenizer.template is None or not (tokenizer.images and tokenizer.template.traits.content_parts):
                    raise unsupported(param, "This model takes no images: a content part must be of type `text`.")
                found.append(_file(required(part.image_url, param).url, f"{param}.url"))
    if found and request.truncate_prompt_tokens is not None:
        raise unsupported("truncate_prompt_tokens", "A prompt with images is not cut.")
    if found and request.kv_transfer_params is not None:
        raise unsupported("kv_transfer_params", "Token ids with images are not supported.")
    return found


def images_of(files: list[bytes], prompt: list[int]) -> Images:
    """Images as they travel.

    Args:
        prompt: Token ids with one placeholder for each.

    Raises:
        ApiError: 400 where they are too large together.
    """
    if sum(map(len, files)) > IMAGES_BYTES_MAX:
        raise _too_large(IMAGES_BYTES_MAX)
    digest = blake2b(digest_size=16)
    for file in files:
        digest.update(len(file).to_bytes(4, "little") + file)
    return Images(data=files, prompt=prompt, digest=digest.hexdigest())


def refuse_large(images: Images, prompt_tokens: int, max_tokens: int) -> None:
    """Check that images and token ids go into one message, whenever the request goes on elsewhere.

    Raises:
        ApiError: 400.
    """
    room = _MESSAGE_BYTES_MAX - _ID_BYTES_MAX * (len(images.prompt) + prompt_tokens + max_tokens)
    if sum(map(len, images.data)) > room:
        raise _too_large(max(0, room))


def _too_large(most: int) -> ApiError:
    detail = f"The images of this request may have {most} bytes together, before base64: send smaller ones"
    return bad_value("messages", f"{detail}, or set `max_tokens`.", "images_too_large")


def _file(url: str, param: str) -> bytes | str:
    if url.startswith(("http://", "https://")):
        return url
    kind, _, data = url.partition(",")
    if not (kind.startswith("data:image/") and kind.endswith(";base64")):
        raise bad_value(param, f"`{param}` must begin with `data:image/...;base64,`, `http://` or `https://`.")
    try:
        return b64decode(data, validate=True)
    except (binascii.Error, ValueError):
        raise bad_value(param, f"`{param}` is no valid base64.") from None
