"""The fingerprint of a model's weights: what was made for one model is refused for another."""

from __future__ import annotations

import hashlib
from pathlib import Path

#: Files up to this size are hashed whole, others by samples: a fine-tuned model differs nearly everywhere.
WHOLE_BYTES = 64 << 20
SAMPLES = 256
SAMPLE_BYTES = 4096
WEIGHTS = ("*.safetensors", "*.bin", "*.pt", "*.gguf")


def weights_fingerprint(folder: str | Path) -> str:
    """Hash of the weights in a model's folder; empty where there are none.

    Raises:
        OSError: a file cannot be read.
    """
    files = sorted(path for pattern in WEIGHTS for path in Path(folder).glob(pattern))
    if not files:
        return ""
    digest = hashlib.sha256()
    for file in files:
        digest.update(f"{file.name} {file.stat().st_size} ".encode())
        digest.update(_content(file))
    return digest.hexdigest()


#: File that makes a folder a LoRA adapter in PEFT's format.
ADAPTER_CONFIG = "adapter_config.json"


def adapter_fingerprint(folder: str | Path) -> str:
    """Hash of a LoRA adapter's weights and configuration.

    Raises:
        OSError: there is none in this folder.
    """
    digest = hashlib.sha256((Path(folder) / ADAPTER_CONFIG).read_bytes())
    digest.update(weights_fingerprint(folder).encode())
    return digest.hexdigest()


def _content(file: Path) -> bytes:
    size = file.stat().st_size
    with file.open("rb") as stream:
        if size <= WHOLE_BYTES:
            return hashlib.file_digest(stream, "sha256").digest()
        digest = hashlib.sha256()
        for index in range(SAMPLES):
            stream.seek(index * (size - SAMPLE_BYTES) // (SAMPLES - 1))
            digest.update(stream.read(SAMPLE_BYTES))
        return digest.digest()
