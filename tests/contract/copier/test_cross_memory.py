"""Cross-memory attach: what the kernel's refusals are told as."""

from __future__ import annotations

import base64
import os
import subprocess
import sys

import msgspec
import numpy as np
import pytest
from millrace.contracts.kv import KvRank
from millrace.kvcopy.copier_port import CopierError
from millrace.kvcopy.cross_memory_copier import CrossMemoryCopier
from millrace.kvcopy.memory import Bytes

from tests.contract.copier.sides import LAYOUT, REGION_BYTES, plan

#: Asks for a region as another user.
STRANGER = """
import base64, os, sys
import msgspec, numpy as np
from millrace.contracts.kv import KvRank
from millrace.kvcopy.cross_memory_copier import CrossMemoryCopier
os.setgid(65534)
os.setuid(65534)
peer = msgspec.json.decode(base64.b64decode(sys.argv[1]), type=KvRank)
try:
    CrossMemoryCopier(np.zeros(4096, np.uint8)).connect(peer)
except Exception as error:
    print(type(error).__name__, error)
"""


def offered(memory: Bytes) -> tuple[CrossMemoryCopier, KvRank]:
    copier = CrossMemoryCopier(memory)
    return copier, copier.offer(LAYOUT)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can become somebody else")
def test_a_refusal_says_what_would_permit_it() -> None:
    copier, rank = offered(np.zeros(REGION_BYTES, np.uint8))
    word = base64.b64encode(msgspec.json.encode(rank)).decode()
    said = subprocess.run([sys.executable, "-c", STRANGER, word], capture_output=True, text=True, check=True).stdout
    copier.close()
    assert said.startswith("CopierError")
    assert "ptrace_scope" in said
    assert "SYS_PTRACE" in said


def test_a_process_that_is_not_there_says_so() -> None:
    copier, rank = offered(np.zeros(REGION_BYTES, np.uint8))
    ended = subprocess.Popen([sys.executable, "-c", ""])
    ended.wait()
    with pytest.raises(CopierError, match="pid namespace"):
        copier.connect(msgspec.structs.replace(rank, pid=ended.pid))


def test_memory_that_is_not_there_is_an_error_and_no_crash() -> None:
    copier, rank = offered(np.zeros(REGION_BYTES, np.uint8))
    link = copier.connect(msgspec.structs.replace(rank, address=4096))
    transfer = link.begin(plan(rank, [1], rank, [2]))
    with pytest.raises(CopierError, match="does not have the memory"):
        transfer.advance(1 << 20)
