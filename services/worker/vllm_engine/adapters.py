"""LoRA adapters in an engine. Each content of one has a name and a number of its own in vLLM: what runs keeps what it
began with, and prefixes are shared among sequences of one content only.
"""

from __future__ import annotations

import asyncio
import json
from collections import OrderedDict
from itertools import count
from pathlib import Path
from typing import Any, get_args

from millrace.contracts.worker import Adapter
from millrace.kvcopy.weights import ADAPTER_CONFIG, adapter_fingerprint
from vllm.config.lora import MaxLoRARanks
from vllm.lora.request import LoRARequest

#: Different adapters in one batch at most, where the configuration does not say, and at least in host memory.
LORAS_MAX = 8
#: Contents that are remembered, the last used ones: one beyond them is loaded again.
KNOWN_MAX = 256


class AdapterRefused(Exception):
    """It was not loaded; the message says why. ``missing``: there is none at that path."""

    def __init__(self, detail: str, *, missing: bool = False) -> None:
        super().__init__(detail)
        self.missing = missing


class EngineAdapters:
    """Adapters that were loaded into one engine. VLLM reads again what it put away meanwhile."""

    def __init__(self, *, known_max: int = KNOWN_MAX) -> None:
        self._known_max = known_max
        self._requests: OrderedDict[tuple[str, str], LoRARequest] = OrderedDict()  # by name and fingerprint
        self._numbers = count(1)
        self._one_by_one = asyncio.Lock()

    def get(self, adapter: Adapter) -> LoRARequest | None:
        """Its request to vLLM; None before it was loaded, and where it was forgotten."""
        known = (adapter.name, adapter.fingerprint)
        if known in self._requests:
            self._requests.move_to_end(known)
        return self._requests.get(known)

    async def load(self, core: Any, name: str, path: str, fingerprint: str = "") -> Adapter:
        """Loads the adapter at a path, where it is not loaded.

        Args:
            fingerprint: That it must have; empty for any.

        Raises:
            AdapterRefused: it is not there, has another content, or vLLM cannot load it.
        """
        async with self._one_by_one:
            try:
                found = await asyncio.to_thread(adapter_fingerprint, path)
            except OSError:
                raise AdapterRefused(f"No adapter found for {path}", missing=True) from None
            if fingerprint and found != fingerprint:
                raise AdapterRefused(f"the adapter {name} at {path} has other weights here")
            if (name, found) not in self._requests:
                request = LoRARequest(f"{name}@{found[:16]}", next(self._numbers), path)
                try:
                    await core.add_lora_async(request)
                except Exception as error:
                    raise AdapterRefused(str(error).strip().rpartition("\n")[2] or type(error).__name__) from error
                self._requests[name, found] = request
                if len(self._requests) > self._known_max:
                    self._requests.popitem(last=False)
            return Adapter(name=name, path=path, fingerprint=found)


def lora_arguments(adapters: dict[str, str]) -> dict[str, Any]:
    """VLLM's arguments of an engine that starts with these adapters, name to path.

    Raises:
        OSError: an adapter's configuration cannot be read.
    """
    if not adapters:
        return {}
    configs = [json.loads((Path(path) / ADAPTER_CONFIG).read_bytes()) for path in adapters.values()]
    rank = max(int(config["r"]) for config in configs)
    return {
        "enable_lora": True,
        "max_lora_rank": min((size for size in get_args(MaxLoRARanks) if size >= rank), default=rank),
        "max_loras": min(len(adapters), LORAS_MAX),
        "max_cpu_loras": max(len(adapters), LORAS_MAX),
    }
