"""vLLM's own NixlConnector between two vLLM engines on CPU: what one request's transfer takes, by its own telemetry.

Two processes: ``decode`` starts ``prefill`` and asks it, by a line of JSON, to compute a prompt and keep its KV. Then,
between the lines ``prefilled`` and ``measure``, the caller may wait for a quiet machine. Both engines serve other
requests before, so that their free blocks are not in order any more.

    python -m bench.transfers.nixl_connector decode PORT TOKENS...
"""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench.engine.in_process import VOCABULARY, prepare
from bench.transfers.shape import BLOCK_TOKENS, BLOCKS, HEAD_SIZE, KV_HEADS, LAYERS, REGION_BYTES

WIDTH = 128
CHURN = 96  # requests before, on each engine
CHURN_AT_ONCE = 16
PREFILL = {
    "do_remote_decode": True,
    "do_remote_prefill": False,
    "remote_engine_id": None,
    "remote_block_ids": None,
    "remote_host": None,
    "remote_port": None,
}


class Engine:
    """An engine in this process with the connector, on the model of a folder: both engines' names for it must agree."""

    def __init__(self, folder: str, *, role: str, port: int, tokens_max: int) -> None:
        os.environ.update(VLLM_NIXL_SIDE_CHANNEL_PORT=str(port), VLLM_NIXL_SIDE_CHANNEL_HOST="127.0.0.1")
        os.environ.setdefault("UCX_MODULES", "^efa")  # see millrace/kvcopy/nixl_agent.py
        prepare()
        from vllm.config import KVTransferConfig
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.llm_engine import LLMEngine

        self.engine: Any = LLMEngine.from_engine_args(
            EngineArgs(
                model=folder,
                load_format="dummy",
                skip_tokenizer_init=True,
                enforce_eager=True,
                distributed_executor_backend="uni",
                async_scheduling=False,
                disable_log_stats=True,
                enable_prefix_caching=False,
                block_size=BLOCK_TOKENS,
                num_gpu_blocks_override=BLOCKS,
                kv_cache_memory_bytes=REGION_BYTES,
                max_model_len=tokens_max + 64,
                max_num_batched_tokens=2048,
                max_num_seqs=CHURN_AT_ONCE,
                kv_transfer_config=KVTransferConfig(kv_connector="NixlConnector", kv_role=role, kv_buffer_device="cpu"),
            )
        )
        self._names = 0
        self._churn()

    def add(self, prompt: list[int], *, tokens: int, transfer: dict[str, Any] | None = None) -> None:
        from vllm import SamplingParams

        self._names += 1
        extra = {"kv_transfer_params": transfer} if transfer else None
        sampling = SamplingParams(max_tokens=tokens, temperature=0, ignore_eos=True, detokenize=False, extra_args=extra)
        self.engine.add_request(f"bench-{self._names}-{time.time_ns()}", {"prompt_token_ids": prompt}, sampling)

    def run(self) -> Any:
        """Steps until the one request that is there ends."""
        while True:
            for output in self.engine.step():
                if output.finished:
                    return output

    def _churn(self) -> None:
        """Others come and go, so many at once."""
        rng = random.Random(0)
        left, running = CHURN, 0
        while left or running:
            while left and running < CHURN_AT_ONCE:
                self.add(_prompt(rng.randint(32, 500), rng.random()), tokens=rng.randint(2, 60))
                left, running = left - 1, running + 1
            running -= sum(output.finished for output in self.engine.step())


def _model(tokens_max: int) -> dict[str, Any]:
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": WIDTH,
        "num_hidden_layers": LAYERS,
        "num_attention_heads": KV_HEADS,
        "num_key_value_heads": KV_HEADS,
        "intermediate_size": WIDTH,
        "head_dim": HEAD_SIZE,
        "vocab_size": VOCABULARY,
        "max_position_embeddings": tokens_max + 64,
        "rms_norm_eps": 1e-5,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
        "bos_token_id": 1,
        "eos_token_id": 2,
        "hidden_act": "silu",
    }


def _prompt(tokens: int, seed: float) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(3, VOCABULARY) for _ in range(tokens)]


def prefill(folder: str, port: int, tokens_max: int) -> None:
    """Computes the prompts that it is asked for."""
    engine = Engine(folder, role="kv_producer", port=port, tokens_max=tokens_max)
    print("ready", flush=True)
    for line in sys.stdin:
        engine.add(_prompt(int(line), 1), tokens=1, transfer=PREFILL)
        output = engine.run()
        print("kept " + json.dumps([output.kv_transfer_params, list(output.outputs[0].token_ids)]), flush=True)


def decode(port: int, lengths: list[int]) -> None:
    """Has prompts prefilled, then reads their KV and decodes; prints a line of JSON for each."""
    tokens_max = max(lengths)
    with tempfile.TemporaryDirectory(prefix="millrace-bench-") as folder:
        (Path(folder) / "config.json").write_text(json.dumps(_model(tokens_max)))
        words = [sys.executable, "-m", "bench.transfers.nixl_connector", "prefill"]
        words += [str(port + 1), str(tokens_max), folder]
        other = subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        try:
            _decode(other, Engine(folder, role="kv_consumer", port=port, tokens_max=tokens_max), lengths)
        finally:
            other.kill()
            other.communicate()


def _decode(other: subprocess.Popen[str], engine: Engine, lengths: list[int]) -> None:
    _line(other, "ready")
    # The first transfer of two engines is their introduction.
    kept = [(tokens, _keep(other, tokens)) for tokens in [lengths[0], *lengths]]
    print("prefilled", flush=True)
    sys.stdin.readline()
    for tokens, (params, first) in kept:
        print("figure " + json.dumps(_move(engine, tokens, params, first)), flush=True)


def _keep(other: subprocess.Popen[str], tokens: int) -> tuple[dict[str, Any], list[int]]:
    assert other.stdin is not None
    print(tokens, file=other.stdin, flush=True)
    params, first = json.loads(_line(other, "kept "))
    return params, first


def _move(engine: Engine, tokens: int, params: dict[str, Any], first: list[int]) -> dict[str, Any]:
    from vllm.distributed.kv_transfer import get_kv_transfer_group

    told: list[Any] = []
    # Its own statistics are emptied in every step; what NIXL's telemetry tells for each transfer is taken as it comes.
    get_kv_transfer_group().connector_worker.xfer_stats.record_transfer = told.append
    began = time.perf_counter()
    engine.add(_prompt(tokens, 1), tokens=1, transfer=params)
    output = engine.run()
    return {
        "tokens": tokens,
        "blocks": len(params["remote_block_ids"][0]),
        "wall_ms": (time.perf_counter() - began) * 1e3,
        "same_first_token": list(output.outputs[0].token_ids) == first,
        "transfers": len(told),
        "bytes": sum(each.totalBytes for each in told),
        "pieces": sum(each.descCount for each in told),
        "post_ms": sum(each.postDuration for each in told) / 1e3,
        "done_ms": sum(each.xferDuration for each in told) / 1e3,
    }


def _line(other: subprocess.Popen[str], begins: str) -> str:
    assert other.stdout is not None
    for line in other.stdout:
        if line.startswith(begins):
            return line.removeprefix(begins)
    raise SystemExit("the prefill engine ended")


if __name__ == "__main__":
    if sys.argv[1] == "prefill":
        prefill(sys.argv[4], int(sys.argv[2]), int(sys.argv[3]))
    else:
        decode(int(sys.argv[2]), [int(word) for word in sys.argv[3:]])
