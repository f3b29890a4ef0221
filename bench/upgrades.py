"""Streams on engines that `millrace apply` replaces one after the other: failures, pauses, recompute.

Every change touches a setting of all engines, so each drains and starts anew. So many streams are always open; the
prompts are few, and all streams of one prompt must have the same text. Prints one line a change, then a summary. Real
engines may be full long before their places are: their load is their rate by that of --changes 0 with more streams.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import re
import tempfile
import time
from collections import Counter, defaultdict
from pathlib import Path
from random import Random

from tests.testbed.programs import output_of
from tests.testbed.timed_streams import TimedStream, client
from tests.testbed.up_cluster import UpRig, prompt_text, stream

MODEL = Path(__file__).resolve().parent.parent / "models" / "millrace-nano"

CLUSTER = """
[[models]]
name = "m"
path = "{model}"

[[models.groups]]
count = {engines}
processes = {engines}
engine = "{engine}"
python = "{python}"

[models.groups.settings]
max_num_seqs = {places}
kv_blocks = {blocks}
limits.linger_ms = 200
"""

#: A continuation as ingress logs it.
CONTINUED = re.compile(r" continuation .* why=(\w+) .* tokens=(\d+)")
#: When an engine began to drain, was started, or was ready, as `apply` says it.
SAID = r"([\d.]+) s  worker-\d+ "


class Load:
    """Streams that are open, and those that have ended, by the number of their prompt."""

    def __init__(self, rig: UpRig, options: argparse.Namespace) -> None:
        self.ended: list[tuple[int, TimedStream]] = []
        self._rig, self._open_max = rig, options.streams
        rng = Random(options.seed)
        self._tokens = [rng.randint(options.tokens // 2, options.tokens) for _ in range(options.streams)]

    async def until(self, done: asyncio.Event) -> None:
        """Keeps so many streams open until it is done; waits for their ends."""

        async def again(number: int) -> None:
            while not done.is_set():
                fields = {"max_tokens": self._tokens[number], "ignore_eos": True}
                self.ended.append((number, await stream(http, self._rig, prompt_text(number), **fields)))

        async with client() as http:
            await asyncio.gather(*(again(number) for number in range(self._open_max)))


def changed(ended: list[tuple[int, TimedStream]]) -> int:
    """Number of streams that differ from most of those with their prompt."""
    texts: dict[int, Counter[tuple[str, str, int]]] = defaultdict(Counter)
    for number, result in ended:
        if not result.error:
            texts[number][result.outcome] += 1
    return sum(seen.total() - max(seen.values()) for seen in texts.values())


async def measure(rig: UpRig, options: argparse.Namespace, write: object) -> None:
    """All changes under load, and the summary."""
    load, done, took, shares = Load(rig, options), asyncio.Event(), [], []
    streams = asyncio.create_task(load.until(done))
    await asyncio.sleep(options.settle)
    settled = time.monotonic()
    for change in range(1, options.changes + 1):
        write(change)  # type: ignore[operator]
        began = time.monotonic()
        words = ("apply", str(rig.folder.parent / "cluster.toml"))
        code, said = await asyncio.to_thread(
            output_of, "millrace.cli", words, environment=os.environ | {"MILLRACE_DIR": str(rig.folder)}, limit_s=600
        )
        took.append(time.monotonic() - began)
        at_s = [sum(map(float, re.findall(SAID + what, said))) for what in ("drains", "starts", "ready")]
        drains, starts = at_s[1] - at_s[0], at_s[2] - at_s[1]
        shares.append(took[-1] / (starts or took[-1]))
        print(f"  change {change}: {took[-1]:.1f} s, of which engines drain {drains:.1f} s and start {starts:.1f} s, "
              f"code {code}, {sum(bool(each.error) for _, each in load.ended)} failed so far", flush=True)  # fmt: skip
        if code:
            print(said)
    done.set()
    await streams
    results = [result for _, result in load.ended]
    errors = [result.error for result in results if result.error]
    pauses = sorted(max(result.intervals(0, 1e12), default=0.0) for result in results)
    tokens = sum(result.tokens for result in results)
    rate = sum(settled - options.settle / 2 < at < settled for each in results for at in each.times)
    moved = await rig.metric("millrace_ingress_migrations_total", 'outcome="moved"')
    logs = "".join(file.read_text(errors="replace") for file in (rig.folder / "logs").glob("ingress*.log*"))
    anew = CONTINUED.findall(logs)
    again = sum(int(count) for _, count in anew)
    print(f"  {len(results)} streams of {sum(r.took_s for r in results) / len(results):.0f} s, failed {len(errors)}, "
          f"changed {changed(load.ended)}; moved {moved:.0f} times, computed anew {len(anew)} times "
          f"({dict(Counter(why for why, _ in anew))}), "
          f"{again} of {tokens} tokens ({again / max(1, tokens):.1%})")  # fmt: skip
    print(f"  longest pause p50 {_at(pauses, 0.5):.2f} s, p99 {_at(pauses, 0.99):.2f} s, max {pauses[-1]:.2f} s; "
          f"before the changes {rate * 2 / options.settle:.0f} tokens/s")  # fmt: skip
    if took:
        print(f"  a change took p50 {_at(sorted(took), 0.5):.1f} s, max {max(took):.1f} s; by its engines' starts "
              f"p50 {_at(sorted(shares), 0.5):.2f}, max {max(shares):.2f}")  # fmt: skip
    print("".join(f"    {error[:200]}\n" for error in errors[:3]), end="")


def _at(ordered: list[float], share: float) -> float:
    return ordered[min(len(ordered) - 1, int(share * len(ordered)))]


def main() -> int:
    """Runs and prints."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--engine", choices=("modelled", "vllm"), default="modelled")
    parser.add_argument("--model", type=Path, default=MODEL)
    parser.add_argument("--engines", type=int, default=8)
    parser.add_argument("--places", type=int, default=3, help="sequences that one engine decodes at a time")
    parser.add_argument("--blocks", type=int, default=2048, help="of an engine's KV")
    parser.add_argument("--streams", type=int, default=17, help="open at a time")
    parser.add_argument("--tokens", type=int, default=2000, help="output tokens of the longest; the shortest has half")
    parser.add_argument("--changes", type=int, default=20)
    parser.add_argument("--settle", type=float, default=20.0, help="seconds before the first change")
    parser.add_argument("--speed", type=float, default=0.1, help="of the modelled engines")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--python", nargs="+", default=[""], help="of engines, in turn; they start unforked")
    parser.add_argument("--keep", type=Path, help="folder that stays, for the logs")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = options.keep or Path(made)
        folder.mkdir(exist_ok=True)

        def write(change: int) -> None:
            in_turn = {"blocks": options.blocks + change % 2, "python": options.python[change % len(options.python)]}
            text = CLUSTER.format(**vars(options) | in_turn)
            speed = f"modelled.speed = {options.speed}\n" if options.engine == "modelled" else ""
            (folder / "cluster.toml").write_text(text + speed)

        write(0)
        print(f"{options.engines} {options.engine} engines of {options.places} places, {options.streams} streams open, "
              f"seed {options.seed}")  # fmt: skip
        with UpRig.of_words(folder / "cluster", ("--cluster", str(folder / "cluster.toml")), "m") as rig:
            asyncio.run(measure(rig, options, write))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
