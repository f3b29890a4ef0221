"""Services import no package that costs a start more than it is worth."""

import subprocess
import sys

import pytest

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

VERB = """
import sys; from millrace.cli.__main__ import main
try: main(["drain", "--help"])
except SystemExit: pass
sys.exit(", ".join({"numpy", "aiohttp"} & set(sys.modules)) or 0)
"""

NIXL = "import sys; from millrace.kvcopy.nixl_agent import why_not; why_not(); sys.exit('torch' in sys.modules)"


@pytest.mark.parametrize(
    "words", [(PROGRAM, " ".join(HEAVY), " ".join(MODULES)), (VERB,), (NIXL,)], ids=["services", "verb", "nixl"]
)
def test_no_heavy_package_is_imported_where_it_is_not_used(words: tuple[str, ...]):
    done = subprocess.run([sys.executable, "-c", *words], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
