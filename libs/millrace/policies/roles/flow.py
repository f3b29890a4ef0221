"""Fluid approximation of a mix of roles over the next seconds, to rank mixes. Pure.

Requests are a flow of prompt tokens. Decodes are a number of sequences with a mean context. Time advances in ticks. In
each tick arrivals go to the prefill-capable instance that is done first, instances compute by their linear step costs,
and sequences whose prompt is done go to the decode-capable instance with the most room. The approximation tells mixes
apart; latencies of single requests are forecast by `enginemodel.forecast`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from millrace.contracts.plan import InstanceRole
from millrace.policies.roles.view import Demand, RoleInstance
from millrace.policies.stages.instance import InstanceModel

#: Length of a tick, and how far the simulation looks, seconds.
TICK_S = 0.5
HORIZON_S = 30.0

#: A loaded instance computes no step longer than this when its share of time is computed, seconds.
STEP_S_MIN = 1e-6


@dataclass(kw_only=True)
class FlowInstance:
    """One instance in the simulation.

    Attributes:
        role: In the mix that is tried.
        model: Cost of steps.
        backlog: Prompt tokens to compute.
        decoding: Sequences that decode here.
        context: Tokens of their contexts.
        kv_tokens: Tokens that the memory holds.
    """

    role: InstanceRole
    model: InstanceModel
    backlog: float
    decoding: float
    context: float
    kv_tokens: float

    @property
    def decode_s(self) -> float:
        """Time of a step that only decodes."""
        model = self.model
        fixed = model.fixed_s + self.decoding * model.per_decode_s + self.context * model.per_context_token_s
        return max(STEP_S_MIN, fixed)

    def prefill_s(self, prompt: float) -> float:
        """Time per prompt token, for prompts of a length, attention included; steps that carry it are full."""
        return self.model.per_prefill_token_s + self.model.per_prefill_work_s * prompt / 2

    @property
    def fill(self) -> float:
        """Share of the memory in use by decodes and their prompts."""
        return self.context / max(1.0, self.kv_tokens)


@dataclass(frozen=True, kw_only=True)
class Targets:
    """Objectives and limits that loads are compared with.

    Attributes:
        ttft_s, tpot_s: Objectives.
        chunk_tokens: Prompt tokens of a step, about the token budget.
        kv_max: Share of the memory above which sequences are preempted.
        step_share: Share of ``tpot_s`` that a step which carries prompts may take, where decodes come first; 0 where
            steps are as full as they get.
        step_tokens_min: No step is bounded to fewer tokens.
        slowdown_max: Share of the prompt tokens per second that bounded steps may cost where prompts wait longer than
            ``ttft_s``.
    """

    ttft_s: float
    tpot_s: float
    chunk_tokens: float = 2048.0
    kv_max: float = 0.95
    step_share: float = 0.0
    step_tokens_min: float = 512.0
    slowdown_max: float = 0.1


@dataclass(frozen=True, kw_only=True)
class Pressures:
    """Load over objective, 1 where the objective is just met: of prefill (TTFT), and of decode (TPOT, memory)."""

    prefill: float
    decode: float

    @property
    def worst(self) -> float:
        """The larger of the two."""
        return max(self.prefill, self.decode)


def simulate(
    instances: Sequence[RoleInstance], roles: Mapping[str, InstanceRole], demand: Demand, targets: Targets
) -> Pressures:
    """Mean pressures over the horizon.

    Args:
        instances: With step costs and indicators; those without costs are left out.
        roles: Of those whose role is another one in this mix.
        demand: Goes on as it was.
        targets: Objectives.
    """
    members = [member_of(each, roles.get(each.name, each.role)) for each in instances if each.model is not None]
    ticks = round(HORIZON_S / TICK_S)
    sums = [0.0, 0.0]
    for _ in range(ticks):
        _arrive(members, demand)
        finished = sum(_compute(each, demand, targets) for each in members)
        _place(members, finished, demand)
        now = pressures(members, demand, targets)
        sums = [sums[0] + now.prefill, sums[1] + now.decode]
    return Pressures(prefill=sums[0] / ticks, decode=sums[1] / ticks)


def member_of(instance: RoleInstance, role: InstanceRole) -> FlowInstance:
    """An instance, whose step costs are known, as it enters the simulation."""
    assert instance.model is not None
    told = instance.indicators
    return FlowInstance(
        role=role,
        model=instance.model,
        backlog=float(told.prefill_tokens_left),
        decoding=float(told.decoding + told.decode_queue),
        context=float(told.context_tokens),
        kv_tokens=instance.model.kv_tokens,
    )


def present(instances: Sequence[RoleInstance], demand: Demand, targets: Targets) -> Pressures:
    """Pressures of the mix as it is, now."""
    return pressures([member_of(i, i.role) for i in instances if i.model is not None], demand, targets)


def pressures(members: Sequence[FlowInstance], demand: Demand, targets: Targets) -> Pressures:
    """Pressures of a state. Without an instance of a kind its pressure is infinite."""
    prompt = max(1.0, demand.prompt_tokens)
    waits = [(m.backlog + prompt) * _token_s(m, prompt, targets) for m in members if m.role is not InstanceRole.DECODE]
    decoders = [m for m in members if m.role is not InstanceRole.PREFILL]
    busy = [m for m in decoders if m.decoding > 0]
    steps = [_felt_step_s(m, prompt, targets) / targets.tpot_s for m in busy]
    # Sequences that decode where prompts are computed, because nobody else has room, count where they belong.
    stranded = sum(m.context for m in members if m.role is InstanceRole.PREFILL)
    room = sum(m.kv_tokens for m in decoders)
    fill = (sum(m.context for m in decoders) + stranded) / max(1.0, room * targets.kv_max)
    prefill = min(waits) / targets.ttft_s if waits else float("inf")
    decode = max(fill, sum(steps) / len(steps) if steps else 0.0) if decoders else float("inf")
    return Pressures(prefill=prefill, decode=decode)


def _token_s(member: FlowInstance, prompt: float, targets: Targets) -> float:
    """Time until one more prompt token is computed, beside the decodes of each step."""
    return member.prefill_s(prompt) + member.decode_s / chunk_of(member, prompt, targets)


def chunk_of(member: FlowInstance, prompt: float, targets: Targets) -> float:
    """Prompt tokens of a step: all that decodes leave, or fewer where decodes come first and would wait too long.

    Bounded steps compute fewer prompt tokens per second, since each of them pays for its decodes. Where prompts would
    wait longer than their objective for it, that may cost ``slowdown_max``.
    """
    full = max(1.0, targets.chunk_tokens - member.decoding)
    if not targets.step_share or member.decoding < 1:
        return full
    token_s, decode_s = member.prefill_s(prompt), member.decode_s
    least = max(1.0, targets.step_tokens_min - member.decoding)
    wanted = min(full, max(least, (targets.step_share * targets.tpot_s - decode_s) / token_s))
    if (member.backlog + prompt) * (token_s + decode_s / wanted) <= targets.ttft_s:
        return wanted
    slowest_s = (token_s + decode_s / full) / (1 - targets.slowdown_max)
    return min(full, max(wanted, decode_s / (slowest_s - token_s)))


def _felt_step_s(member: FlowInstance, prompt: float, targets: Targets) -> float:
    """Mean time between two tokens of a decode here: longer while prompts are computed beside it."""
    if member.role is InstanceRole.DECODE or member.backlog <= 0:
        return member.decode_s
    chunk = min(member.backlog, chunk_of(member, prompt, targets))
    return member.decode_s + chunk * member.prefill_s(prompt)


def _arrive(members: Sequence[FlowInstance], demand: Demand) -> None:
    """Give the tick's prompt tokens to who is done first, a request at a time."""
    takers = [m for m in members if m.role is not InstanceRole.DECODE]
    tokens = demand.requests_per_s * TICK_S * demand.prompt_tokens
    portions = 4
    for _ in range(portions if takers else 0):
        first = min(takers, key=lambda m: m.backlog * m.prefill_s(demand.prompt_tokens))
        first.backlog += tokens / portions


def _compute(member: FlowInstance, demand: Demand, targets: Targets) -> float:
    """Compute one tick. Returns sequences whose prompt is done."""
    prompt = max(1.0, demand.prompt_tokens)
    mixed_s = _token_s(member, prompt, targets)
    done = min(member.backlog, TICK_S / mixed_s)
    member.backlog -= done
    prefill_time_s = done * mixed_s
    chunk_s = _felt_step_s(member, prompt, targets) if done else member.decode_s
    steps = (TICK_S - prefill_time_s) / member.decode_s + prefill_time_s / max(STEP_S_MIN, chunk_s)
    mean = member.context / member.decoding if member.decoding else 0.0
    ended = min(member.decoding, member.decoding * steps / max(1.0, demand.output_tokens))
    member.decoding -= ended
    member.context = member.decoding * mean
    return done / prompt


def _place(members: Sequence[FlowInstance], sequences: float, demand: Demand) -> None:
    """Put sequences whose prompt is done where there is the most room; where there is none, they stay in prefill."""
    length = demand.prompt_tokens + demand.output_tokens / 2
    decoders = [m for m in members if m.role is not InstanceRole.PREFILL]
    portions = 4
    for _ in range(portions if sequences else 0):
        target = min(decoders or members, key=lambda m: m.fill)
        if target.fill >= 1 and decoders:
            target = min(members, key=lambda m: m.fill)
        target.decoding += sequences / portions
        target.context += sequences / portions * length
