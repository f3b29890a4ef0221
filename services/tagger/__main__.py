"""Runs a tagger: ``python -m services.tagger --config FILE``."""

from __future__ import annotations

import sys

from millrace.contracts.catalog import Role
from millrace.hosting.service import host

from services.tagger.actor import ACCEPTS
from services.tagger.build import build
from services.tagger.config import TaggerConfig
from services.tagger.shell import TaggerShell

if __name__ == "__main__":
    sys.exit(host(Role.TAGGER, TaggerConfig, ACCEPTS, build, shell_of=TaggerShell))
