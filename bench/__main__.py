"""Runs a figure by name: ``python -m bench NAME [ARGUMENTS]``; without a name, lists them.

Every module of this folder and of ``papers/*/bench`` that has a ``main()`` is a figure; the first line of its docstring
says what it measures. Each run prints machine, commit and seed first (``bench.stamp``), then a table. ``--save`` puts
both into the area's JSON in place of the run before, with the figures that the bench reports, and renews the pages.
``python -m bench --pages`` only writes the pages.

``python -m bench --check`` lists figures that rest on a commit which is gone or on code that has changed since, and
looks at the budgets of the hot path; it fails for a commit that is gone or a budget that is overstepped.
"""

from __future__ import annotations

import ast
import contextlib
import importlib
import io
import itertools
import signal
import sys
from pathlib import Path

from bench.budgets import BUDGETS, MARGIN, REFERENCE, judged
from bench.claims import findings
from bench.instructions import is_counted_here
from bench.measured import MEASURED
from bench.reference import EarlierCodeError, checked_out, ratio
from bench.results_pages import save, write_pages
from bench.stamp import stamp

HERE = Path(__file__).parent


def main(words: list[str]) -> int:
    """Runs or lists."""
    figures = found_figures()
    if not words:
        for module, group in itertools.groupby(figures, key=lambda name: figures[name][0].rpartition(".")[0]):
            print(module)
            for name in group:
                print(f"  {name:<24} {figures[name][1]}")
        return 0
    if words == ["--check"]:
        return _check()
    if words == ["--pages"]:
        write_pages()
        return 0
    name, *rest = words
    if name not in figures:
        print(f"bench: no figure {name!r}; there are: {', '.join(figures)}", file=sys.stderr)
        return 2
    asked = "--save" in rest
    rest = [word for word in rest if word != "--save"]
    sys.argv = [f"bench {name}", *rest]
    print(stamp())
    output = io.StringIO()
    with contextlib.redirect_stdout(_Tee(output)):
        code = importlib.import_module(figures[name][0]).main() or 0
    if asked and code == 0:
        path = save(name, rest, stamp(), output.getvalue())
        write_pages()
        print(
            f"bench: saved in {path.relative_to(HERE.parent)}; its figures that the bench does not report are as before"
        )
    return int(code)


def found_figures() -> dict[str, tuple[str, str]]:
    """Module and summary of every figure by its name: of this folder, then of each paper."""
    root = HERE.parent
    paths = [*sorted(HERE.glob("*.py")), *sorted(root.glob("papers/*/bench/*.py"))]
    modules = {path: ".".join(path.relative_to(root).with_suffix("").parts) for path in paths}
    return {path.stem: (modules[path], summary) for path in paths if (summary := _summary(path))}


def _check() -> int:
    found = findings(HERE.parent, MEASURED)
    for one in found:
        kind = "gone" if one.gone else "stale"
        print(f"  {kind:<6} {one.figure.bench}: {one.figure.claim[:70]}: {one.why}")
    overstepped = _overstepped()
    gone = sum(one.gone for one in found)
    print(f"{len(found) - gone} figures rest on older code, {gone} on no commit; {overstepped} budgets are overstepped")
    return 1 if gone or overstepped else 0


def _overstepped() -> int:
    """Number of budgets that are not kept, each told; all of them where the reference does not run."""
    if not is_counted_here():
        print("  instructions are not counted: valgrind is not installed")
        return 0
    words = []
    try:
        with checked_out(REFERENCE) as earlier:
            for budget in BUDGETS:
                told = judged(budget, lambda words: ratio(earlier, words))
                kept = f"{1 + MARGIN:.2f} of {REFERENCE}'s"
                print(f"  {told.word:<6} {budget.name}: instructions {told.ratio:.3f}, budget {kept}", flush=True)
                words.append(told.word)
    except EarlierCodeError as error:
        print(f"  gone   {REFERENCE}, which instructions are compared with (set it anew): {error}")
        return len(BUDGETS)
    return words.count("DEARER")


class _Tee(io.TextIOBase):
    """Writes to the screen and to a buffer."""

    def __init__(self, copy: io.StringIO) -> None:
        self._copy, self._screen = copy, sys.stdout

    def write(self, text: str) -> int:
        self._copy.write(text)
        return self._screen.write(text)

    def flush(self) -> None:
        self._screen.flush()


def _summary(path: Path) -> str:
    """First line of a figure's docstring; empty for modules that are none."""
    tree = ast.parse(path.read_text())
    has_main = any(isinstance(node, ast.FunctionDef) and node.name == "main" for node in tree.body)
    text = ast.get_docstring(tree) or ""
    return text.splitlines()[0] if has_main and text and path.stem != "__main__" else ""


if __name__ == "__main__":
    # One that is stopped, as by `timeout`, takes the clusters that it started along.
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))
    sys.exit(main(sys.argv[1:]))
