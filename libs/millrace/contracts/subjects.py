"""Builds subjects: ``mr.<cluster>.`` and the channel's pattern, each parameter made safe as one subject token."""

from __future__ import annotations

import re
from functools import lru_cache

_UNSAFE = re.compile(r"[^A-Za-z0-9_/=-]")


@lru_cache(maxsize=1 << 16)
def subject_token(name: str) -> str:
    """One NATS subject token for a name: letters, digits, ``_ / = -`` stay, everything else becomes ``_``.

    Raises:
        ValueError: for an empty name.
    """
    if not name:
        raise ValueError("an empty name has no subject token")
    return _UNSAFE.sub("_", name)


def covers(pattern: str, other: str) -> bool:
    """Whether a NATS pattern matches a subject, or all that another pattern matches.

    ``*`` is one token, ``>`` one or more at the end.
    """
    wanted, given = pattern.split("."), other.split(".")
    for index, token in enumerate(wanted):
        if token == ">":
            return len(given) > index
        if index >= len(given) or given[index] == ">" or (token != "*" and token != given[index]):
            return False
    return len(wanted) == len(given)


class Subjects:
    """Subjects of one cluster. Methods are named as the channels in the catalog."""

    def __init__(self, cluster: str) -> None:
        self.cluster = cluster
        self.prefix = f"mr.{subject_token(cluster)}"

    def tag(self, model: str) -> str:
        return f"{self.prefix}.tag.{subject_token(model)}"

    def predict(self, model: str, instance: str) -> str:
        """Requests to an instance's predictor (queue group ``predictor``)."""
        return f"{self.prefix}.predict.{subject_token(model)}.{subject_token(instance)}"

    def judge(self, cascade: str) -> str:
        """Requests to judge answers of a cascade (queue group ``judge``)."""
        return f"{self.prefix}.judge.{subject_token(cascade)}"

    def engine(self, instance: str, verb: str) -> str:
        """An instance's inbox; ``verb`` is submit, cancel, resend, acknowledge, adapter, drain, or one of a migrator's:
        lease, freeze, end, reserve, pull, unreserve (``*`` for all).
        """
        return f"{self.prefix}.engine.{subject_token(instance)}.{verb}"

    def tokens(self, ingress: str) -> str:
        return f"{self.prefix}.tokens.{subject_token(ingress)}"

    def returned(self, ingress: str) -> str:
        return f"{self.prefix}.returned.{subject_token(ingress)}"

    def find(self) -> str:
        return f"{self.prefix}.find"

    def epoch(self, ingress: str) -> str:
        return f"{self.prefix}.epoch.{subject_token(ingress)}"

    def moved(self, ingress: str) -> str:
        return f"{self.prefix}.moved.{subject_token(ingress)}"

    def replicated(self, ingress: str) -> str:
        return f"{self.prefix}.replicated.{subject_token(ingress)}"

    def migrate(self, instance: str, verb: str) -> str:
        """Orders about an instance's sequences: to its broker (start, evacuate), and to its migrator (move)."""
        return f"{self.prefix}.migrate.{subject_token(instance)}.{verb}"

    def migration(self, model: str, source: str, target: str) -> str:
        """Results of migrations between two instances; empty or ``*`` for any."""
        return f"{self.prefix}.migration.{_any(model)}.{_any(source)}.{_any(target)}"

    def migrations(self) -> str:
        return f"{self.prefix}.migration.*.*.*"

    def status(self, model: str, instance: str) -> str:
        return f"{self.prefix}.status.{subject_token(model)}.{subject_token(instance)}"

    def summary(self, model: str, instance: str) -> str:
        return f"{self.prefix}.summary.{subject_token(model)}.{subject_token(instance)}"

    def summaries(self) -> str:
        return f"{self.prefix}.summary.*.*"

    def presence(self, role: str, name: str) -> str:
        return f"{self.prefix}.presence.{subject_token(role)}.{subject_token(name)}"

    def presences(self, role: str = "*") -> str:
        return f"{self.prefix}.presence.{role}.*"

    def decision(self, model: str) -> str:
        return f"{self.prefix}.decision.{subject_token(model)}"

    def outcome(self, model: str) -> str:
        return f"{self.prefix}.outcome.{subject_token(model)}"

    def decisions(self) -> str:
        return f"{self.prefix}.decision.*"

    def outcomes(self) -> str:
        return f"{self.prefix}.outcome.*"

    def provisioning(self, model: str) -> str:
        return f"{self.prefix}.provisioning.{subject_token(model)}"

    def coordinate(self, model: str, verb: str) -> str:
        """Orders and proposals about a model; ``verb`` is role, scale or propose. ``*`` for all models."""
        token = model if model == "*" else subject_token(model)
        return f"{self.prefix}.coordinate.{token}.{verb}"

    def loads(self) -> str:
        return f"{self.prefix}.load.*.*"

    def load(self, model: str, stage: str) -> str:
        return f"{self.prefix}.load.{subject_token(model)}.{subject_token(stage)}"

    def ask(self, model: str, instance: str) -> str:
        return f"{self.prefix}.ask.{subject_token(model)}.{subject_token(instance)}"

    def bid(self, source: str, bidder: str) -> str:
        """Bids of an instance for the sequences of another one; empty or ``*`` for any."""
        return f"{self.prefix}.bid.{_any(source)}.{_any(bidder)}"

    def boundary(self, model: str, stage: str) -> str:
        return f"{self.prefix}.boundary.{subject_token(model)}.{subject_token(stage)}"

    def boundaries(self) -> str:
        return f"{self.prefix}.boundary.*.*"

    def provision(self, host: str, verb: str) -> str:
        """A provisioner's inbox; ``verb`` is start, stop or update (``*`` for all)."""
        return f"{self.prefix}.provision.{subject_token(host)}.{verb}"

    def bucket(self, name: str) -> str:
        """Name of a JetStream KV bucket of this cluster: ``mr_<cluster>_<name>``."""
        return f"mr_{subject_token(self.cluster).replace('/', '_').replace('=', '_')}_{name}"

    def changes(self, bucket: str) -> str:
        """Prefix of the subjects on which the store tells each change of a bucket; a key follows."""
        return f"{self.prefix}.kv.{bucket}."


def _any(name: str) -> str:
    return "*" if name in ("", "*") else subject_token(name)
