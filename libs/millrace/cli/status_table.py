"""The tables of status and top, drawn with rich. Pure: rows in, something to print out."""

from __future__ import annotations

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from millrace.cli.cluster_view import ClusterView, InstanceRow, ServiceRow, Totals

_COLORS = {
    "ready": "green",
    "alive": "green",
    "draining": "yellow",
    "leaving": "yellow",
    "starting": "yellow",
    "silent": "red",
    "suspect": "red",
    "dead": "red",
}

_COLUMNS = (
    "instance", "model", "stage", "role", "state", "running", "waiting", "blocks", "", "tok/s", "preempted", "uptime",
    "kv moves by",
)  # fmt: skip

#: What goes first where the screen is too narrow. Name, state and load stay: they are what the table is for.
_DISPENSABLE = ("", "preempted", "uptime", "kv moves by", "model", "stage", "blocks")

#: Where standard output is no terminal.
PIPE_COLUMNS = 120

#: Width of the bar of used blocks.
BAR_CELLS = 8

#: What is shown of why an instance moves nothing; --json has all of it.
REFUSAL_CELLS = 24

#: Spaces between two columns.
GAP_CELLS = 2


def cluster_tables(
    cluster: str, view: ClusterView, now_ns: int, *, rows_max: int = 0, width: int = PIPE_COLUMNS
) -> RenderableType:
    """Totals, instances, services; at most ``rows_max`` instances where that is not 0, the busiest first.

    Columns of instances that do not fit into ``width`` characters are left out, the least needed first.
    """
    instances, services = view.instances(now_ns), view.services(now_ns)
    shown = instances
    if rows_max and len(instances) > rows_max:
        shown = sorted(instances, key=lambda row: -row.running - row.waiting)[:rows_max]
    parts: list[RenderableType] = [_headline(cluster, view.totals(instances), width)]
    if not view.connected:
        parts.append(Text("The NATS server does not answer; this is the last that was heard.", style="red"))
    if shown:
        parts.append(_instances(shown, width))
    if len(shown) < len(instances):
        parts.append(Text(f"{len(instances) - len(shown)} more instances", style="dim"))
    if services:
        parts += [Text(""), _services(services)]
    if not instances and not services:
        parts.append(Text("Nobody was heard on this cluster."))
    return Group(*parts)


def _headline(cluster: str, totals: Totals, width: int) -> Text:
    head, end = f"cluster {cluster}: ", f"{totals.output_tokens_per_s:,.0f} tok/s"
    load = f"{totals.instances_ready} of {totals.instances} ready, running {totals.running}, waiting {totals.waiting}"
    share = totals.blocks_used / totals.blocks_total if totals.blocks_total else 0.0
    said = f"{load}, blocks {totals.blocks_used:,}/{totals.blocks_total:,}, {end}"
    if len(head + said) > width:
        said = f"{load}, blocks {share:.0%}, {end}"
    return Text(head, style="bold").append(said, style="not bold")


def _instances(rows: list[InstanceRow], width: int) -> Table:
    cells = [_cells(row) for row in rows]
    table = _table()
    for name in _fitting(cells, width):
        left = name in ("instance", "model", "stage", "role", "state", "", "kv moves by")
        table.add_column(name, justify="left" if left else "right", no_wrap=True)
    for row in cells:
        table.add_row(*(row[str(column.header)] for column in table.columns))
    return table


def _fitting(rows: list[dict[str, str | Text]], width: int) -> list[str]:
    """The columns that have room side by side, in their order."""
    cells = {name: max(len(name), *(len(row[name]) for row in rows)) for name in _COLUMNS}
    # Roles are told where there are any.
    kept = [name for name in _COLUMNS if name != "role" or any(row["role"] != "both" for row in rows)]
    for name in _DISPENSABLE:
        if sum(cells[each] + GAP_CELLS for each in kept) <= width:
            break
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
        "blocks": f"{row.blocks_used}/{row.blocks_total}",
        "": _bar(row.blocks_used, row.blocks_total),
        "tok/s": "-" if row.output_tokens_per_s is None else f"{row.output_tokens_per_s:,.0f}",
        "preempted": str(row.preemptions),
        "uptime": span(row.uptime_s),
        "kv moves by": _moves(row),
    }


def _moves(row: InstanceRow) -> str:
    """The best way its KV can be read, and how many others there are; else why there is none."""
    if row.kv:
        return row.kv[0] + (f" +{len(row.kv) - 1}" if len(row.kv) > 1 else "")
    refusal = row.kv_refusal if len(row.kv_refusal) <= REFUSAL_CELLS else row.kv_refusal[: REFUSAL_CELLS - 1] + "…"
    return f"- {refusal}".rstrip()


def _services(rows: list[ServiceRow]) -> Table:
    table = _table("service", "name", "state")
    table.add_column("uptime", justify="right", no_wrap=True)
    table.add_column("url", no_wrap=True)
    for row in rows:
        table.add_row(row.role, row.name, _state(row.state), span(row.uptime_s), row.url)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, header_style="dim", pad_edge=False, padding=(0, GAP_CELLS, 0, 0))
    for name in columns:
        table.add_column(name, no_wrap=True)
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
