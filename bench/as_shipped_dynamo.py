"""NVIDIA Dynamo as a way of `bench as_shipped`: its frontend, KV router and modelled engines over NATS, from PyPI.

It wants an environment of its own, whose Python DYNAMO_PYTHON names:
``pip install ai-dynamo-runtime packaging pyyaml msgspec; pip install --no-deps ai-dynamo``.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx

from bench.as_shipped_ways import Served
from tests.testbed.up_cluster import free_port

#: As many sequences at once as a modelled instance of ours takes, in steps that take next to no time.
ENGINE = "--model-name m --speedup-ratio 1e6 --max-num-seqs 256"
PLANES = "--discovery-backend file --request-plane nats --event-plane nats"


@contextmanager
def open_dynamo(folder: Path, instances: int) -> Iterator[Served]:
    """Starts it, and ends it."""
    python, port, bus = os.environ["DYNAMO_PYTHON"], free_port(), free_port()
    nats, model = Path(sys.executable).parent / "nats-server", _model(folder)
    commands = {
        "nats": f"{nats} -js -sd {folder} -a 127.0.0.1 -p {bus}",
        "engines": f"{python} -m dynamo.mocker --model-path {model} --num-workers {instances} {ENGINE} {PLANES}",
        "ingress": f"{python} -m dynamo.frontend --http-port {port} --router-mode kv {PLANES}",
    }
    told = os.environ | {"NATS_SERVER": f"nats://127.0.0.1:{bus}", "DYN_FILE_KV": str(folder), "DYN_LOG": "warn"}
    with ExitStack() as stack:
        pids = {}
        for name, command in commands.items():
            process = subprocess.Popen(command.split(), env=told, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT)
            stack.callback(process.wait)
            stack.callback(process.terminate)
            pids[name] = process.pid
            time.sleep(2)
        while not httpx.get(f"http://127.0.0.1:{port}/v1/models").json()["data"]:
            time.sleep(0.5)
        yield Served(port, pids)


def _model(folder: Path) -> Path:
    """The small model with more words, as its engines answer with tokens that ours has not."""
    shutil.copytree("models/millrace-nano", folder / "model", ignore=shutil.ignore_patterns("*.safetensors"))
    file = folder / "model" / "tokenizer.json"
    tokenizer = json.loads(file.read_text())
    words = tokenizer["model"]["vocab"]
    words |= {f"word{number}": number for number in range(max(words.values()) + 1, 40_000)}
    file.write_text(json.dumps(tokenizer))
    return folder / "model"
