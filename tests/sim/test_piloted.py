"""A simulated cluster whose autopilot is on: what is advised twice is put in force under load, and nothing is lost."""

import pytest
from millrace.cluster.model_folders import with_model_folders
from millrace.cluster.reading import parse_cluster
from millrace.contracts.plan import Advice
from millrace.enginemodel.parameters import EngineParameters
from millrace.sim.process import SimProcess
from millrace.sim.runtime_sim import MILLISECOND, SECOND
from millrace.workloads.recording import read_recording
from millrace.workloads.shape import Arrival, AskedRequest, RequestShape

from services.coordinator import autopilot
from services.coordinator.adopting import LoadReplayed
from services.coordinator.autopilot import ReplayLoad
from simulator.scenarios.cluster_file import cluster_tables
from simulator.scenarios.load import call_of
from simulator.scenarios.reading import scenario_of
from simulator.scenarios.spec import ScenarioSpec
from simulator.whatif.piloted import PilotedCluster

FILE = '[[models]]\nname = "m"\npath = "millrace-mini"\n[[models.groups]]\ncount = 4\nengine = "modelled"\n'
SETTINGS = ("policies.dispatch.name=round_robin", "policies.trading.name=delay", "coordinator.step_bounds={tpot_s=0.5}")
LOAD = [Arrival(n * 100 * MILLISECOND, RequestShape(50, 10), AskedRequest("m", (10,), 0, 10.0)) for n in range(300)]


def scenario(text: str) -> ScenarioSpec:
    spec = with_model_folders(parse_cluster(text))
    tables = cluster_tables(spec, lambda _model, _group: (EngineParameters(), "cpu-8m"))
    return scenario_of({**tables, "migration": {"on": True}, "prediction": {"kind": "recorded", "asked": "always"}})


class Advised(PilotedCluster):
    """Its replays are not made: they always say that these settings would be better, and that they are."""

    settings = ""

    def _replay(self, process: SimProcess, effect: ReplayLoad) -> None:
        figures = {"ttft_p99": 100.0, "tpot_p99": 10.0, "e2e_p99": 1000.0, "within": 0.9, "rate": 10.0}
        missed = {**dict.fromkeys(figures, 1.0), "within": 0.0}
        told = {effect.beside: {**dict.fromkeys(figures, 2.0), "within": -0.1}}
        advice = Advice(settings=self.settings, evidence="said the test")
        body = LoadReplayed(advice=advice, requests=20, cpu_s=0.0, recorded=figures, missed=missed, told=told)
        process.after(SECOND, process.deliver, body)


@pytest.mark.parametrize("settings", SETTINGS)
def test_what_is_advised_twice_is_put_in_force_and_no_request_is_lost(
    settings: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(autopilot, "ADVISED_MIN", 10)
    cluster = Advised(FILE, LOAD, scenario, interval_s=3.0)
    cluster.settings = settings
    sim = cluster.simulation
    sim.run(cluster.begin_ns)
    for number, each in enumerate(LOAD):
        call = call_of(number, each, model="m", max_model_len=2048, output_limit=0)
        sim.after(each.at_ns, lambda call=call: cluster.clients.submit(cluster.ingresses[0].process, call))
    sim.run_for(60 * SECOND)
    assert cluster.clients.outcomes == {"completed": len(LOAD)}
    assert f"{settings}: adopted: said the test" in cluster.done[0]
    assert cluster.text != FILE
    load = read_recording(cluster.recording, latest=True)
    assert (load.began.cluster, len(load.instances)) == (cluster.text, 4)
    assert cluster.spec == scenario(cluster.text)
