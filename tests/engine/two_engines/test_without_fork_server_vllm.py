"""Fork servers that were killed: workers run on, and come back slower. Last of all, as the cluster has none after."""

from tests.live.faults import kill, undisturbed
from tests.testbed.up_cluster import UpRig


async def test_workers_run_on_and_come_back_without_their_fork_server(rig: UpRig) -> None:
    first, second = (rig.log_pids(f"worker-{number}") for number in range(2))
    for pid in rig.pids("millrace: fork server"):
        kill(pid)
    kill(first[0])
    await rig.well(2)
    assert rig.log_pids("worker-1")[-1] == second[-1]
    assert "engines start slower from here on" in rig.output()
    await undisturbed(rig, max_tokens=60, ignore_eos=True)
