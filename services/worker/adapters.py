"""LoRA adapters that this instance offers: those of its start, those it was asked to load, and those that came with a
sequence.

    message in        change                         messages out
    ChangeAdapter     asked of the engine,           AdapterChanged, once it is loaded or not
                      or offered no longer
    AdapterLoaded     offered                        the record; AdapterChanged to whoever waits
    AdapterNotLoaded  none                           AdapterChanged to whoever waits

A sequence keeps the adapter that it came with, whatever is loaded or unloaded meanwhile.
"""

from __future__ import annotations

import msgspec
from millrace.actor.effects import Effect, Reply
from millrace.actor.engine import AdapterNotLoaded, LoadInEngine
from millrace.contracts.worker import Adapter, AdapterChanged, ChangeAdapter

from services.worker.context import WorkerContext

#: Adapters offered at most: each is told in every record.
ADAPTERS_MAX = 256
NONE_TAKEN = "this engine takes no LoRA adapters: name one in the cluster's file, or set engine_args.enable_lora"


class Adapters:
    """Owns the list; the engine holds the weights."""

    def __init__(self, ctx: WorkerContext) -> None:
        self._ctx = ctx
        self._offered = {adapter.name: adapter for adapter in ctx.reporter.info.adapters or []}
        self._unloaded: dict[str, None] = {}
        self._waiting: dict[tuple[str, str], list[str]] = {}  # name and path -> who hears of it

    def change(self, body: ChangeAdapter, reply_to: str) -> list[Effect]:
        """Loads it, unless it is there; or unloads it."""
        return self._load(body, reply_to) if body.path else self._unload(body.name, reply_to)

    def _load(self, body: ChangeAdapter, reply_to: str) -> list[Effect]:
        known = self._offered.get(body.name)
        if self._ctx.reporter.info.adapters is None:
            return self._answer([reply_to], refusal=NONE_TAKEN)
        if known is not None and not body.replace:
            other = "" if known.path == body.path else f"{body.name} is the adapter at {known.path}"
            return self._answer([reply_to], known, refusal=other)
        if known is None and len(self._offered) >= ADAPTERS_MAX:
            return self._answer([reply_to], refusal=f"{ADAPTERS_MAX} adapters are loaded, at most that many")
        waiting = self._waiting.setdefault((body.name, body.path), [])
        waiting.append(reply_to)
        return [LoadInEngine(name=body.name, path=body.path)] if len(waiting) == 1 else []

    def _unload(self, name: str, reply_to: str) -> list[Effect]:
        """Offers it no longer; also one that is not known, so that an order may be repeated."""
        self._unloaded[name] = None
        if len(self._unloaded) > ADAPTERS_MAX:
            del self._unloaded[next(iter(self._unloaded))]
        told = self._tell() if self._offered.pop(name, None) is not None else []
        return told + self._answer([reply_to])

    def loaded(self, adapter: Adapter) -> list[Effect]:
        """The engine has it. One that came with a sequence does not bring back what was unloaded."""
        waiting = self._waiting.pop((adapter.name, adapter.path), [])
        if not waiting and (adapter.name in self._unloaded or adapter.name in self._offered):
            return []
        if not waiting and len(self._offered) >= ADAPTERS_MAX:
            return []
        self._unloaded.pop(adapter.name, None)
        self._offered[adapter.name] = adapter
        return self._tell() + self._answer(waiting, adapter)

    def refused(self, body: AdapterNotLoaded) -> list[Effect]:
        waiting = self._waiting.pop((body.name, body.path), [])
        return self._answer(waiting, self._offered.get(body.name), refusal=body.detail, missing=body.missing)

    def _tell(self) -> list[Effect]:
        reporter = self._ctx.reporter
        reporter.info = msgspec.structs.replace(reporter.info, adapters=list(self._offered.values()))
        return reporter.register()

    def _answer(
        self, waiting: list[str], adapter: Adapter | None = None, *, refusal: str = "", missing: bool = False
    ) -> list[Effect]:
        instance = self._ctx.identity.instance
        body = AdapterChanged(instance=instance, adapter=adapter, refusal=refusal, missing=missing)
        return [Reply(to=reply_to, body=body) for reply_to in waiting if reply_to]
