"""From a WorkerConfig to a running vLLM engine: arguments, environment, processes."""

from __future__ import annotations

import logging
import os
import secrets
import socket
from pathlib import Path
from typing import Any

import msgspec
import torch
from millrace.cluster.model_parsers import model_parsers
from millrace.lengths.head import HEAD_FILE
from vllm import envs
from vllm.config import StructuredOutputsConfig, VllmConfig
from vllm.engine.arg_utils import AsyncEngineArgs
from vllm.platforms import current_platform
from vllm.usage.usage_lib import UsageContext
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.executor import Executor

from services.worker.config import CPU_BATCH, CPU_BLOCK_SIZE, MigrationConfig, WorkerConfig
from services.worker.vllm_engine import compiling, kv_words
from services.worker.vllm_engine.adapters import lora_arguments
from services.worker.vllm_engine.grammar_check import GrammarCheck
from services.worker.vllm_engine.hidden_states import SETTINGS as REMAINING
from services.worker.vllm_engine.process import children_on
from services.worker.vllm_engine.segment_queue import SEGMENTS
from services.worker.vllm_engine.snapshot_scheduler import SNAPSHOT_PATH

logger = logging.getLogger(__name__)

_PACKAGE = "services.worker.vllm_engine"
#: KV cache of a CPU engine whose configuration names no size; vLLM itself would take nearly all memory there is.
CPU_KV_BYTES = 256 << 20
#: Weights, bytes on disk, that a CPU engine may take twice as many bytes for in memory (_multiplies_faster_in_float32).
FLOAT32_WEIGHTS_MAX = 4 << 30
#: Longest piece of a prompt that a CPU engine computes in one step. vLLM's attention there cuts a context into tiles,
#: the shorter the longer the piece, and each further tile rounds once more: what is computed again after a kill
#: differs in bf16 from what decode steps computed, from 1,650 tokens on with vLLM's 2,048, from 2,800 on with this;
#: without AVX-512 from 770 and from 1,440.
PIECE_TOKENS = 256
#: Blocks of a GPU that are verified where the configuration does not say: one in so many.
GPU_SAMPLE = 1 / 16
_SOCKET_PREFIX = "millrace-kv-"
#: A listener that lives accepts at once, whatever its process does.
_PROBE_S = 0.2


class TokensOnlyAsyncLLM(AsyncLLM):
    """AsyncLLM without its output handler: outputs are read from the engine core's client directly."""

    def _run_output_handler(self) -> None:
        """Starts nothing; the one reader is VllmEngine's."""


def engine_args(config: WorkerConfig) -> AsyncEngineArgs:
    """VLLM's arguments for a worker; ``config.engine_args`` wins over what is derived. What nobody named is None, for
    vLLM to choose by model and device, but for what comments give a reason for.

    Raises:
        TypeError: ``engine_args`` names something AsyncEngineArgs does not know.
    """
    arguments: dict[str, Any] = {
        "model": config.model_path,
        "served_model_name": [config.model],
        "dtype": "float32" if _multiplies_faster_in_float32(config) else config.dtype,
        "load_format": config.load_format,
        "block_size": config.block_size or None,
        "max_model_len": config.max_model_len or None,
        "max_num_seqs": config.max_num_seqs or None,
        "max_num_batched_tokens": config.max_num_batched_tokens or None,
        "enable_prefix_caching": config.enable_prefix_caching,
        "seed": config.seed,
        "tensor_parallel_size": config.tensor_parallel_size,
        "kv_cache_memory_bytes": config.kv_bytes or None,
        "num_gpu_blocks_override": config.kv_blocks or None,
        "async_scheduling": config.async_scheduling,
        # One backend: an engine keeps that of its first constraint, and another one's leave out what it does not know.
        # Optional white space is what small models write up to max_tokens.
        "structured_outputs_config": {
            "backend": "xgrammar",
            "disable_any_whitespace": True,
        },
        # Constraints that hold after the reasoning only, and budgets of it; ingress chooses the same parser for texts.
        "reasoning_parser": model_parsers(
            Path(config.model_path), reasoning=config.engine_args.get("reasoning_parser", "auto") or "none"
        ).reasoning,
        "disable_log_stats": True,
        "use_tqdm_on_load": False,
        "scheduler_cls": f"{_PACKAGE}.snapshot_scheduler.SnapshotAsyncScheduler",
    }
    if config.enforce_eager is not None:
        arguments["enforce_eager"] = config.enforce_eager
    if current_platform.is_cpu():
        arguments |= {
            "block_size": config.block_size or CPU_BLOCK_SIZE,
            "max_num_seqs": config.max_num_seqs or CPU_BATCH,
            "enforce_eager": _runs_eagerly(config),
            "distributed_executor_backend": "uni",
            "scheduler_cls": f"{_PACKAGE}.snapshot_scheduler.SnapshotScheduler",
            "worker_cls": f"{_PACKAGE}.runner.ContinuingCPUWorker",
            "kv_cache_memory_bytes": config.kv_bytes or CPU_KV_BYTES,
        }
        if _reading(config):
            arguments |= {
                "scheduler_cls": f"{_PACKAGE}.reading.EstimatingScheduler",
                "worker_cls": f"{_PACKAGE}.reading.ReadingCPUWorker",
            }
    elif current_platform.is_cuda_alike():
        arguments["worker_cls"] = f"{_PACKAGE}.gpu_worker.ContinuingGPUWorker"
        if config.async_scheduling is False:
            arguments["scheduler_cls"] = f"{_PACKAGE}.snapshot_scheduler.SnapshotScheduler"
    arguments |= lora_arguments(config.adapters) | config.engine_args
    # Into this one vLLM writes the reasoning parser, before it makes an object of it.
    arguments["structured_outputs_config"] = StructuredOutputsConfig(**arguments["structured_outputs_config"])
    return AsyncEngineArgs(**arguments)


def checked_config(arguments: AsyncEngineArgs) -> VllmConfig:
    """The configuration as ``vllm serve`` would complete it.

    A model that pools has its outputs as soon as its step ends, so vLLM schedules none ahead, and its KV is not moved.
    """
    named = arguments.enable_prefix_caching is not None
    config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    model = config.model_config
    if current_platform.is_cpu() and model.is_hybrid and not named:
        # To cache them vLLM asks for states within a prompt, which its scan for CPUs does not give (IndexError).
        arguments.enable_prefix_caching = False
        config = arguments.create_engine_config(UsageContext.OPENAI_API_SERVER)
    if model.runner_type == "pooling" and not config.scheduler_config.async_scheduling:
        config.scheduler_config.scheduler_cls = f"{_PACKAGE}.snapshot_scheduler.SnapshotScheduler"
    return config


def _multiplies_faster_in_float32(config: WorkerConfig) -> bool:
    """Whether an engine computes in float32 although nobody asked for it: on an x86 CPU without AVX-512, where torch
    multiplies bfloat16 and float16 slowly, unless the model is quantised or large.

    millrace-mini on one core of an AMD EPYC, eager, bfloat16 against float32: a step of 64 sequences 191 against 61 ms,
    128 tokens of a prompt 347 against 79 ms.
    """
    if config.dtype != "auto" or torch.backends.cpu.get_cpu_capability() != "AVX2" or not current_platform.is_cpu():
        return False
    folder = Path(config.model_path)
    quantised = "quantization" in config.engine_args or "quantization_config" in (folder / "config.json").read_text()
    return not quantised and sum(file.stat().st_size for file in folder.glob("*.safetensors")) <= FLOAT32_WEIGHTS_MAX


def _runs_eagerly(config: WorkerConfig) -> bool:
    """Whether a CPU engine is not compiled; says so once where that is not the user's choice."""
    if config.enforce_eager:
        return True
    reason = compiling.why_eager()
    if reason:
        logger.warning("the engine runs eagerly, about a third slower: %s", reason)
    return bool(reason)


def engine_settings(config: WorkerConfig, snapshot_path: Path, *, pools: bool = False) -> dict[str, Any]:
    """Settings of Millrace's parts of the engine, for ``additional_config``."""
    if pools:
        return {SNAPSHOT_PATH: str(snapshot_path)}
    return {
        SNAPSHOT_PATH: str(snapshot_path),
        **({REMAINING: reading} if (reading := _reading(config)) else {}),
        **kv_settings(config, socket_path(config.migration.socket_folder)),
    }


def _reading(config: WorkerConfig) -> dict[str, Any]:
    """Settings of what reads hidden states, on a CPU: those given, or the head that lies beside the model."""
    path = Path(config.model_path) / HEAD_FILE
    beside = {"head": str(path)} if path.is_file() else {}
    settings: dict[str, Any] = config.engine_args.get("additional_config", {}).get(REMAINING, beside)
    return settings if current_platform.is_cpu() else {}


def kv_settings(config: WorkerConfig, path: str) -> dict[str, Any]:
    """Part of ``additional_config`` that lets an engine move KV; empty where it shall not."""
    migration = config.migration
    if not migration.enabled:
        return {}
    settings = kv_words.KvSettings(
        socket=path,
        verify=_verified(migration),
        copy_bytes_per_step=migration.copy_bytes_per_step,
        copiers=migration.copiers,
    )
    return {kv_words.SETTINGS: msgspec.json.encode(settings).decode(), SEGMENTS: migration.segments}


def _verified(migration: MigrationConfig) -> float:
    """Share of the blocks; where they lie on a GPU a sample, for each is brought to the host for it."""
    if migration.verify is not None:
        return float(migration.verify)
    return 1.0 if current_platform.is_cpu() else GPU_SAMPLE


def socket_path(socket_folder: str = "") -> str:
    """Path of the sockets on which an engine's ranks hand out their KV, ``{rank}`` to be filled in."""
    folder = Path(socket_folder or envs.VLLM_RPC_BASE_PATH)  # beside vLLM's own
    for left in folder.glob(f"{_SOCKET_PREFIX}*"):
        _remove_if_dead(left)
    return str(folder / f"{_SOCKET_PREFIX}{os.getpid()}-{secrets.token_hex(4)}-{{rank}}")


def _remove_if_dead(path: Path) -> None:
    """Deletes the socket of an engine that was killed. Asked by connecting: its pid may be one of another container."""
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        probe.settimeout(_PROBE_S)
        try:
            probe.connect(str(path))
        except ConnectionRefusedError:
            path.unlink(missing_ok=True)
        except OSError:
            pass  # another user's, gone meanwhile, or slow to answer


def launch(config: WorkerConfig, snapshot_path: Path) -> tuple[AsyncLLM, GrammarCheck]:
    """Starts the engine process, with what tries its constraints, and waits until it is ready. Call on the main thread
    (see process.py).

    Raises:
        Exception: whatever vLLM raises for a bad argument, a missing model or a failed start.
    """
    vllm_config = checked_config(engine_args(config))
    pools = vllm_config.model_config.runner_type == "pooling"
    given, own = vllm_config.additional_config, engine_settings(config, snapshot_path, pools=pools)
    # vLLM reads keys of its own from a dict alone, and hashes all of it.
    vllm_config.additional_config = {**given, **own} if given else compiling.EngineSettings(own)
    if current_platform.is_cpu():
        scheduling = vllm_config.scheduler_config
        if scheduling.enable_chunked_prefill:
            scheduling.long_prefill_token_threshold = scheduling.long_prefill_token_threshold or PIECE_TOKENS
        # vLLM asks for "spawn" here, for OpenMP's sake; with one thread a fork is safe, and ten times as fast.
        os.environ["VLLM_WORKER_MULTIPROC_METHOD"] = "fork"
        torch.set_num_threads(1)
    grammars = GrammarCheck(vllm_config)
    with children_on(config.engine_cores):
        llm = TokensOnlyAsyncLLM(
            vllm_config=vllm_config,
            executor_class=Executor.get_class(vllm_config),
            log_requests=False,
            log_stats=False,
        )
    return llm, grammars
