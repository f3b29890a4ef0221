"""The simulator's compiled modules: what they are made of, and that they change no result."""

import importlib
import subprocess
import sys
from pathlib import Path

import msgspec
import pytest
from millrace.sim.compiled import BUILDS, MODULES, compiled_files, fingerprint, use_compiled

ROOT = Path(__file__).resolve().parents[2]
RUN = """
import sys
from pathlib import Path
from millrace.sim.compiled import use_compiled
assert sys.argv[1] == "python" or use_compiled()
from millrace.enginemodel.coefficients import load_step_time
from millrace.sim.scenarios.reading import read_scenario
from millrace.sim.scenarios.running import run_scenario
spec = read_scenario(Path(sys.argv[2]), ("workload.count=60", "workload.warm_up=0"))
outcome = run_scenario(spec, step_times=load_step_time)
print(outcome.trace_hash, outcome.messages, outcome.engine_steps, outcome.finished)
"""


def test_every_module_that_is_to_be_compiled_has_its_source() -> None:
    for name in MODULES:
        package = ROOT / ("libs" if name.startswith("millrace.") else "")
        assert (package / f"{name.replace('.', '/')}.py").is_file(), name


def test_no_module_with_structs_is_compiled() -> None:
    for name in MODULES:
        module = importlib.import_module(name)
        structs = [c for c in vars(module).values() if isinstance(c, type) and issubclass(c, msgspec.Struct)]
        assert all(struct.__module__ != name for struct in structs), name


def test_a_process_that_has_imported_the_sources_stays_with_them() -> None:
    import millrace.sim.runtime_sim  # noqa: F401

    assert not use_compiled()
    assert not any("compiled" in type(finder).__module__ for finder in sys.meta_path)


def test_what_was_compiled_of_other_sources_is_not_used(tmp_path: Path) -> None:
    (tmp_path / "0123456789abcdef").mkdir()
    assert not use_compiled(tmp_path)


@pytest.mark.parametrize("scenario", ["mixed.toml", "disaggregated.toml", "bursty-faults.toml"])
def test_compiled_modules_give_the_same_run(scenario: str) -> None:
    if not compiled_files(BUILDS / fingerprint()).keys() >= set(MODULES):
        pytest.skip("not compiled of these sources: ./task sim:compile")
    path = str(ROOT / "examples" / "scenarios" / scenario)
    python, compiled = (
        subprocess.run([sys.executable, "-c", RUN, how, path], capture_output=True, text=True, check=True).stdout
        for how in ("python", "compiled")
    )
    assert compiled == python
