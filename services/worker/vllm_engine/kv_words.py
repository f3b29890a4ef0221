"""Messages about KV between the worker and the engine core: one utility call per command, one answer.

``EngineCore.millrace_move`` takes a Call and returns one of KvAnswer, both as MessagePack; an EndLeaseInEngine or
UnreserveInEngine has no answer. ``EngineCore.millrace_kv`` returns an Offer.
"""

from __future__ import annotations

import msgspec
from millrace.actor.engine import (
    EndLeaseInEngine,
    FreezeInEngine,
    KvBlocksRead,
    KvDenied,
    KvLeaseTaken,
    KvRoomReserved,
    LeaseInEngine,
    PullIntoEngine,
    ReserveInEngine,
    SequenceStopped,
    UnreserveInEngine,
)
from millrace.contracts.kv import CopierKind, KvGroup, KvHandover, KvRank
from vllm.lora.request import LoRARequest

KvAnswer = KvLeaseTaken | SequenceStopped | KvRoomReserved | KvBlocksRead | KvDenied
_Command = LeaseInEngine | FreezeInEngine | EndLeaseInEngine | ReserveInEngine | PullIntoEngine | UnreserveInEngine

#: Key in SamplingParams.extra_args: an encoded Arrival.
ARRIVAL = "millrace_arrival"
#: Attribute of a vLLM Request: tokens whose KV it brought.
KV_TOKENS = "millrace_kv_tokens"
#: Key in VllmConfig.additional_config: a KvSettings as JSON (vLLM hashes it as such); absent where nothing may move.
SETTINGS = "millrace_kv_settings"


class KvSettings(msgspec.Struct, frozen=True, kw_only=True):
    """Settings with which the engine process moves KV.

    Attributes:
        socket: Path of the Unix socket that hands out the KV, ``{rank}`` in it stands for the tensor-parallel rank.
        verify: Share of the blocks that checksums are made of and compared.
        copy_bytes_per_step: What is copied, or summed, between two steps.
        copiers: The only ones used; empty for all.
    """

    socket: str
    verify: float
    copy_bytes_per_step: int
    copiers: list[CopierKind] = []


class KvCall(msgspec.Struct, frozen=True, kw_only=True):
    """A command, with what the worker knows beyond it.

    Attributes:
        request_id: Of the sequence inside vLLM, for a lease or a freeze; empty where the worker knows none.
        copiers: That a reservation may be read with, best first.
        match_prefix: Whether a reservation may use the prefix cache. The self-test wants the bytes to travel.
        lora: Adapter of the sequence that a reservation is for.
    """

    command: _Command
    request_id: str = ""
    copiers: list[CopierKind] = []
    match_prefix: bool = True
    lora: LoRARequest | None = None


class TimedHandover(msgspec.Struct, frozen=True, kw_only=True):
    """A handover, and until when its rest may be read (unix ns, this host's clock)."""

    handover: KvHandover
    until_ns: int


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """Location and layout of the KV; or, in ``refusal``, the reason why it moves nowhere.

    Attributes:
        layout: Everything about the layout that two engines must share, for the fingerprint.
        blocks: Block ids are below this.
        block_tokens, groups: As in KvEndpoint.
    """

    refusal: str = ""
    ranks: list[KvRank] = []
    copiers: list[CopierKind] = []
    layout: dict[str, str] = {}
    blocks: int = 0
    block_tokens: int = 0
    groups: list[KvGroup] = []


encode = msgspec.msgpack.Encoder().encode
decode_call = msgspec.msgpack.Decoder(KvCall).decode
decode_answer = msgspec.msgpack.Decoder(KvAnswer).decode
decode_arrival = msgspec.msgpack.Decoder(TimedHandover).decode
decode_offer = msgspec.msgpack.Decoder(Offer).decode
decode_rank = msgspec.msgpack.Decoder(KvRank).decode
decode_ranks = msgspec.msgpack.Decoder(list[KvRank]).decode
decode_settings = msgspec.json.Decoder(KvSettings).decode
