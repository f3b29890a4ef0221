"""Schemathesis against ingress's own OpenAPI document: what the document allows is taken, what it does not is refused,
and nothing is a server error.
"""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

import httpx

from tests.live.ingress_rig import MemoryValues, served

SEED = 20260
EXAMPLES = 10


async def test_schemathesis_finds_nothing(tmp_path: Path):
    async with served(tmp_path, values=MemoryValues()) as rig:
        command = [
            str(Path(sys.executable).parent / "schemathesis"), "run", f"{rig.url}/openapi.json", "--seed", str(SEED),
            "--max-examples", str(EXAMPLES), "--phases", "examples,coverage,fuzzing", "--checks", "all",
            # A document cannot say that a token id is in the vocabulary or that two fields fit together.
            "--exclude-checks", "positive_data_acceptance", "--no-color", "--request-timeout", "10",
            "--generation-database", "none", "--suppress-health-check", "all",
        ]  # fmt: skip
        print(" ".join(command))
        process = await asyncio.create_subprocess_exec(
            *command, cwd=tmp_path, stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
        )
        assert process.stdout is not None
        output, _ = await asyncio.wait_for(process.communicate(), 240)
        print(output.decode()[-3000:])
        assert process.returncode == 0, output.decode()[-6000:]
        assert rig.bugs == []
        async with httpx.AsyncClient(base_url=rig.url) as client:  # it is as well as before
            assert (await client.get("/health")).status_code == 200
