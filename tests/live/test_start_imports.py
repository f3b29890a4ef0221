"""Services import no package that costs a start more than it is worth."""

import subprocess
import sys

#: A second or more of processor time each; what needs one imports it where it is used.
HEAVY = ("scipy", "torch", "vllm", "sklearn", "transformers")

MODULES = (
    "deployment.ingress",
    "deployment.migrator",
    *(f"services.{name}.__main__" for name in ("coordinator", "judge", "predictor", "supervisor", "tagger", "worker")),
)

PROGRAM = """
import importlib, sys
for module in sys.argv[2].split():
    importlib.import_module(module)
    if found := sorted(set(sys.argv[1].split()) & set(sys.modules)):
        sys.exit(f"{module} imports {', '.join(found)}")
"""


def test_no_service_imports_a_heavy_package_at_its_start():
    command = [sys.executable, "-c", PROGRAM, " ".join(HEAVY), " ".join(MODULES)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_a_verb_that_looks_at_the_cluster_imports_no_numbers_and_no_websockets():
    program = (
        "import sys; from millrace.cli.__main__ import main\n"
        "try: main(['drain', '--help'])\nexcept SystemExit: pass\n"
        "sys.exit(', '.join({'numpy', 'aiohttp'} & set(sys.modules)) or 0)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr


def test_nixl_is_looked_for_without_torch():
    program = "import sys; from millrace.kvcopy.nixl_agent import why_not; why_not(); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
