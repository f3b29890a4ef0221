"""Service of a list of requests by some instances with roles, simulated with the engine model. Pure.

Prompts go to the prefill-capable instance that is predicted to be done first, sequences after their first token to the
decode-capable one likewise; each instance is then simulated step by step (`enginemodel.forecast.replica`). Transfers
take their own time and share no link. It is what `assignment` compares role assignments by.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import msgspec
from millrace.contracts.plan import InstanceRole
from millrace.contracts.status import BatchComposition
from millrace.enginemodel.forecast.question import ReplicaRequest
from millrace.enginemodel.forecast.replica import ServedRequest, simulate_replica
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_cost import FS_PER_NS, StepCost


class InstanceShape(msgspec.Struct, frozen=True, kw_only=True):
    """One way to run the model on some devices of a kind.

    Attributes:
        name: For example ``h200-tp2``.
        device: Kind of device.
        devices: Of it, per instance (the tensor parallel size).
        cost: Of a step.
        parameters: Of its engine.
        transfer_ns: Of one hand-off, beside its bytes.
        token_transfer_ns: Of each token of KV in it.
    """

    name: str
    device: str
    cost: StepCost
    parameters: EngineParameters
    devices: int = 1
    transfer_ns: int = 10_000_000
    token_transfer_ns: int = 3_000


class MixMember(msgspec.Struct, frozen=True):
    """Instances of one shape with one role."""

    shape: InstanceShape
    role: InstanceRole
    count: int


class MixOutcome(msgspec.Struct, frozen=True):
    """Latencies of each request, ns, in the order given: until its first and its last token."""

    ttft_ns: tuple[int, ...]
    e2e_ns: tuple[int, ...]


@dataclass(kw_only=True)
class _Server:
    """One instance: predicted end of what it was given, and the requests."""

    shape: InstanceShape
    role: InstanceRole
    decode_ns: float
    free_ns: float = 0.0

    def __post_init__(self) -> None:
        self.given: list[tuple[int, ReplicaRequest]] = []

    def take(self, index: int, request: ReplicaRequest, work_ns: float) -> None:
        self.free_ns = max(self.free_ns, float(request.at_ns)) + work_ns
        self.given.append((index, request))

    def end_ns(self, at_ns: int, work_ns: float) -> float:
        return max(self.free_ns, float(at_ns)) + work_ns


def serve_mix(requests: Sequence[ReplicaRequest], mix: Sequence[MixMember]) -> MixOutcome:
    """Simulate the requests on a mix.

    Args:
        requests: In order of arrival; without KV.
        mix: With a prefill-capable and a decode-capable instance.

    Raises:
        ValueError: nobody prefills or nobody decodes, or a request fits in no instance.
    """
    context = sum(r.prompt_tokens + r.output_tokens / 2 for r in requests) / max(1, len(requests))
    servers = [
        _Server(shape=m.shape, role=m.role, decode_ns=decode_token_ns(m.shape, context))
        for m in mix
        for _ in range(m.count)
    ]
    prefills = [s for s in servers if s.role is not InstanceRole.DECODE]
    decodes = [s for s in servers if s.role is not InstanceRole.PREFILL]
    if not prefills or not decodes:
        raise ValueError("a mix needs an instance that prefills and one that decodes")
    for index, request in enumerate(requests):
        _place_prompt(index, request, prefills)
    first, last = [0] * len(requests), [0] * len(requests)
    handed: list[tuple[int, ReplicaRequest]] = []
    for server in (each for each in servers if each.role is InstanceRole.PREFILL):
        for index, served in _served(server):
            first[index], last[index] = served.first_token_ns, served.end_ns
            if requests[index].output_tokens > 1:
                handed.append((index, _after_hand_off(server.shape, requests[index], served.first_token_ns)))
    for index, request in sorted(handed, key=lambda each: (each[1].at_ns, each[0])):
        _place_decode(index, request, decodes)
    for server in decodes:
        for index, served in _served(server):
            first[index], last[index] = first[index] or served.first_token_ns, served.end_ns
    arrivals = [request.at_ns for request in requests]
    return MixOutcome(
        tuple(at - begun for at, begun in zip(first, arrivals, strict=True)),
        tuple(at - begun for at, begun in zip(last, arrivals, strict=True)),
    )


def prompt_ns(shape: InstanceShape, prompt_tokens: int) -> float:
    """Time to compute a prompt alone, in chunks of the token budget."""
    budget, done, total_fs = shape.parameters.token_budget, 0, 0
    while done < prompt_tokens:
        chunk = min(budget, prompt_tokens - done)
        batch = BatchComposition(
            prefills=1,
            prefill_tokens=chunk,
            context_tokens=done + chunk,
            prefill_context_tokens=done + chunk,
            prefill_work=chunk * (done + chunk / 2),
        )
        total_fs += shape.cost.duration_fs(batch)
        done += chunk
    return total_fs / FS_PER_NS


def decode_token_ns(shape: InstanceShape, context_tokens: float) -> float:
    """Time of an instance per token decoded, with as many sequences as its memory and its batch hold."""
    engine = shape.parameters
    blocks = max(1.0, context_tokens / engine.block_size)
    batch = max(1, min(engine.max_sequences, int(engine.blocks_total / blocks)))
    context = round(batch * context_tokens)
    step = BatchComposition(decodes=batch, context_tokens=context, longest_context=round(context_tokens))
    return shape.cost.duration_fs(step) / FS_PER_NS / batch


def _place_prompt(index: int, request: ReplicaRequest, servers: Sequence[_Server]) -> None:
    def work_ns(server: _Server) -> float:
        decodes = server.role is InstanceRole.BOTH
        return prompt_ns(server.shape, request.prompt_tokens) + decodes * request.output_tokens * server.decode_ns

    server = min(servers, key=lambda each: each.end_ns(request.at_ns, work_ns(each)))
    prefills = server.role is InstanceRole.PREFILL
    own = msgspec.structs.replace(request, output_tokens=1) if prefills else request
    server.take(index, own, work_ns(server))


def _place_decode(index: int, request: ReplicaRequest, servers: Sequence[_Server]) -> None:
    tokens = request.output_tokens
    server = min(servers, key=lambda each: each.end_ns(request.at_ns, tokens * each.decode_ns))
    server.take(index, request, tokens * server.decode_ns)


def _after_hand_off(shape: InstanceShape, whole: ReplicaRequest, first_ns: int) -> ReplicaRequest:
    """The sequence as it comes to an instance that decodes: its prompt's KV is there, its first token is not."""
    moved_ns = shape.transfer_ns + whole.prompt_tokens * shape.token_transfer_ns
    return ReplicaRequest(
        at_ns=first_ns + moved_ns,
        prompt_tokens=whole.prompt_tokens + 1,
        output_tokens=whole.output_tokens - 1,
        kv_tokens=whole.prompt_tokens,
    )


def _served(server: _Server) -> list[tuple[int, ServedRequest]]:
    """Times by the requests' indices."""
    given = sorted(server.given, key=lambda each: (each[1].at_ns, each[0]))
    if not given:
        return []
    served = simulate_replica([request for _, request in given], server.shape.cost, server.shape.parameters)
    return [(index, times) for (index, _), times in zip(given, served, strict=True)]
