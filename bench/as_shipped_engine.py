"""OpenAI server of one modelled engine, for gateways that reach engines over HTTP: ``bench as_shipped --ways sglang``.

The engine is a worker's own and takes no time either; it gives no snapshots, which nobody reads here. A token is an
event, as of vLLM's server. Prompts are not read and tokens not decoded: the same word comes again and again.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import sys

from millrace.actor.engine import EngineEvent, EngineSequence, EngineStepped
from millrace.actor.loop import run_to_end
from millrace.contracts.worker import Sampling
from millrace.http.client_connection import ConnectionLimits
from millrace.http.exchange import Exchange
from millrace.http.server import HttpServer

from services.worker.modelled import ModelledConfig, ModelledLiveEngine

CONFIG = ModelledConfig(speed=0.0, snapshot_interval_ns=3_600_000_000_000)
LIMITS = ConnectionLimits(body_bytes_max=10**6, buffer_bytes_max=10**8, slow_reader_s=60, read_s=60, idle_s=600)
PROMPT = list(range(30))
#: Whatever a gateway asks of its engines.
ABOUT = b'{"data":[{"id":"m","object":"model"}],"served_model_name":"m"}'
HEAD = b'{"id":"chatcmpl-1","object":"chat.completion%b","created":1,"model":"m","choices":[{"index":0,'
TOKEN = b"data: " + HEAD % b".chunk" + b'"delta":{"content":"word "},"logprobs":null,"finish_reason":null}]}\n\n'
DONE = b"data: " + HEAD % b".chunk" + b'"delta":{},"finish_reason":"length"}]}\n\ndata: [DONE]\n\n'
WHOLE = HEAD % b"" + b'"message":{"role":"assistant","content":"word word"},"finish_reason":"length"}]}'


async def serve(port: int) -> None:
    """Serves until the process ends."""
    engine, numbers = ModelledLiveEngine(CONFIG, moves=False), itertools.count()
    asked: dict[str, Exchange] = {}

    def take(exchange: Exchange) -> None:
        if exchange.request.method == "GET":
            exchange.respond(200, ABOUT)
            return
        body, name = json.loads(exchange.request.body), str(next(numbers))
        asked[name] = exchange
        sampling = Sampling(max_tokens=body.get("max_tokens") or body["max_completion_tokens"], ignore_eos=True)
        engine.add(EngineSequence(sequence=name, prompt_token_ids=PROMPT, sampling=sampling))
        if body.get("stream"):
            exchange.start_stream((), b"")

    def on_event(event: EngineEvent) -> None:
        for output in event.outputs if isinstance(event, EngineStepped) else ():
            if (exchange := asked[output.sequence]).streaming:
                exchange.write(TOKEN)
            if output.finish is not None:
                exchange.end(DONE) if exchange.streaming else exchange.respond(200, WHOLE)
                del asked[output.sequence]

    await engine.start(on_event)
    server = HttpServer(take, lambda exchange, _: exchange.respond(400, b""), limits=LIMITS, connections_max=4096)
    await server.start("127.0.0.1", port, reuse_port=False)
    await asyncio.Event().wait()


if __name__ == "__main__":
    run_to_end(serve(int(sys.argv[1])))
