"""A simulated cluster whose autopilot is on: its coordinator records, replays what it recorded, and adopts."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path

import msgspec
from millrace.cluster.reading import parse_cluster
from millrace.cluster.settings import with_cluster_settings
from millrace.cluster.toml_text import cluster_toml
from millrace.contracts.catalog import Role
from millrace.contracts.local import StopRequested
from millrace.enginemodel.coefficients import load_step_time
from millrace.sim.process import Handlers, SimProcess
from millrace.sim.runtime_sim import SECOND
from millrace.workloads.recording import RecordingBegan, RecordingFolder, read_recording
from millrace.workloads.shape import Arrival

from services.coordinator.adopting import ApplySettings, LoadReplayed
from services.coordinator.autopilot import ClusterChanged, ReplayLoad, SettingsApplied
from services.coordinator.config import CoordinatorConfig
from services.coordinator.recorder import KeepRows
from simulator.cluster import BUS
from simulator.scenarios.cluster import ScenarioCluster
from simulator.scenarios.spec import ScenarioSpec
from simulator.whatif.advising import advice, candidates, report
from simulator.whatif.answering import answers, asked
from simulator.whatif.changes import recorded_cluster, with_setting


class PilotedCluster(ScenarioCluster):
    """Does what services/coordinator/shell.py and `millrace apply` do, with one ingress and one coordinator. Of its
    ingresses the first gets requests.

    Attributes:
        text: The cluster's file.
        recording: Its folder.
        done: What the replays said, and what came of it.
    """

    def __init__(
        self, text: str, load: Sequence[Arrival], scenario: Callable[[str], ScenarioSpec], *, interval_s: float
    ) -> None:
        """Starts it. ``scenario``: of a cluster's file; ``interval_s``: of the autopilot, 0 for none."""
        self.text, self._scenario, self._interval_s = text, scenario, interval_s
        self.done: list[str] = []
        self._scratch = tempfile.TemporaryDirectory(prefix="millrace-piloted-")
        self.recording = Path(self._scratch.name)
        super().__init__(
            scenario(text),
            step_times=load_step_time,
            truth=lambda request, _model: load[int(request[1:])].shape.output_tokens,
            expected=lambda request, _model: load[int(request[1:])].asked.expected,  # type: ignore[union-attr]
            harmed=True,
        )

    def _choose_services(self) -> None:
        super()._choose_services()
        own = self.services[Role.COORDINATOR]
        self.services[Role.COORDINATOR] = own._replace(handlers=lambda _config, process: self._handlers(process))

    def _coordinator(self, name: str) -> CoordinatorConfig:
        on = {"recording": "here", "autopilot": "on", "autopilot_interval_s": self._interval_s}
        return msgspec.structs.replace(super()._coordinator(name), **(on if self._interval_s else {}))

    def _handlers(self, process: SimProcess) -> Handlers:
        began, heard = RecordingBegan(run=process.incarnation), [""]
        recording = RecordingFolder(self.recording, began, f"{process.incarnation}")

        def keep(effect: KeepRows) -> None:
            if heard[0] != self.text:
                heard[0] = self.text
                recording.on_cluster(self.text)
                process.deliver(ClusterChanged(text=self.text))
            recording.append(effect.rows, self.simulation.now_ns)

        replay = partial(process.after, SECOND // 2, self._replay, process)  # a child begins when this tick is written
        return {KeepRows: keep, ReplayLoad: replay, ApplySettings: partial(self._apply, process)}

    def _replay(self, process: SimProcess, effect: ReplayLoad) -> None:
        with tempfile.TemporaryDirectory() as folder:
            load = read_recording(self.recording, last_s=effect.last_s, requests_max=effect.requests_max, latest=True)
            cluster = recorded_cluster(load)
            question = asked(load, cluster, Path(folder))
            beside = [with_setting(cluster, effect.beside)] if effect.beside else []
            tried = [*beside, *candidates(cluster, question.objectives)]
            found = list(answers(question, tried, speed=1.0, jobs=1))
        said = advice(question, found[len(beside) :])
        self._note(f"{question.count} replayed: {said.settings or 'as it is'}: {said.evidence}")
        told = msgspec.convert({**report(question, found, said), "cpu_s": 0.0}, LoadReplayed)
        process.after(SECOND, process.deliver, told)

    def _apply(self, process: SimProcess, effect: ApplySettings) -> None:
        self._note(f"{effect.settings}: {effect.reason}")
        self.text = cluster_toml(with_cluster_settings(parse_cluster(self.text), effect.settings.split()))
        before, self.spec = self.spec, self._scenario(self.text)
        later = partial(self.simulation.after, SECOND // 2)  # what takes a place is ready then
        if before.dispatch != self.spec.dispatch:
            self.add(Role.INGRESS, self._ingress(f"ingress-{len(self._ingress_actors)}"))
            later(self._leave)
        if before.trading != self.spec.trading:
            for worker, actor in zip(self.workers, self.of_role(Role.BROKER), strict=True):
                later(self.change, Role.BROKER, actor, self.spec.trading.broker([worker.name], BUS))
        if (before.stages, before.step_bounds) != (self.spec.stages, self.spec.step_bounds):
            (actor,) = self.of_role(Role.COORDINATOR)
            later(self.change, Role.COORDINATOR, actor, self._coordinator(actor.name))
        process.after(SECOND, process.deliver, SettingsApplied())

    def _leave(self) -> None:
        process = self.ingresses.pop(0).process
        assert process is not None
        process.deliver(StopRequested(replaced=True))

    def _note(self, text: str) -> None:
        self.done.append(f"{(self.simulation.now_ns - self.begin_ns) / SECOND:.0f} s: {text}")
