"""An Idefics3 with random weights, which sees images, and a byte-level tokenizer, written to a folder."""

import json
import zlib
from pathlib import Path
from random import Random
from struct import pack

from tests.testbed.tiny_llama import EOS, VOCABULARY, write_tokenizer

IMAGE_TOKENS = 7
_SIDE, _PATCH, _SCALE = 32, 8, 2
_SPECIAL = ("<image>", "<fake_token_around_image>", "<global-img>", "<end_of_utterance>")
_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}: {% for part in message['content'] %}"
    "{% if part['type'] == 'image' %}<image>{% else %}{{ part['text'] }}{% endif %}{% endfor %}\n{% endfor %}"
    "{% if add_generation_prompt %}assistant: {% endif %}"
)


def build(folder: Path, *, seed: int = 0) -> Path:
    """Writes the model; an image takes IMAGE_TOKENS tokens, whatever its size. Returns the folder."""
    import torch
    from transformers import Idefics3Config, Idefics3ForConditionalGeneration

    torch.manual_seed(seed)
    text = {
        "model_type": "llama",
        "vocab_size": VOCABULARY,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "max_position_embeddings": 1024,
        "bos_token_id": 256,
        "eos_token_id": EOS,
        "pad_token_id": EOS,
        "tie_word_embeddings": False,
        "initializer_range": 0.08,
    }
    vision = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "image_size": _SIDE,
        "patch_size": _PATCH,
        "initializer_range": 0.2,
    }
    config = Idefics3Config(
        text_config=text,
        vision_config=vision,
        image_token_id=258,
        scale_factor=_SCALE,
        tie_word_embeddings=False,
        bos_token_id=256,
        eos_token_id=EOS,
        pad_token_id=EOS,
    )
    folder.mkdir(parents=True, exist_ok=True)
    Idefics3ForConditionalGeneration(config).to(torch.float32).save_pretrained(folder, safe_serialization=True)
    _write_processor(folder)
    return folder


def _write_processor(folder: Path) -> None:
    write_tokenizer(folder)
    tokenizer = folder / "tokenizer.json"
    text = tokenizer.read_text()
    for number, name in enumerate(_SPECIAL):
        text = text.replace(f'"<extra{number}>"', f'"{name}"')
    tokenizer.write_text(text)
    (folder / "chat_template.jinja").write_text(_TEMPLATE)
    size = {"longest_edge": _SIDE}
    images = {"image_processor_type": "Idefics3ImageProcessor", "do_image_splitting": False, "size": size}
    processor = {"processor_class": "Idefics3Processor", "image_seq_len": (_SIDE // _PATCH // _SCALE) ** 2}
    (folder / "preprocessor_config.json").write_text(json.dumps(images | {"max_image_size": size}))
    (folder / "processor_config.json").write_text(json.dumps(processor))


def png(seed: int, *, width: int = 80, height: int = 60) -> bytes:
    """An image of noise."""
    rng = Random(seed)
    return png_of(width, height, zlib.compress(b"".join(b"\0" + rng.randbytes(3 * width) for _ in range(height))))


def png_of(width: int, height: int, data: bytes) -> bytes:
    """A PNG file that says it is so large, with these data."""
    head = pack(">IIBBBBB", width, height, 8, 2, 0, 0, 0)
    return b"\x89PNG\r\n\x1a\n" + b"".join(map(_chunk, (b"IHDR", b"IDAT", b"IEND"), (head, data, b"")))


def _chunk(kind: bytes, content: bytes) -> bytes:
    return pack(">I", len(content)) + kind + content + pack(">I", zlib.crc32(kind + content))
