"""Cost of the HTTP side's parts alone, without sockets and core: CPU time of the thread per request or event.

`python -m bench ingress_throughput` has the whole process.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from models.training.tokenizer import write_tokenizer
from services.ingress.api.decoding import decode_body
from services.ingress.api.models import ModelRegistry, ServedModel, Serving
from services.ingress.api.parsed_requests import Bounds, Caller, build_call, parse_chat_request
from services.ingress.api.requests import ChatRequest
from services.ingress.api.responses import ChatResponse
from services.ingress.api.streams import ChatStream, ResponseHead
from services.ingress.api.structured_outputs import SCHEMA_BYTES_MAX, checked_schema
from services.ingress.api.tokenizer import ModelTokenizer
from services.ingress.api.tools import NO_TOOLS
from services.ingress.calls.messages import ChoiceDelta, Usage
from services.ingress.tokens.detokenizer import TextStream

PROMPT = "List five animals and say which of them is the largest."
LENGTH = 4096


def main() -> int:
    """Prints the table."""
    with tempfile.TemporaryDirectory() as folder:
        write_tokenizer(Path(folder))
        (Path(folder) / "config.json").write_text(json.dumps({"max_position_embeddings": LENGTH}))
        tokenizer = ModelTokenizer.load(folder)
    for name, work in {**request_parts(tokenizer), **response_parts(), **text_parts(tokenizer)}.items():
        print(f"{name:<58} {cost_us(work):7.2f} µs")
    print(f"{'a schema of 32 KiB, seen for the first time':<58} {new_schema_us():7.0f} µs")
    return 0


def request_parts(tokenizer: ModelTokenizer) -> dict[str, Callable[[], object]]:
    """From the body to the call."""
    model = ServedModel(name="m", tokenizer=tokenizer, max_model_len=LENGTH)
    models = ModelRegistry({"m": model}, lambda name: Serving(1))
    message = {"role": "user", "content": PROMPT}
    body = json.dumps({"model": "m", "messages": [message], "max_tokens": 4, "temperature": 0}).encode()
    parsed = parse_chat_request(body, models, Bounds())
    assert parsed.texts is not None
    text = parsed.texts[0]
    ids = tokenizer.encode(text, special=False)
    caller = Caller(request="r")
    return {
        "body to Struct": lambda: decode_body(body, ChatRequest),
        "body to parsed: checks and chat template included": lambda: parse_chat_request(body, models, Bounds()),
        f"tokenising {len(text)} characters to {len(ids)} tokens": lambda: tokenizer.encode(text, special=False),
        "parsed to call": lambda: build_call(parsed, [ids], caller, LENGTH),
    }


def response_parts() -> dict[str, Callable[[], object]]:
    """From deltas to bytes."""
    head = ResponseHead("chatcmpl-0123456789-1", 1, "m", 1)
    stream = ChatStream(head, include_usage=True, continuous=False)
    delta, usage = [ChoiceDelta(0, " word", 1)], Usage(10, 1)

    def whole() -> bytes:
        response = ChatResponse(head, NO_TOOLS)
        response.deltas([ChoiceDelta(0, "four words of text", 4, "stop")])
        return response.body(usage)

    return {
        "a whole response": whole,
        "templates of a stream": lambda: ChatStream(head, include_usage=True, continuous=False),
        "one event of a stream": lambda: stream.deltas(delta, usage),
    }


def text_parts(tokenizer: ModelTokenizer) -> dict[str, Callable[[], object]]:
    """From token ids to text."""
    ids = tokenizer.encode(" a", special=False)[:1]
    plain = TextStream(tokenizer.vocabulary)
    stopping = TextStream(tokenizer.vocabulary, ["</answer>", "\n\n"])
    return {
        "one token to text": lambda: plain.push(ids, False),
        "one token to text, looking for two stop strings": lambda: stopping.push(ids, False),
    }


def new_schema_us() -> float:
    """Cost of checking a schema that is not remembered."""
    properties = {f"p{i}": {"type": "string", "minLength": 1} for i in range(SCHEMA_BYTES_MAX // 48)}
    begun = time.thread_time()
    checked_schema({"type": "object", "properties": properties}, "schema")
    return (time.thread_time() - begun) * 1e6


def cost_us(work: Callable[[], object], rounds: int = 5, calls: int = 5_000) -> float:
    """CPU time per call, µs: the best of some rounds, since other load only ever adds."""
    best = float("inf")
    for _ in range(rounds):
        begun = time.thread_time()
        for _ in range(calls):
            work()
        best = min(best, time.thread_time() - begun)
    return best / calls * 1e6


if __name__ == "__main__":
    sys.exit(main())
