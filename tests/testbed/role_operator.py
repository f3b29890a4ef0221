"""An operator who changes roles of a running cluster and follows what becomes of each order."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from types import TracebackType
from typing import Any

import nats.errors
from millrace.contracts.codec import decode, encode
from millrace.contracts.coordinator import LadderReported, OrderAccepted, OrderRefused, SetRole
from millrace.contracts.migration import MigrationFinished
from millrace.contracts.plan import InstanceRole
from millrace.contracts.subjects import Subjects

from tests.testbed.up_cluster import UpRig

#: Longest wait for an answer; a coordinator that has just died takes some seconds to come back.
ANSWER_S = 2.0


class RoleOperator:
    """Use as ``async with RoleOperator(rig) as operator``.

    Attributes:
        told: The last report of the model's coordinator; None before the first.
        took_s: How long each flip that was followed to its end took.
    """

    def __init__(self, rig: UpRig) -> None:
        self._rig = rig
        self._subjects = Subjects(rig.cluster_file()["cluster"])
        self.told: LadderReported | None = None
        self.took_s: list[float] = []

    async def __aenter__(self) -> RoleOperator:
        self._bus = await self._rig.operator_bus()
        await self._bus.subscribe(self._subjects.ladder("*"), cb=self._hear)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None
    ) -> None:
        await self._bus.close()

    async def _hear(self, message: Any) -> None:
        body = decode(message.data)
        if isinstance(body, LadderReported) and body.model == self._rig.model:
            self.told = body

    async def watch_moves(self, hear: Callable[[MigrationFinished], None]) -> None:
        """Has each migration told that ends from now on."""

        async def on_message(message: Any) -> None:
            body = decode(message.data)
            if isinstance(body, MigrationFinished):
                hear(body)

        await self._bus.subscribe(self._subjects.migrations(), cb=on_message)

    async def order(
        self, instance: str, role: InstanceRole, *, epoch: int = 0, wait: bool = True, limit_s: float = 30.0
    ) -> OrderAccepted | OrderRefused:
        """Gives an order until somebody answers it.

        Raises:
            TimeoutError: nobody does within the limit.
        """
        body = SetRole(model=self._rig.model, instance=instance, role=role, plan_epoch=epoch, wait=wait)
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

    async def under_way(self, instance: str, *, limit_s: float = 30.0) -> None:
        """Waits until a flip of the instance is under way.

        Raises:
            TimeoutError: not within the limit.
        """
        async with asyncio.timeout(limit_s):
            while self.told is None or instance not in self.told.flipping:  # noqa: ASYNC110 - the bus fills it
                await asyncio.sleep(0.05)

    async def settled(self, instance: str, *, since: LadderReported | None, limit_s: float = 60.0) -> None:
        """Waits until no order for the instance waits and no flip of it is under way.

        Args:
            instance: Its name.
            since: A report from before the order; a later one counts.
            limit_s: How long it may take.

        Raises:
            TimeoutError: not within the limit.
        """
        async with asyncio.timeout(limit_s):
            while not self._is_settled(instance, since):  # noqa: ASYNC110 - the bus fills it
                await asyncio.sleep(0.05)

    def _is_settled(self, instance: str, since: LadderReported | None) -> bool:
        told = self.told
        if told is None or (since is not None and told.at_ns <= since.at_ns):
            return False
        return instance not in told.flipping and instance not in told.ordered

    async def flip(self, instance: str, role: InstanceRole, *, limit_s: float = 60.0) -> None:
        """Orders a role and waits until the instance has it.

        Raises:
            TimeoutError: not within the limit. AssertionError: refused.
        """
        began = time.monotonic()
        answer = await self.order(instance, role)
        assert isinstance(answer, OrderAccepted), answer
        await asyncio.sleep(0)
        await self.settled(instance, since=self.told, limit_s=limit_s)
        self.took_s.append(time.monotonic() - began)
