"""The tables of status and top, drawn with rich. Pure: rows in, something to print out."""

from __future__ import annotations

import shlex
import time

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from millrace.cli.cascade_table import cascade_lines, cascade_table
from millrace.cli.cluster_rows import InstanceRow, MigrationRow, ServiceRow, StageRow, Totals
from millrace.cli.cluster_view import ClusterView
from millrace.cli.field_text import cut
from millrace.contracts.plan import Advice

_COLORS = {
    "ready": "green",
    "alive": "green",
    "draining": "yellow",
    "drained": "yellow",
    "leaving": "yellow",
    "starting": "yellow",
    "silent": "red",
    "suspect": "red",
    "dead": "red",
}

_COLUMNS = (
    "instance", "model", "stage", "role", "state", "running", "waiting", "moving", "blocks", "", "tok/s", "preempted",
    "uptime", "kv moves by",
)  # fmt: skip

#: Columns at the right.
_NUMBERS = frozenset({
    "instances", "running", "waiting", "blocks", "tok/s", "preempted", "uptime", "rounds", "copied", "age",
})  # fmt: skip

#: What goes first where the screen is too narrow. Name, state and load stay: they are what the table is for.
_DISPENSABLE = ("", "preempted", "uptime", "kv moves by", "model", "stage", "moving", "blocks")

#: Where standard output is no terminal.
PIPE_COLUMNS = 120

#: Width of the bar of used blocks.
BAR_CELLS = 8

#: Spaces between two columns.
GAP_CELLS = 2

#: Migrations under way that are shown, the oldest; --json has all that were told.
MIGRATIONS_SHOWN = 20

#: Width of a migration's line but for its three names, and the least that is left of its sequence's.
MIGRATION_CELLS, SEQUENCE_CELLS = 46, 9


def cluster_tables(
    cluster: str,
    view: ClusterView,
    now_ns: int,
    *,
    rows_max: int = 0,
    migrations_max: int = MIGRATIONS_SHOWN,
    width: int = PIPE_COLUMNS,
) -> RenderableType:
    """Totals, instances, migrations, services; at most ``rows_max`` instances where that is not 0, the busiest first,
    and at most ``migrations_max`` migrations, the oldest first.

    Columns of instances that do not fit into ``width`` characters are left out, the least needed first.
    """
    instances, services = view.instances(now_ns), view.services(now_ns)
    shown = instances
    if rows_max and len(instances) > rows_max:
        shown = sorted(instances, key=lambda row: -row.running - row.waiting)[:rows_max]
    parts: list[RenderableType] = [_headline(cluster, view.totals(instances), width)]
    if not view.connected:
        parts.append(Text("The NATS server does not answer; this is the last that was heard.", style="red"))
    parts += [Text(f"{row.name}: {row.trouble}", style="red") for row in services if row.trouble]
    stages = view.stages(instances)
    if stages:
        parts += [_stages(stages), Text("")]
    if shown:
        parts += [_instances(shown, width), *_refusals(shown)]
    if len(shown) < len(instances):
        parts.append(Text(f"{len(instances) - len(shown)} more instances", style="dim"))
    parts += [Text(f"{name} does {role}, ordered to {wanted}") for name, role, wanted in view.orders()]
    for advice in view.advice():
        parts += [Text(line, style="yellow" if advice.settings else "dim") for line in advice_lines(advice)]
    migrations = view.migrations(now_ns)
    if migrations:
        parts += [Text(""), _migrations(migrations[:migrations_max], width)]
        if len(migrations) > migrations_max:
            parts.append(Text(f"{len(migrations) - migrations_max} more migrations", style="dim"))
    cascades = view.cascades()
    if cascades:
        parts += [Text(""), cascade_table(cascades), *cascade_lines(cascades)]
    if services:
        parts += [Text(""), _services(services)]
    if not instances and not services:
        parts.append(Text("Nobody was heard on this cluster."))
    return Group(*parts)


def _headline(cluster: str, totals: Totals, width: int) -> Text:
    head, end = f"cluster {cluster}: ", f"{totals.output_tokens_per_s:,.0f} tok/s"
    load = f"{totals.instances_ready} of {totals.instances} ready, running {totals.running}, waiting {totals.waiting}"
    load += f", moving {totals.migrations}" if totals.migrations else ""
    share = totals.blocks_used / totals.blocks_total if totals.blocks_total else 0.0
    said = f"{load}, blocks {totals.blocks_used:,}/{totals.blocks_total:,}, {end}"
    if len(head + said) > width:
        said = f"{load}, blocks {share:.0%}, {end}"
    return Text(head, style="bold").append(said, style="not bold")


def advice_lines(advice: Advice) -> list[str]:
    """The autopilot's sentence, with the line that applies it, and a line for each adoption."""
    words = " ".join(f"--set {shlex.quote(setting)}" for setting in advice.settings.split())
    applied = f" `millrace apply {words}`:" if words else ""
    adopted = (
        f"autopilot: {each.phase}: {each.settings}, adopted {_clock(each.at_ns)} in place of {each.before}"
        + (f", not again before {_clock(each.until_ns)}" if each.until_ns else "")
        + f": {each.evidence}"
        for each in advice.adopted
    )
    return [f"autopilot:{applied} {advice.evidence}", *adopted]


def _clock(at_ns: int) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at_ns // 1_000_000_000))


def _stages(rows: list[StageRow]) -> Table:
    """One line each, in the order of lengths; the model only where there are several."""
    models = len({row.model for row in rows}) > 1
    load = ("instances", "running", "waiting", "blocks", "tok/s")
    table = _table(*(("model",) if models else ()), "stage", "lengths", *load, "moving")
    for row in rows:
        moving = _moving((row.leaving, "out"), (row.arriving, "in"))
        instances = str(row.instances) if row.instances or not row.covered_by else f"- ({row.covered_by})"
        share = f"{row.blocks_used / row.blocks_total:.0%}" if row.blocks_total else "-"
        counts = (instances, str(row.running), str(row.waiting), share, f"{row.output_tokens_per_s:,.0f}")
        table.add_row(*((row.model,) if models else ()), row.stage, lengths(row), *counts, moving)
    return table


def lengths(row: StageRow) -> str:
    """``0 to 719``, or ``720 and up``."""
    return f"{row.length_min} and up" if row.length_max is None else f"{row.length_min} to {row.length_max - 1}"


def _instances(rows: list[InstanceRow], width: int) -> Table:
    cells = [_cells(row) for row in rows]
    table = _table(*_fitting(cells, width))
    for row in cells:
        table.add_row(*(row[str(column.header)] for column in table.columns))
    return table


def _fitting(rows: list[dict[str, str | Text]], width: int) -> list[str]:
    """The columns that have room side by side, in their order."""
    cells = {name: max(len(name), *(len(row[name]) for row in rows)) for name in _COLUMNS}
    # Roles and moves are told where there are any.
    idle = {"role": "both", "moving": "-"}
    kept = [name for name in _COLUMNS if name not in idle or any(row[name] != idle[name] for row in rows)]
    for name in _DISPENSABLE:
        if sum(cells[each] + GAP_CELLS for each in kept) <= width:
            break
        if name in kept:
            kept.remove(name)
    return kept


def _cells(row: InstanceRow) -> dict[str, str | Text]:
    return {
        "instance": row.instance,
        "model": row.model,
        "stage": row.stage or "-",
        "role": row.role,
        "state": _state(row.state),
        "running": str(row.running),
        "waiting": str(row.waiting),
        "moving": _moving((row.leaving, "out"), (row.arriving, "in"), (row.replicated, "copied")),
        "blocks": f"{row.blocks_used}/{row.blocks_total}" if row.blocks_total else "-",
        "": _bar(row.blocks_used, row.blocks_total) if row.blocks_total else "",
        "tok/s": "-" if row.output_tokens_per_s is None else f"{row.output_tokens_per_s:,.0f}",
        "preempted": str(row.preemptions),
        "uptime": span(row.uptime_s) if row.uptime_s else "-",
        "kv moves by": _moves(row),
    }


def _moving(*counts: tuple[int, str]) -> str:
    """``2 out, 1 in, 3 copied``: what leaves, what arrives, and what has a KV replica elsewhere."""
    return ", ".join(f"{count} {word}" for count, word in counts if count) or "-"


def _migrations(rows: list[MigrationRow], width: int) -> Table:
    """One line each; on a narrow screen the sequence's name is cut."""
    table = _table("migration", "from", "to", "step", "rounds", "copied", "age")
    ends = max(len("from"), *(len(row.source) for row in rows)) + max(len("to"), *(len(row.target) for row in rows))
    cells = max(SEQUENCE_CELLS, width - MIGRATION_CELLS - ends)
    for row in rows:
        what = (cut(row.sequence, cells), row.source, row.target or "?", row.step)
        table.add_row(*what, str(row.round), binary_size(row.bytes), f"{row.age_s:.1f}s")
    return table


def binary_size(count: int) -> str:
    """A number of bytes in its largest unit: ``512 B``, ``3.4 MiB``, ``17 GiB``."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB"):
        if size < 1024:
            break
        size, unit = size / 1024, larger
    return f"{size:.0f} {unit}" if unit == "B" or size >= 10 else f"{size:.1f} {unit}"


def _moves(row: InstanceRow) -> str:
    """The best way its KV can be read, and how many others there are."""
    if row.kv:
        others = len(row.kv) - 1
        return row.kv[0] + (f", {others} other{'s' if others > 1 else ''}" if others else "")
    return "-"


def _refusals(rows: list[InstanceRow]) -> list[Text]:
    """Reasons why instances move no KV, a line each."""
    named: dict[str, list[str]] = {}
    for row in rows:
        if row.kv_refusal and not row.kv:
            named.setdefault(row.kv_refusal, []).append(row.instance)
    return [Text(f"no KV moves from or to {', '.join(names)}: {why}", style="dim") for why, names in named.items()]


def _services(rows: list[ServiceRow]) -> Table:
    table = _table("service", "name", "state", "uptime", "url")
    for row in rows:
        table.add_row(row.role, row.name, _state(row.state), span(row.uptime_s), row.url)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, GAP_CELLS, 0, 0))
    for name in columns:
        table.add_column(name, justify="right" if name in _NUMBERS else "left", no_wrap=True)
    return table


def _state(state: str) -> Text:
    return Text(state, style=_COLORS.get(state, ""))


def _bar(used: int, total: int) -> Text:
    share = used / total if total else 0.0
    filled = min(BAR_CELLS, max(int(used > 0), round(share * BAR_CELLS)))
    return Text("█" * filled + "░" * (BAR_CELLS - filled), style="red" if share > 0.95 else "cyan")


def span(seconds: float) -> str:
    """A time span in its two largest units: ``42s``, ``3m12s``, ``5h02m``, ``2d07h``."""
    whole = int(seconds)
    minutes, rest = divmod(whole, 60)
    hours, minutes_rest = divmod(minutes, 60)
    if hours >= 48:
        return f"{hours // 24}d{hours % 24:02}h"
    if hours:
        return f"{hours}h{minutes_rest:02}m"
    return f"{minutes}m{rest:02}s" if minutes else f"{whole}s"
