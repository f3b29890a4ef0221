"""Configuration of a worker: which engine, with which limits, and how it speaks on the bus."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any

import msgspec
from millrace.actor.config import ProcessConfig
from millrace.actor.config_marks import CONSTANT, WIRED
from millrace.contracts.bounds import Count, Natural, Share
from millrace.contracts.kv import CopierKind


class EngineKind(StrEnum):
    """Implementation behind the Engine port."""

    VLLM = "vllm"
    MODELLED = "modelled"


class WorkerLimits(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the worker actor. Times in milliseconds.

    Attributes:
        queue_max: Sequences that may wait beyond the engine's running batch; further ones are refused FULL.
        drain_limit_ms: How long running sequences may go on after SIGTERM before they are handed back.
        linger_ms: How long a drained worker still answers ``resend`` for finished sequences nobody acknowledged.
        ingress_silence_ms: An ingress silent for so long is taken for dead; its sequences are cancelled.
        status_interval_min_ms: Least time between two StatusSnapshots; 0 for one per engine step.
        report_interval_max_ms: Greatest time between two of each, with room for a late timer below 250.
        finished_ttl_ms: How long finished, unacknowledged sequences are kept.
        finished_max: How many of them are kept at most.
        summary_interval_min_ms: Least time between two InstanceSummaries.
    """

    queue_max: Natural = 1024
    drain_limit_ms: Natural = 10_000
    linger_ms: Natural = 1_000
    ingress_silence_ms: Count = 5_000
    status_interval_min_ms: Natural = 20
    report_interval_max_ms: Count = 200
    finished_ttl_ms: Annotated[int, CONSTANT] = 30_000
    finished_max: Annotated[int, CONSTANT] = 4096
    summary_interval_min_ms: Annotated[int, CONSTANT] = 25


class ReplicaBounds(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of the KV replicas that an instance holds of other instances' sequences.

    Attributes:
        memory_share: Share of the KV blocks that all of them may take, 0 to 1; 0 holds none.
        count_max: Replicas held at a time; further ones are refused TOO_MANY.
        hold_ms: How long one is held without news of its source: longer than it takes to notice that an instance is
            lost.
    """

    memory_share: Annotated[Share, WIRED] = 0.0
    count_max: Annotated[Count, CONSTANT] = 64
    hold_ms: Annotated[Count, CONSTANT] = 10_000


class MigrationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Moving running sequences with their KV. What a lease, freeze or reservation may last says who asks for it
    (services/migrator), up to the bounds here.

    Attributes:
        enabled: Whether this instance gives and takes KV at all.
        verify: Share of the blocks that are compared by checksum after they were copied, 0 to 1, or true or false for
            all or none; None for all where KV lies in host memory, and for one in sixteen on a GPU.
        copy_bytes_per_step: What a copier that uses the engine's processor copies between two steps of 10 ms,
            bytes; as much more between longer ones.
        copiers: The only ones used, best first; empty for all that both ends offer, in the source's order.
        self_test: Whether the engine moves a sequence to itself at its start, and moves nothing where tokens differ;
            None for where vLLM's paths were read and not run (all but the V1 runner on a CPU).
        segments: Whether vLLM's free blocks are handed out in contiguous runs, so that a sequence moves in few pieces.
        socket_folder: Where engines of one machine hand out their KV to each other; in containers a folder that all of
            them share. Empty for the folder of temporary files.
        leases_max: Sequences leased at a time; further ones are refused TOO_MANY.
        replicas: What it holds of other instances' sequences for their continuation.
        reservations_max: Reservations held at a time; further ones are refused TOO_MANY.
        lease_ms_max: Longest lease given.
        freeze_ms_max: Longest freeze given: so long a client may wait for nothing where everything goes wrong.
        reserve_ms_max: Longest reservation without news.
    """

    enabled: bool = True
    verify: bool | Share | None = None
    copy_bytes_per_step: Count = 1 << 20
    copiers: list[CopierKind] = []
    self_test: bool | None = None
    segments: bool = True
    socket_folder: Annotated[str, WIRED] = ""
    leases_max: Count = 8
    replicas: ReplicaBounds = ReplicaBounds()
    reservations_max: Annotated[int, CONSTANT] = 8
    lease_ms_max: Annotated[int, CONSTANT] = 10_000
    freeze_ms_max: Annotated[int, CONSTANT] = 2_000
    reserve_ms_max: Annotated[int, CONSTANT] = 10_000


#: Where a CPU's configuration names none. vLLM's own block of 128 makes prefix hits, and what a move copies while its
#: client waits, four times as coarse; its own batch is 128, and the step times that ship were measured up to 64.
CPU_BLOCK_SIZE, CPU_BATCH = 32, 64


class CanaryConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A prompt whose greedy answer is known: an engine that says something else at its start does not serve.

    Attributes:
        prompt: Tokenised as it is, without a chat template; empty for no such check.
        text: What the answer begins with.
    """

    prompt: str = ""
    text: str = ""


class WorkerConfig(ProcessConfig, frozen=True, kw_only=True):
    """One worker process.

    Attributes:
        name: Instance name, unique in the cluster; with ``instances`` > 1 the prefix of ``<name>-0``, ``<name>-1``...
        model: Served model name: the one clients ask for, and the token in subjects.
        engine: ``vllm``, or ``modelled`` for one that follows vLLM's scheduler in modelled time.
        instances: Worker actors in this process, modelled engines only.
        model_path: Folder with config.json, tokenizer and weights; modelled engines use the tokenizer alone.
        dtype: ``auto``, ``bfloat16``, ``float16`` or ``float32``. ``auto`` is vLLM's choice by the model, but float32
            on an x86 CPU without AVX-512 for up to 4 GiB of weights that are not quantised: three times as fast there.
        load_format: vLLM's; ``dummy`` draws weights at random from the seed instead of reading them.
        block_size: Tokens per KV block; 0 for 32 on a CPU, vLLM's choice on a GPU, 16 modelled.
        kv_bytes: Size of the KV cache, bytes; 0 for 256 MiB on a CPU and for vLLM's choice on a GPU.
        kv_blocks: Number of KV blocks to use of it, vLLM's null block included; 0 for as many as fit.
        max_model_len: Prompt plus output, tokens; 0 for the model's own limit.
        max_num_seqs: Bound of the running batch; 0 for 64 on a CPU, that of ``vllm serve`` on a GPU, 256 modelled.
        max_num_batched_tokens: Token budget of a step; 0 for that of ``vllm serve``, 2,048 modelled.
        enable_prefix_caching: Whether KV blocks of finished prompts are reused by prompts that begin alike; None for
            vLLM's choice, which is no for some families.
        seed: Engine seed.
        tensor_parallel_size: GPUs of one engine.
        async_scheduling: None leaves it to vLLM (on for CUDA, off here).
        enforce_eager: True for no torch.compile; None for vLLM's default, which compiles. A CPU engine without a C++
            compiler is eager in any case.
        engine_args: Further ``AsyncEngineArgs`` by name, passed through.
        adapters: LoRA adapters that it loads at its start, name to folder; with ``enable_lora`` of ``engine_args`` more
            can be loaded, also where there are none.
        engine_cores: Cores that the engine process is pinned to; empty for no pinning.
        worker_cores: Cores that the worker process itself is pinned to; empty for no pinning.
        modelled: Parameters of the modelled engine (services/worker/modelled.py).
        step_time: Which step-time parameters fit this engine, for forecasts: a set that ships (for example ``cpu-8m``)
            or a file that the predictor was given; empty where unknown. A modelled engine says its own.
        shape: Device kind and tensor parallel size, such as ``cpu`` or ``h100x2``, for scaling by shape; empty where
            nobody needs it.
        migration: Moving running sequences with their KV.
        canary: What the engine is asked before it serves.
    """

    name: Annotated[str, WIRED]
    model: Annotated[str, WIRED]
    engine: Annotated[EngineKind, WIRED] = EngineKind.VLLM
    instances: Annotated[Count, WIRED] = 1
    model_path: Annotated[str, WIRED] = ""
    dtype: str = "auto"
    load_format: str = "auto"
    block_size: Natural = 0
    kv_bytes: Natural = 0
    kv_blocks: Natural = 0
    max_model_len: Natural = 0
    max_num_seqs: Natural = 0
    max_num_batched_tokens: Natural = 0
    enable_prefix_caching: bool | None = None
    seed: int = 0
    tensor_parallel_size: Annotated[Count, WIRED] = 1
    async_scheduling: bool | None = None
    enforce_eager: bool | None = None
    engine_args: dict[str, Any] = {}
    adapters: Annotated[dict[str, str], WIRED] = {}
    engine_cores: list[int] = []
    worker_cores: list[int] = []
    modelled: dict[str, Any] = {}
    step_time: str = ""
    shape: Annotated[str, WIRED] = ""
    limits: WorkerLimits = WorkerLimits()
    migration: MigrationConfig = MigrationConfig()
    canary: CanaryConfig = CanaryConfig()

    def instance_names(self) -> list[str]:
        if self.instances == 1:
            return [self.name]
        return [f"{self.name}-{index}" for index in range(self.instances)]
