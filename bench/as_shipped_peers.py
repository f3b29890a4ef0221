"""Other systems as ways of `bench as_shipped`, from PyPI: NVIDIA Dynamo, and SGLang's gateway.

They want an environment of their own, whose Python PEERS_PYTHON names:
``pip install sglang-router ai-dynamo-runtime packaging pyyaml msgspec; pip install --no-deps ai-dynamo``.

Dynamo comes with its frontend, KV router and modelled engines over NATS. SGLang's gateway is a router in front of
OpenAI servers, here of our modelled engines, each a process (`as_shipped_engine`). Both have their defaults else.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager
from pathlib import Path

from bench.as_shipped_ways import Served, ask
from tests.testbed.up_cluster import free_port

#: As many sequences at once as a modelled instance of ours takes, in steps that take next to no time.
ENGINE = "--model-name m --speedup-ratio 1e6 --max-num-seqs 256"
PLANES = "--discovery-backend file --request-plane nats --event-plane nats"


def open_dynamo(folder: Path, instances: int) -> AbstractContextManager[Served]:
    """Starts it, and ends it."""
    python, port, bus = os.environ["PEERS_PYTHON"], free_port(), free_port()
    nats, model = Path(sys.executable).parent / "nats-server", _model(folder)
    commands = {
        "nats": f"{nats} -js -sd {folder} -a 127.0.0.1 -p {bus}",
        "engines": f"{python} -m dynamo.mocker --model-path {model} --num-workers {instances} {ENGINE} {PLANES}",
        "ingress": f"{python} -m dynamo.frontend --http-port {port} --router-mode kv {PLANES}",
    }
    told = {"NATS_SERVER": f"nats://127.0.0.1:{bus}", "DYN_FILE_KV": str(folder), "DYN_LOG": "warn"}
    return _opened(port, commands, told)


def open_sglang(_folder: Path, instances: int) -> AbstractContextManager[Served]:
    """Starts engines and gateway, and ends them."""
    port, *ports = (free_port() for _ in range(1 + instances))
    engines = {f"engine-{n}": f"{sys.executable} -m bench.as_shipped_engine {at}" for n, at in enumerate(ports)}
    urls = " ".join(f"http://127.0.0.1:{each}" for each in ports)
    router = f"-m sglang_router.launch_router --host 127.0.0.1 --port {port} --worker-urls {urls}"
    return _opened(port, engines | {"ingress": f"{os.environ['PEERS_PYTHON']} {router}"}, {})


#: Ways by name.
PEERS = {"dynamo": open_dynamo, "sglang": open_sglang}


@contextmanager
def _opened(port: int, commands: Mapping[str, str], told: Mapping[str, str]) -> Iterator[Served]:
    with ExitStack() as stack:
        pids = {}
        for name, command in commands.items():
            process = subprocess.Popen(
                command.split(), env=os.environ | told, stdout=subprocess.DEVNULL, stderr=subprocess.STDOUT
            )
            stack.callback(process.wait)
            stack.callback(process.terminate)
            pids[name] = process.pid
            time.sleep(2)
        until_s = time.monotonic() + 120
        while not ask(port):
            assert time.monotonic() < until_s, f"nothing is served by {commands}"
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
