"""Runs a local cluster whose every configuration was checked first: what `millrace up` starts.

python -m deployment.local_supervisor --options JSON
"""

from __future__ import annotations

import sys

from deployment.config_check import check_files
from services.supervisor.__main__ import main

if __name__ == "__main__":
    sys.exit(main(check_files))
