"""The autopilot that is on: a live cluster whose dispatch rule hurts gets another, and does not keep one that hurts.

Replays have the lowest priority, so it takes minutes; `./task test tests/live/test_autopilot_on.py` runs it.
"""

import asyncio
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from millrace.cli.cluster_view import ClusterView

from tests.testbed.up_cluster import UpRig

ROOT = Path(__file__).resolve().parents[2]

#: A rule that hurts: all requests go to one instance.
FIRST = '''"""The first candidate."""

from millrace.policies.dispatch.pick import nothing, pick_index
from millrace.policies.registry import Nothing

Parameters = State = Nothing


def decide(view, parameters, state, now_ns, rng):
    return pick_index(view, 0, "the first") if view.candidates else nothing(view), state
'''

#: Python reads this where a replay starts. It is of 120 requests then, and is called cheap: the next comes when this
#: one was a twentieth of a core. It always advises the other of two rules.
HOOK = """
import sys, time
if "what-if" in sys.orig_argv:
    time.process_time = lambda: 0.1
    from millrace.cli import recording
    from millrace.contracts.plan import Advice
    from simulator.whatif import advising, replaying
    from simulator.whatif.changes import with_setting

    read = recording.read_recording
    recording.read_recording = lambda *words, **named: read(*words, **named | {"requests_max": 120})
    replaying.ROUNDS = 1

    def candidates(spec, objectives):
        other = "forecast" if spec.policies.dispatch.name == FIRST else FIRST
        return [with_setting(spec, f"policies.dispatch.name={other}")]

    advising.candidates = candidates
    advising.advice = lambda question, answers: Advice(settings=answers[-1].label, evidence="said the test")
"""


def adopted(phase: str, name: str) -> Callable[[ClusterView], bool]:
    def seen(view: ClusterView) -> bool:
        found = [each for advice in view.advice() for each in advice.adopted]
        return [(each.phase, each.settings) for each in found] == [(phase, f"policies.dispatch.name={name}")]

    return seen


async def test_a_rule_that_hurts_is_replaced_and_does_not_come_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = tmp_path / "first.py"
    first.write_text(FIRST)
    (tmp_path / "sitecustomize.py").write_text(f"FIRST = {str(first)!r}\n{HOOK}")
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}:{os.environ.get('PYTHONPATH', '')}")
    settings = (f"policies.dispatch.name={first}", "coordinator.autopilot=on", "coordinator.autopilot_interval_s=5")
    words = [word for each in settings for word in ("--set", each)]
    model = ROOT / "models" / "millrace-mini"
    with UpRig(tmp_path / "cluster", model_path=model, engine="modelled", instances=3, extra=words) as rig:
        command = [sys.executable, str(ROOT / "examples" / "load.py"), "--url", rig.url, "--model", rig.model]
        sending = await asyncio.create_subprocess_exec(*command, "--rate", "16", "--seconds", "3600")
        try:
            await _replaced(rig, str(first))
        finally:
            sending.kill()
            await sending.wait()


async def _replaced(rig: UpRig, first: str) -> None:
    await rig.until_seen(adopted("kept", "forecast"), limit_s=500)
    for words in (("status",), ("explain", "m"), ("cluster", "show")):
        told = " ".join(rig.cli(*words).replace("# ", "").split())
        assert "autopilot: kept: policies.dispatch.name=forecast, adopted" in told
        assert "live over a replay of the former settings: ttft_p99 " in told
    assert 'name = "forecast"' in rig.cli("cluster", "show")
    await rig.until_seen(adopted("watched", first), limit_s=500)
    assert f'name = "{first}"' in rig.cli("cluster", "show")
    await rig.until_seen(adopted("returned", first), limit_s=500)
    assert "longer than before: " in " ".join(rig.cli("status").split())
    assert 'name = "forecast"' in rig.cli("cluster", "show")
    orders = [json.loads(line) for line in (rig.folder / "run" / "orders.log").read_text().splitlines()]
    reasons = [each["reason"].partition(":")[0] for each in orders if each["who"] == "autopilot" and each.get("take")]
    assert reasons == ["adopted", "adopted", "taken back"]
