"""Loads that a profile runs: lengths in buckets of powers of two, batches of 1, 2, 4, … up to the memory's limit.

Beside them rounds of mixed lengths, and rounds whose prompts come while others decode: a step-time model needs both.
"""

from __future__ import annotations

import random

import msgspec

from millrace.enginemodel.parameters import EngineParameters
from millrace.profiling.records import PlannedSequence, Round

SHORTEST = 16  # tokens of the first bucket
STAGGER = 3  # steps between arrivals in mixed rounds, at most


class Effort(msgspec.Struct, frozen=True, kw_only=True):
    """Amount of measurement in a profile.

    Attributes:
        output_tokens: Of each sequence: so many decode steps a round has, about.
        prompt_tokens_max: Of a round together: what bounds its time.
        mixed_rounds: Rounds of mixed lengths, and as many with staggered arrivals, for each batch size.
    """

    output_tokens: int = 24
    prompt_tokens_max: int = 16_384
    mixed_rounds: int = 2


def rounds(parameters: EngineParameters, effort: Effort, seed: int) -> list[Round]:
    """All rounds of a profile, in an order of its own so that a slow minute hits no bucket alone."""
    rng = random.Random(seed)
    planned = [
        even(length, count, effort, rng)
        for length in lengths(parameters, effort)
        for count in batches(parameters)
        if _fits(length, count, parameters, effort)
    ]
    for count in batches(parameters):
        for number in range(effort.mixed_rounds):
            planned.append(mixed(f"mixed-{count}-{number}", count, parameters, effort, rng))
            planned.append(staggered(f"staggered-{count}-{number}", count, parameters, effort, rng))
    rng.shuffle(planned)
    return planned


def lengths(parameters: EngineParameters, effort: Effort) -> list[int]:
    """Prompt lengths of the buckets: 16, 32, 64, … as long as the output still fits behind."""
    longest = min(parameters.max_model_len - effort.output_tokens, effort.prompt_tokens_max)
    return [SHORTEST << power for power in range(32) if SHORTEST << power <= longest] or [max(1, longest)]


def batches(parameters: EngineParameters) -> list[int]:
    """Batch sizes: 1, 2, 4, … and the largest that the engine takes."""
    most = parameters.max_sequences
    return sorted({*(1 << power for power in range(32) if 1 << power <= most), most})


def even(length: int, count: int, effort: Effort, rng: random.Random) -> Round:
    """A batch of equal prompts (within a tenth), all at once."""
    sequences = [
        PlannedSequence(prompt_tokens=max(1, length - rng.randint(0, length // 10)), output_tokens=effort.output_tokens)
        for _ in range(count)
    ]
    return Round(name=f"even-{length}-{count}", sequences=tuple(sequences))


def mixed(name: str, count: int, parameters: EngineParameters, effort: Effort, rng: random.Random) -> Round:
    """A batch of very different prompts, all at once."""
    return Round(name=name, sequences=tuple(_spread(count, parameters, effort, rng)))


def staggered(name: str, count: int, parameters: EngineParameters, effort: Effort, rng: random.Random) -> Round:
    """Prompts that come while others decode."""
    at_step, sequences = 0, []
    for sequence in _spread(count, parameters, effort, rng):
        sequences.append(msgspec.structs.replace(sequence, at_step=at_step))
        at_step += rng.randint(0, STAGGER)
    return Round(name=name, sequences=tuple(sequences))


def _spread(count: int, parameters: EngineParameters, effort: Effort, rng: random.Random) -> list[PlannedSequence]:
    """Sequences of different lengths that together stay within the limits."""
    share = min(_room(parameters), effort.prompt_tokens_max)
    sequences = []
    for left in range(count, 0, -1):
        outputs = rng.randint(max(1, effort.output_tokens // 2), effort.output_tokens * 2)
        outputs = max(1, min(outputs, parameters.max_model_len // 2))
        most = min(parameters.max_model_len - outputs, share - left * (SHORTEST + outputs))
        longest = rng.choice([length for length in lengths(parameters, effort) if length <= max(SHORTEST, most)] or [1])
        tokens = max(1, min(rng.randint(max(1, longest // 2), longest), parameters.max_model_len - outputs))
        share -= tokens + outputs
        sequences.append(PlannedSequence(prompt_tokens=tokens, output_tokens=outputs))
    return sequences


def _fits(length: int, count: int, parameters: EngineParameters, effort: Effort) -> bool:
    whole = -(-(length + effort.output_tokens) // parameters.block_size)
    return count * whole <= parameters.blocks_total and count * length <= effort.prompt_tokens_max


def _room(parameters: EngineParameters) -> int:
    """Tokens that fit into the cache even where every block is half empty."""
    return parameters.blocks_total * parameters.block_size // 2
