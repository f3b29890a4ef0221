"""Knowledge of instances: their registrations, and, where it keeps KV replicas, who has room for one."""

from __future__ import annotations

from collections.abc import Set

from millrace.contracts.broker import LoadReported
from millrace.contracts.kv import compatible
from millrace.contracts.local import KeyChanged
from millrace.contracts.plan import InstanceRole, Plan
from millrace.contracts.status import InstanceRecord
from millrace.policies.trading.loads import lightest, load_view

_MS = 1_000_000

#: Instances and models that are known.
INSTANCES_MAX, MODELS_MAX = 4_096, 256

#: A load that is older does not count: three are missing.
LOAD_AGE_NS = 1_500 * _MS


class KnownInstances:
    """Instances of the cluster as one migrator sees them."""

    def __init__(self) -> None:
        self._records: dict[str, InstanceRecord] = {}
        self._prefill: dict[str, set[str]] = {}  # by model, those that only prefill
        self._loads: dict[str, tuple[int, LoadReported]] = {}

    def on_key(self, body: KeyChanged) -> None:
        value = body.value
        if body.bucket == "plan":
            if isinstance(value, Plan) and (body.key in self._prefill or len(self._prefill) < MODELS_MAX):
                roles = [(name, role) for stage in value.stages for name, role in stage.roles.items()]
                self._prefill[body.key] = {name for name, role in roles if role is InstanceRole.PREFILL}
            return
        if value is None:
            self._records.pop(body.key, None)
            self._loads.pop(body.key, None)
        elif isinstance(value, InstanceRecord) and (body.key in self._records or len(self._records) < INSTANCES_MAX):
            self._records[body.key] = value

    def on_load(self, body: LoadReported, now_ns: int) -> None:
        """Load of an instance; of one that is not registered it is not kept."""
        if body.instance in self._records:
            self._loads[body.instance] = (now_ns, body)

    def get(self, instance: str) -> InstanceRecord | None:
        return self._records.get(instance)

    def prefills(self, instance: str) -> bool:
        record = self._records.get(instance)
        return record is not None and instance in self._prefill.get(record.model, ())

    def holder(self, source: InstanceRecord, blocks: int, avoided: Set[str], now_ns: int) -> InstanceRecord | None:
        """The instance with most room for a replica, as brokers choose whom to ask; None where nobody has any."""
        barred = avoided | self._prefill.get(source.model, set()) | {source.instance}
        loads = [
            load_view(load)
            for name, (heard_ns, load) in self._loads.items()
            if name not in barred and now_ns - heard_ns < LOAD_AGE_NS and not load.draining and self._fits(name, source)
        ]
        found = lightest(loads, blocks=blocks, count=1)
        return self._records.get(found[0].name) if found else None

    def _fits(self, name: str, source: InstanceRecord) -> bool:
        record = self._records.get(name)
        return record is not None and record.model == source.model and compatible(source.kv, record.kv)
