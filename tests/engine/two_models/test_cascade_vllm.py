"""A cascade of trained models on real vLLM engines under faults: every request is answered."""

from collections import Counter

from tests.live.cascading import barrage, plan_in_force
from tests.live.faults import kill
from tests.testbed.up_cluster import UpRig

TIERS = ("millrace-nano", "millrace-micro")
#: What the smaller model answers well, and what it does not.
PROMPTS = (
    "Repeat the word apple 3 times.",
    "Reverse this text: xpvbfiwawuyp",
    "Write in upper case: xwljx",
    "What is 99 times 5?",
)


async def test_requests_are_answered_through_kills_of_the_judge_and_of_a_tier(rig: UpRig) -> None:
    faults = {
        8: lambda: kill(rig.pids("services.judge")[0]),
        16: lambda: kill(rig.log_pids("worker-1")[-1]),
    }
    answers = await barrage(rig, "cascade", PROMPTS, count=32, rate=4.0, faults=faults, max_tokens=48)
    for answer in answers:
        answer.check(TIERS)
        assert answer.text
    before_any_fault = Counter(answer.model for answer in answers[:8])
    assert set(before_any_fault) == set(TIERS)
    assert await rig.metric("millrace_ingress_judgements_total") > 0, "the judge was never asked"
    await rig.well(2, limit_s=120.0)
    assert rig.pids("services.judge"), "the judge did not come back"
    (again,) = await barrage(rig, "cascade", PROMPTS[1:2], count=1, rate=4.0, faults={}, max_tokens=48)
    again.check(TIERS)
    assert again.model == TIERS[1]
    plan = await plan_in_force(rig, "cascade")
    assert [bool(tier.instances) for tier in plan.tiers] == [True, True]
