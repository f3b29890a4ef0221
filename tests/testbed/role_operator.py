"""An operator who changes roles of a running cluster and follows what becomes of each order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import Any

import nats.errors
from millrace.actor.bucket_reading import read_bucket
from millrace.contracts.codec import decode, encode
from millrace.contracts.coordinator import OrderAccepted, OrderRefused, SetRole
from millrace.contracts.migration import MigrationFinished
from millrace.contracts.plan import InstanceRole, Plan
from millrace.contracts.subjects import Subjects

from tests.testbed.up_cluster import UpRig
from tests.testbed.waiting import until

#: Longest wait for an answer; a coordinator that has just died takes some seconds to come back.
ANSWER_S = 2.0


class RoleOperator:
    """Use as ``async with RoleOperator(rig) as operator``; ``took_s``: how long each flip that was followed took."""

    def __init__(self, rig: UpRig) -> None:
        self._rig = rig
        self._subjects = Subjects(rig.cluster_file()["cluster"])
        self.took_s: list[float] = []

    async def __aenter__(self) -> RoleOperator:
        self._bus = await self._rig.operator_bus()
        self._store = await self._rig.operator_bus(store=True)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._bus.close()
        await self._store.close()

    async def plan(self) -> Plan:
        """In force."""
        stored = await read_bucket(self._store, self._subjects.bucket("plan"))
        plans = [body for value in stored if isinstance(body := decode(value), Plan)]
        return next(plan for plan in plans if plan.model == self._rig.model)

    async def role(self, instance: str) -> InstanceRole:
        """Of an instance, by the plan in force."""
        stage = next(stage for stage in (await self.plan()).stages if instance in stage.instances)
        return stage.roles.get(instance, InstanceRole.BOTH)

    async def watch_moves(self, hear: Callable[[MigrationFinished], None]) -> None:
        """Has each migration told that ends from now on."""

        async def on_message(message: Any) -> None:
            body = decode(message.data)
            if isinstance(body, MigrationFinished):
                hear(body)

        await self._bus.subscribe(self._subjects.migrations(), cb=on_message)

    async def order(
        self, instance: str, role: InstanceRole, *, epoch: int = 0, limit_s: float = 30.0
    ) -> OrderAccepted | OrderRefused:
        """Gives an order until somebody answers it; raises TimeoutError where nobody does within the limit."""
        body = SetRole(model=self._rig.model, instance=instance, role=role, plan_epoch=epoch)
        subject = self._subjects.coordinate(body.model, "role")
        until = time.monotonic() + limit_s
        while time.monotonic() < until:
            try:
                answer = decode((await self._bus.request(subject, encode(body), timeout=ANSWER_S)).data)
            except (TimeoutError, nats.errors.Error):
                await asyncio.sleep(0.2)
                continue
            assert isinstance(answer, OrderAccepted | OrderRefused), answer
            return answer
        raise TimeoutError(f"nobody takes the order for {instance}")

    async def reaches(self, instance: str, role: InstanceRole, *, limit_s: float = 60.0) -> None:
        """Waits until an instance has a role; raises TimeoutError after the limit."""

        async def reached() -> bool:
            return await self.role(instance) is role

        await until(reached, limit_s, 0.05)

    async def flip(self, instance: str, role: InstanceRole, *, limit_s: float = 60.0) -> None:
        """Orders a role and waits until the instance has it; raises TimeoutError, or AssertionError if refused."""
        began = time.monotonic()
        answer = await self.order(instance, role)
        assert isinstance(answer, OrderAccepted), answer
        await self.reaches(instance, role, limit_s=limit_s)
        self.took_s.append(time.monotonic() - began)
