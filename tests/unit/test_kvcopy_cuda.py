"""Behaviour without CUDA: everything imports, and whoever asks is told what is missing."""

from __future__ import annotations

from pathlib import Path

import pytest
from millrace.kvcopy import cuda_copier
from millrace.kvcopy.copier_port import CopierError

WHY = cuda_copier.why_not()


@pytest.mark.skipif(not WHY, reason="there is a GPU here")
def test_a_machine_without_a_gpu_says_why_and_refuses_a_copier() -> None:
    assert "not built" in WHY or "driver" in WHY.lower() or "no CUDA" in WHY or "GPU" in WHY
    with pytest.raises(CopierError, match="no CUDA copies here"):
        cuda_copier.CudaCopier(address=1, region_bytes=1, device=0, socket=Path("/nowhere"))
