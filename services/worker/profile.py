"""A real vLLM engine as the child of ``millrace profile``: its configuration as an argument, rounds in, records out.

``python -m services.worker.profile CONFIG`` where CONFIG is a WorkerConfig in JSON. Protocol:
libs/millrace/profiling/process.py. Anything that vLLM prints goes to standard error.
"""

from __future__ import annotations

import os
import platform
import sys
from pathlib import Path
from typing import BinaryIO

import msgspec
from millrace.profiling.records import Round

from services.worker.config import WorkerConfig
from services.worker.vllm_engine import environment


def main(words: list[str]) -> int:
    """Serves rounds until the input ends."""
    config = msgspec.json.decode(words[0], type=WorkerConfig)
    answers = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    environment.prepare()
    from services.worker.vllm_engine.profiling import VllmProfile

    profile = VllmProfile(config, hardware())
    try:
        _say(answers, profile.profiled())
        rounds = msgspec.json.Decoder(Round)
        for line in sys.stdin.buffer:
            _say(answers, profile.run(rounds.decode(line)))
    finally:
        profile.close()
    return 0


def _say(answers: BinaryIO, message: msgspec.Struct) -> None:
    answers.write(msgspec.json.encode(message) + b"\n")
    answers.flush()


def hardware() -> str:
    """The GPU's name, or one core of the processor's."""
    import torch

    if torch.cuda.is_available():
        return str(torch.cuda.get_device_name())
    return f"1 core of {_processor()}"


def _processor() -> str:
    for line in Path("/proc/cpuinfo").read_text().splitlines():
        if line.startswith("model name"):
            return line.split(":", 1)[1].strip()
    return platform.processor()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
