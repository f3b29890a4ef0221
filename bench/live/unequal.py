"""Two engines that differ much, and a load on which it matters who gets what: many short outputs, few very long ones.

Two equal engines leave a policy little to choose. Here worker-1 runs two sequences at a time and has few blocks; who
gives both the same, or looks at the wrong thing, makes requests wait at one while the other has room.
"""

from __future__ import annotations

from typing import Any

import msgspec
from millrace.contracts.status import InstanceRecord

from bench.live.plan import Load
from papers import PAPERS
from tests.testbed.messages import plain_record

#: Tokens of a block on both.
BLOCK_SIZE = 32


class Limits(msgspec.Struct, frozen=True, kw_only=True):
    """Limits of one engine. ``blocks``: without vLLM's null block."""

    sequences: int
    blocks: int
    tokens: int = 1024
    budget: int = 2048

    def settings(self, engine: str) -> dict[str, Any]:
        """As fields of WorkerConfig. Policies take turns on the same prompts: none shall find another's blocks."""
        return {
            "max_num_seqs": self.sequences,
            "kv_blocks": self.blocks + (engine == "vllm"),
            "block_size": BLOCK_SIZE,
            "max_model_len": self.tokens,
            "max_num_batched_tokens": self.budget,
            "enable_prefix_caching": False,
        }

    def record(self, instance: str, *, engine: str = "vllm") -> InstanceRecord:
        """As such an engine registers itself."""
        return plain_record(
            instance,
            engine=engine,
            max_model_len=self.tokens,
            max_sequences=self.sequences,
            token_budget=self.budget,
            block_size=BLOCK_SIZE,
            blocks_total=self.blocks,
            prefix_caching=False,
        )


#: worker-0 and worker-1.
LIMITS = (Limits(sequences=16, blocks=1280), Limits(sequences=2, blocks=48))

#: Chosen in simulation, before real engines had it.
LOAD = Load(
    kind="stated",
    count=0,
    rate_per_s=1.0,
    cv=2.5,
    output_mean=50.0,
    output_sigma=0.5,
    output_max=640,
    long_share=0.1,
    long_mean=200.0,
)
#: Half of the requests are then a little more than worker-1 can serve.
UTILISATION = 0.55
POLICIES = ("forecast", f"{PAPERS}/block/llumnix.py", "join_shortest_queue", "round_robin")
COUNT, ROUNDS = 300, 4
