"""Settings that a cluster may be better with, and what replays of them say: the advice of the autopilot. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from millrace.cluster.spec import ClusterSpec, PolicyChoice
from millrace.contracts.plan import Advice
from millrace.policies.objectives import Objectives, objectives_text
from millrace.policies.registry import policy_name
from millrace.workloads.recording import ADVISED_MIN

from services.ingress.config import DispatchConfig
from simulator.whatif.answering import Asked, ChangeAnswer
from simulator.whatif.changes import AskedChange, with_setting
from simulator.whatif.figures import LATENCIES, ComparedFigure, ratios

#: No advice from a replay whose medians are off by this factor.
FIDELITY_MAX = 1.5

#: A shorter tail is not advised where the replayed E2E p99 is off by this factor.
TAIL_FIDELITY_MAX = 1.1

#: Figures that may not become worse. Medians may: they follow which instances serve more of the requests.
KEPT = ("ttft_mean", "ttft_p99", "tpot_p99", "e2e_mean", "e2e_p99")

#: Smaller changes of a figure, and of the share within the objectives, are noise whatever their intervals say.
NOISE, SHARE_NOISE = 0.01, 0.005

#: Where both shares are above the first, the tail decides: all of its interval is shorter by the second.
TIED, TAIL_GAIN = 0.99, 0.1

#: What decides for a change.
SHARE_DECIDES, TAIL_DECIDES = "the share within the objectives decides", "E2E p99 decides"

#: Stages have to be expected better by this share: with less the planner is wrong too often.
STAGES_MARGIN = 0.25

#: Instances of a model from which on there may be several stages (PlanningParameters.instances_min).
STAGES_INSTANCES_MIN = 4


def candidates(spec: ClusterSpec, objectives: Objectives) -> list[AskedChange]:
    """Changes that are tried: each mechanism is switched on where it is off, and off where it is on."""
    ttft_ms, tpot_ms = (float(f"{each:.3g}") for each in (objectives.ttft_ms, objectives.tpot_ms))
    policies, largest = spec.policies, max(sum(group.size for group in model.groups) for model in spec.models)
    found = []
    if largest > 1:
        now = policy_name(policies.dispatch.name or DispatchConfig().policy)
        found.append(_policy("dispatch", "join_shortest_queue" if now == "forecast" else "forecast", policies.dispatch))
    if largest > 1 and spec.services.migrators:
        found.append(_policy("trading", "delay" if policies.trading.name in ("", "none") else "none", policies.trading))
    if spec.settings.coordinator.get("step_bounds", {}).get("tpot_s"):
        found.append("coordinator.step_bounds.tpot_s=0")
    else:
        found.append(f"coordinator.step_bounds={{ttft_s={ttft_ms / 1e3:g},tpot_s={tpot_ms / 1e3:g}}}")
    if policies.stages.name not in ("", "one_stage"):
        found.append(_policy("stages", "one_stage", policies.stages))
    elif largest >= STAGES_INSTANCES_MIN and not any(model.stages for model in spec.models):
        parameters = f"{{margin={STAGES_MARGIN},bounds={{ttft_ms={ttft_ms:g},tpot_ms={tpot_ms:g}}}}}"
        found.append(f"policies.stages.name=exact policies.stages.parameters={parameters}")
    return [with_setting(spec, text) for text in found]


def _policy(kind: str, name: str, now: PolicyChoice) -> str:
    """Another policy, which does not know the parameters of the present one."""
    return f"policies.{kind}.name={name}" + (f" policies.{kind}.parameters={{}}" if now.parameters else "")


def advice(question: Asked, answers: Sequence[ChangeAnswer]) -> Advice:
    """The best of the answers that are better than the unchanged cluster, with the evidence."""
    if question.count < ADVISED_MIN:
        return Advice(evidence=f"fewer than {ADVISED_MIN} requests were recorded since the cluster changed")
    wrong = [name for name in ("ttft_p50", "tpot_p50") if _off(question.fidelity.get(name), FIDELITY_MAX)]
    if wrong:
        return Advice(evidence=f"the replay does not reproduce what happened: {', '.join(wrong)}")
    won = [each for each in answers if better(each) and each.lost <= question.base.lost]
    sure = [each for each in won if not doubt(question, each)]
    if not sure:
        nothing = f"none of {len(answers)} other settings is better in all that counts"
        unsure = (f"{each.label}: {better(each)}, but {doubt(question, each)}" for each in won)
        return Advice(evidence="; ".join((nothing, *unsure, f"objectives: {objectives_text(question.objectives)}")))
    best = max(sure, key=lambda each: (min(each.within.after, TIED), -each.figures["e2e_p99"].ratio))
    return Advice(settings=best.label, evidence=evidence(best, question))


def doubt(question: Asked, answer: ChangeAnswer) -> str:
    """Reason why what decides for a change is not to be believed: the replay of the unchanged cluster does not
    reproduce the E2E p99, or its share within the objectives is wrong by as much as the change gains. Empty where none.
    """
    wrong, share = "the replay does not reproduce what happened:", question.share
    if better(answer) == TAIL_DECIDES:
        return f"{wrong} {_tails(question)}" if _off(question.fidelity.get("e2e_p99"), TAIL_FIDELITY_MAX) else ""
    if share is None or abs(share.after - share.before) < answer.within.after - answer.within.before:
        return ""
    return f"{wrong} {share.after:.1%} within the objectives where {share.before:.1%} were"


def _tails(question: Asked) -> str:
    tails = (f"{name.upper()} {question.fidelity[f'{name}_p99'].ratio:.2f}" for name in LATENCIES)
    return f"replayed p99 over the recorded: {', '.join(tails)}"


def better(answer: ChangeAnswer) -> str:
    """The figure that decides for a change: the share within the objectives or, where nearly all keep them, the tail.
    Empty where neither is so beyond the replay's noise, or where the share or a figure of KEPT is worse.
    """
    within, kept = answer.within, [answer.figures[name] for name in KEPT]
    gain = within.after - within.before
    if (within.high < 0 and gain < -SHARE_NOISE) or any(each.low > 1 and each.ratio > 1 + NOISE for each in kept):
        return ""
    if within.low > 0 and gain > SHARE_NOISE:
        return SHARE_DECIDES
    tied = min(within.before, within.after) > TIED
    return TAIL_DECIDES if tied and answer.figures["e2e_p99"].high < 1 - TAIL_GAIN else ""


def report(question: Asked, answers: Sequence[ChangeAnswer], advised: Advice | None) -> dict[str, Any]:
    """All figures; with the processor time (``cpu_s``) the fields of a LoadReplayed among them."""
    return {
        "requests": question.count,
        "fidelity": question.fidelity,
        "objectives": question.objectives,
        "changes": answers,
        "missed": ratios(question.fidelity, question.share),
        "recorded": question.recorded_figures(),
        "told": {each.label: ratios(each.figures, each.within) for each in answers},
        "advice": advised,
    }


def evidence(answer: ChangeAnswer, question: Asked) -> str:
    """One sentence for operators."""
    tails = (f"{name.upper()} p99 {answer.figures[f'{name}_p99'].ratio - 1:+.0%}" for name in LATENCIES)
    share = f"{answer.within.after:.1%} instead of {answer.within.before:.1%} of requests within {question.objectives}"
    parts = [f"{better(answer)}: {share}", ", ".join(tails), _tails(question) if question.fidelity else ""]
    return "; ".join((*filter(None, parts), answer.reason))


def _off(figure: ComparedFigure | None, factor: float) -> bool:
    """Whether a figure of the replay is off by this factor from what was recorded; one that is not known is not."""
    return figure is not None and not 1 / factor < figure.ratio < factor
