"""The simulator's hot modules as machine code, where they were compiled from exactly the sources that are here.

``setup/compile_simulator.py`` compiles MODULES with mypyc into ``build/simulator/<fingerprint>``; the Python files stay
what is read, edited and tested. A process asks for the compiled ones before it imports any of them. After any change to
the sources the fingerprint is another one, and Python runs until they are compiled anew: results are the same either
way, down to the trace hash. The actors are among them, for the simulator only: services never use them, nor do tests,
as compiled classes can have no subclasses in Python. What policies call stays out, as compiled functions are strict
about types and policies come from anywhere; so do modules with msgspec Structs, as mypyc drops what stands in the
brackets of a class: ``frozen`` and ``kw_only`` would be lost.
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from hashlib import blake2b
from importlib.abc import MetaPathFinder
from importlib.machinery import EXTENSION_SUFFIXES, ModuleSpec
from importlib.util import spec_from_file_location
from pathlib import Path
from types import ModuleType

#: Where most of a run's time goes, and the subclasses of what is in there. No module with a Struct (see above).
MODULES = (
    "millrace.actor.histograms",
    "millrace.enginemodel.batch",
    "millrace.enginemodel.block_tables",
    "millrace.enginemodel.engine",
    "millrace.enginemodel.forecast.future_sequence",
    "millrace.enginemodel.pacing",
    "millrace.enginemodel.queue",
    "millrace.enginemodel.runs",
    "millrace.enginemodel.scheduler",
    "millrace.enginemodel.scripted",
    "millrace.enginemodel.sequence",
    "millrace.enginemodel.steps",
    "millrace.enginemodel.stream",
    "millrace.enginemodel.transfers",
    "millrace.kvcache.pool",
    "millrace.kvcache.segment_pool",
    "millrace.sim.broker",
    "millrace.sim.effects_sim",
    "millrace.sim.engine_sim",
    "millrace.sim.events",
    "millrace.sim.link",
    "millrace.sim.process",
    "millrace.sim.questions",
    "millrace.sim.routing",
    "millrace.sim.runtime_sim",
    "services.coordinator.actor",
    "services.coordinator.state",
    "services.ingress.actor",
    "services.ingress.migration.epoch_grants",
    "services.ingress.reply_router",
    "services.ingress.cluster.cluster_view",
    "services.ingress.failover.failover",
    "services.ingress.tokens.token_log",
    "services.ingress.calls.completion",
    "services.ingress.cluster.instances",
    "services.ingress.migration.ownership",
    "services.ingress.calls.admission",
    "services.ingress.dispatch.submission",
    "services.ingress.tokens.ingest",
    "services.ingress.snapshot",
    "services.ingress.state",
    "services.ingress.tokens.stale",
    "services.ingress.dispatch.tag_client",
    "services.ingress.tracing",
    "services.predictor.actor",
    "services.predictor.answering",
    "services.predictor.lengths",
    "services.worker.actor",
    "services.worker.decoding",
    "services.worker.desk",
    "services.worker.draining",
    "services.worker.intake",
    "services.worker.leasing",
    "services.worker.moving",
    "services.worker.outbox",
    "services.worker.questions",
    "services.worker.reporter",
    "services.worker.reserving",
    "services.worker.spans",
    "services.worker.state",
)

PACKAGE = Path(__file__).resolve().parent.parent
#: The actors, in a checkout.
SERVICES = PACKAGE.parent.parent / "services"
#: In a checkout; an installed package has none.
BUILDS = PACKAGE.parent.parent / "build" / "simulator"


def use_compiled(builds: Path = BUILDS) -> bool:
    """Has MODULES imported from machine code from here on.

    Returns: False where they are not compiled, or one of them was imported already: then nothing is changed.
    """
    if any(isinstance(finder, _Finder) for finder in sys.meta_path):
        return True
    if not builds.is_dir() or any(name in sys.modules for name in MODULES):
        return False
    found = compiled_files(builds / fingerprint())
    if not found.keys() >= set(MODULES):
        return False
    sys.meta_path.insert(0, _Finder(found))
    return True


def fingerprint() -> str:
    """Of this interpreter and all sources, as compiled modules know the types of others: some milliseconds."""
    digest = blake2b(sys.version.encode(), digest_size=12)
    for folder in (PACKAGE, SERVICES):
        for path in sorted(folder.rglob("*.py")):
            digest.update(str(path.relative_to(folder)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()


def compiled_files(folder: Path) -> dict[str, Path]:
    """Compiled modules in a folder, by their names; the one that all of them share among them."""
    suffix = EXTENSION_SUFFIXES[0]
    files = folder.rglob(f"*{suffix}") if folder.is_dir() else ()
    return {".".join(path.relative_to(folder).parts).removesuffix(suffix): path for path in files}


class _Finder(MetaPathFinder):
    """Finds compiled modules before the import system finds their sources."""

    def __init__(self, files: dict[str, Path]) -> None:
        self._files = files

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        file = self._files.get(fullname)
        return None if file is None else spec_from_file_location(fullname, file)
