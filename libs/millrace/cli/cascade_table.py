"""The table of cascades in status and top. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from rich.table import Table
from rich.text import Text

from millrace.contracts.cascade import CascadePlan

#: Width of a plan's reason; --json has all of it.
REASON_CELLS = 90


def cascade_rows(plans: Sequence[CascadePlan]) -> list[dict[str, Any]]:
    """For programs: each cascade with its tiers."""
    return [
        {
            "cascade": plan.cascade,
            "epoch": plan.epoch,
            "judge": plan.judge,
            "quality": plan.quality,
            "quality_low": plan.quality_low,
            "p95_s": plan.p95_ns / 1e9 if plan.p95_ns else None,
            "meets": plan.meets,
            "coordinator": plan.coordinator,
            "reason": plan.reason,
            "tiers": [
                {"model": tier.model, "threshold": tier.threshold, "instances": tier.instances, "share": tier.share}
                for tier in plan.tiers
            ],
        }
        for plan in plans
    ]


def cascade_table(plans: Sequence[CascadePlan]) -> Table:
    """One line per tier, and one for what is expected of each cascade."""
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for name in ("cascade", "tier"):
        table.add_column(name, no_wrap=True)
    for name in ("threshold", "instances", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("judge", no_wrap=True)
    for plan in plans:
        for index, tier in enumerate(plan.tiers):
            last = index == len(plan.tiers) - 1
            threshold = "any" if last else f"{tier.threshold:.1f}"
            share = f"{tier.share:.0%}" if plan.quality is not None else "-"
            name = f"{plan.cascade} (epoch {plan.epoch})" if not index else ""
            judge = plan.judge if not index else ""
            table.add_row(name, tier.model, threshold, str(tier.instances), share, judge)
    return table


def cascade_lines(plans: Sequence[CascadePlan]) -> list[Text]:
    """Return one line per cascade: what is expected of it, and why its plan is in force."""
    return [Text(f"{plan.cascade}: {_expected(plan)}{_cut(plan.reason)}", style=_style(plan)) for plan in plans]


def _expected(plan: CascadePlan) -> str:
    if plan.quality is None:
        return ""
    low = f" (at least {plan.quality_low:.1f})" if plan.quality_low is not None else ""
    p95 = f", p95 {plan.p95_ns / 1e9:.2f} s" if plan.p95_ns else ""
    missed = "" if plan.meets else ", below its target"
    return f"quality {plan.quality:.1f}{low}{p95} expected{missed}; "


def _cut(reason: str) -> str:
    return reason if len(reason) <= REASON_CELLS else reason[: REASON_CELLS - 1] + "…"


def _style(plan: CascadePlan) -> str:
    return "dim" if plan.meets else "yellow"
