"""A parameter of an engine's scheduler is named in one struct, and reaches all who need it from there.

What a new one takes by hand is at most four files: contracts/scheduler.py, the line that reads it from vLLM
(services/worker/vllm_engine/scheduler_config.py), and its effect in enginemodel/scheduler.py and native/enginemodel.
"""

import subprocess
import sys
from pathlib import Path

from millrace.contracts import scheduler

ROOT = Path(__file__).resolve().parents[2]

#: Adds a parameter to contracts/scheduler.py, and nothing anywhere else.
WITH_ONE_MORE = """
import sys, types
path = {path!r}
last = "    async_scheduling: bool = False\\n"
source = open(path).read().replace(last, last + "    spare: int = 0\\n")
module = types.ModuleType("millrace.contracts.scheduler")
module.__file__ = path
import millrace.contracts
sys.modules[module.__name__] = module
exec(compile(source, path, "exec"), module.__dict__)

from millrace.contracts.codec import decode, encode
from millrace.enginemodel.registered import scheduler_parameters
from simulator.scenarios.reading import scenario_of
from simulator.services import _info
from services.worker.status_messages import Identity, record

(group,) = scenario_of({{"cluster": {{"groups": [{{"engine": {{"spare": 7}}}}]}}}}).cluster.groups
assert group.engine.spare == 7, "a scenario file takes it"
instance = types.SimpleNamespace(engine=group.engine, model="m", step_time="")
info = _info(instance, None)
assert info.spare == 7, "a modelled engine tells it"
registered = decode(encode(record(Identity(instance="w0", incarnation=1, model="m"), info)))
assert registered.spare == 7, "its worker registers it"
parameters = scheduler_parameters(registered)
assert parameters.spare == 7, "forecasts compute with it"
print("reached all")
"""


def test_a_new_parameter_reaches_engines_records_forecasts_and_scenario_files_from_one_struct() -> None:
    script = WITH_ONE_MORE.format(path=scheduler.__file__)
    done = subprocess.run([sys.executable, "-c", script], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.stdout == "reached all\n", done.stderr
