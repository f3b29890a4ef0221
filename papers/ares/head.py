"""Estimates of remaining lengths with the error of a trained head: what an engine that reads hidden states tells.

A file for ``extension`` of a scenario.

The error is an autoregressive process in the logarithm: its width depends on how much was generated, and it changes
slowly as more is. Independent noise on each report would average out over a sequence's life, as no predictor's does.
Source: residuals of ``bench remaining`` on millrace-mini, held-out requests (docs/decisions/0027).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from random import Random
from typing import Any

import msgspec
from millrace.contracts.status import SequenceStatus
from millrace.sim.engine_sim import SimulatedEngine
from millrace.sim.process import SimProcess

from simulator.scenarios.cluster import ScenarioCluster
from simulator.scenarios.spec import ScenarioSpec
from simulator.services import SimInstance

#: Octaves of generated tokens: outputs up to 2^20.
OCTAVES = 20


class Parameters(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A head's error: ``log(1 + p50) = log(1 + rest) + error``.

    Attributes:
        every: Tokens between two estimates of a sequence.
        generated: Output tokens from which on each of ``sigmas`` holds, rising from 0.
        sigmas: Standard deviation of the error.
        correlation: Of the errors at ``n`` and at ``2n`` output tokens.
        spread: ``log(1 + p90) - log(1 + p50)`` in standard deviations.
    """

    every: int = 20
    generated: tuple[int, ...] = (0, 8, 16, 32, 64, 128)
    sigmas: tuple[float, ...] = (0.72, 0.79, 0.91, 1.08, 1.25, 1.15)
    correlation: float = 0.72
    spread: float = 1.0

    def __post_init__(self) -> None:
        if self.every < 1:
            raise ValueError(f"every must be at least 1, is {self.every}")
        rising = list(self.generated) == sorted(set(self.generated))
        if len(self.generated) != len(self.sigmas) or not rising or self.generated[:1] != (0,):
            raise ValueError("generated must rise from 0, with as many sigmas")
        if min(self.sigmas) < 0 or not 0 <= self.correlation <= 1 or self.spread < 0:
            raise ValueError("sigmas and spread must not be negative, correlation must be from 0 to 1")

    def sigma(self, generated: int) -> float:
        """Standard deviation of the error after so many tokens."""
        return self.sigmas[bisect_right(self.generated, generated) - 1]


class HeadEstimates:
    """Estimates of all sequences. An error belongs to a sequence, not to its instance: it moves with it."""

    def __init__(self, spec: Parameters, seed: int) -> None:
        self._spec = spec
        self._seed = seed
        self._errors: dict[str, list[float]] = {}

    def reported(self, status: SequenceStatus, length: int) -> SequenceStatus:
        """The status with an estimate of the rest; as it is before the first token.

        Args:
            length: Output length that the sequence will have, tokens.
        """
        at = status.output_tokens - status.output_tokens % self._spec.every
        if status.output_tokens < 1 or at >= length:
            return status
        sigma = self._spec.sigma(at)
        log_rest = math.log1p(length - at) + sigma * self._error(status.sequence, at)
        room = max(1, status.max_tokens - at)
        p50 = min(room, max(1, round(math.expm1(log_rest))))
        p90 = min(room, max(p50, round(math.expm1(log_rest + sigma * self._spec.spread))))
        return msgspec.structs.replace(status, expected_output_tokens=at + p50, expected_p90=at + p90, expected_at=at)

    def _error(self, sequence: str, at: int) -> float:
        """Of variance 1 at each octave, between two octaves mixed of both."""
        errors = self._errors.get(sequence) or self._drawn(sequence)
        octave, part = divmod(math.log2(1 + at), 1.0)
        low, high = errors[int(octave)], errors[int(octave) + 1]
        variance = (1 - part) ** 2 + part**2 + 2 * part * (1 - part) * self._spec.correlation
        return ((1 - part) * low + part * high) / math.sqrt(variance)

    def _drawn(self, sequence: str) -> list[float]:
        rng, share = Random(f"{self._seed}/head/{sequence}"), self._spec.correlation
        errors = [rng.gauss(0.0, 1.0)]
        for _ in range(OCTAVES + 1):
            errors.append(share * errors[-1] + math.sqrt(1 - share**2) * rng.gauss(0.0, 1.0))
        self._errors[sequence] = errors
        return errors


class HeadCluster(ScenarioCluster):
    """A scenario's cluster whose engines tell these estimates of running sequences."""

    def __init__(self, spec: ScenarioSpec, **options: Any) -> None:
        self._head = HeadEstimates(Parameters(), spec.seed)
        super().__init__(spec, **options)

    def _make_engine(self, instance: SimInstance, process: SimProcess) -> SimulatedEngine:
        made = super()._make_engine(instance, process)
        made.engine.estimated = lambda status: self._head.reported(
            status, self._output_length(instance.model, status.sequence)
        )
        return made


cluster = HeadCluster
