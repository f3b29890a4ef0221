"""The autopilot that is on, in virtual time: beside the default cluster on public traces, and beside fixed settings.

    python -m bench autopilot_on --rows FILE --traces 'code, past'     # plays, a line of FILE for each setting
    python -m bench autopilot_on --rows FILE --traces 'R1, knee' --settings default stages --kappa 0.76
    python -m bench autopilot_on --rows FILE                           # table of what was played

One cluster serves a whole trace. Its coordinator records, replays what it recorded as ``millrace what-if --advise``
does, and adopts; what ``millrace apply`` restarts is restarted. Engines take 1.15 times as long as the step times that
they name, of H100 or, two of four where they are unequal, A100; expected lengths are wrong by a factor (log-normal,
0.5). ``drift`` is four traces one after the other. CPU that replays take is nobody's here. With ``--kappa`` engines are
H200 with batches of 256 sequences, in which unequal lengths cost that much (papers/cascadeinfer/unequal.py).
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Iterator, Sequence
from itertools import accumulate
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import numpy as np
from millrace.cluster.model_folders import with_model_folders
from millrace.cluster.reading import parse_cluster
from millrace.cluster.settings import with_cluster_settings
from millrace.cluster.toml_text import cluster_toml
from millrace.enginemodel.coefficients import load_step_time
from millrace.enginemodel.parameters import EngineParameters
from millrace.sim.runtime_sim import SECOND
from millrace.supervision.service_fields import merged
from millrace.workloads.recording import rows_of
from millrace.workloads.shape import Arrival, AskedRequest

from bench.results_pages import report
from bench.scenarios.scenarios import data_folder
from papers.block.bench.bound import fluid_bound
from papers.cascadeinfer.unequal import load_unequal
from simulator.scenarios.cluster_file import cluster_tables
from simulator.scenarios.load import arrivals, call_of
from simulator.scenarios.reading import scenario_of
from simulator.scenarios.spec import ScenarioSpec
from simulator.whatif.figures import kept_objectives, of_replay
from simulator.whatif.objectives import objectives_of
from simulator.whatif.piloted import PilotedCluster
from simulator.whatif.replaying import FITTED, FittedCluster, Replayed

MODEL, STEP_TIMES, SLOWER = "m", {"fast": "h100-llama-3-8b", "slow": "a100-llama-3-8b"}, 1.15
ENGINE = EngineParameters(max_sequences=12, blocks_total=8_000, max_model_len=16_384, prefix_caching=True)

#: Requests of a window, and of a trace.
WINDOW, COUNT = 250, 1_250
FIGURES = ("ttft_mean", "ttft_p99", "tpot_p99", "e2e_mean", "e2e_p99", "within")


def _trace(format_: str, path: str, **more: Any) -> dict[str, Any]:
    return {"kind": "trace", "format": format_, "path": path, "total_max": 8_000, **more}


LENGTHS = {
    "conversation": _trace("azure", "azure_llm_2023/AzureLLMInferenceTrace_conv.csv"),
    "code": _trace("azure", "azure_llm_2023/AzureLLMInferenceTrace_code.csv"),
    "Mooncake": _trace("mooncake", "mooncake_fast25/conversation_trace.jsonl"),
    "R1": _trace("servegen", "servegen_deepseek_r1", begin_s=36_000),
    "M-mid": _trace("servegen", "servegen_m_mid", begin_s=36_000),
    "ShareGPT": _trace("sharegpt", "sharegpt_block_10k/sharegpt_val_10k_llama2.csv"),
}
#: Shares of the fluid bound.
LOADS = {"light": 0.4, "knee": 0.75, "past": 1.0}
DRIFT = ("ShareGPT, light, unequal", "code, knee, unequal", "conversation, knee, unequal", "M-mid, past, unequal")
OBJECTIVES = "{{ttft_ms={0:.4g},tpot_ms={1:.4g}}}"
FIXED = {
    "default": "",
    "shortest queue": "policies.dispatch.name=join_shortest_queue",
    "bounded steps": "coordinator.step_bounds={{ttft_s={2:.4g},tpot_s={3:.4g}}}",
    "stages": f"policies.stages.name=exact policies.stages.parameters={{{{margin=0.25,bounds={OBJECTIVES}}}}}",
    "trading": "policies.trading.name=delay",
}


def use_large_batches(kappa: float, folder: Path) -> None:
    """Engines are those of ``--kappa`` from now on; their step times lie in a folder."""
    global ENGINE  # noqa: PLW0603 - of the whole run, as it was asked for
    limits = {"max_sequences": 256, "blocks_total": 56_000, "max_model_len": 65_536, "token_budget": 8_192}
    ENGINE = msgspec.structs.replace(ENGINE, **limits)
    made, file = load_unequal(f"h200-llama-3-8b with kappa {kappa:g}"), folder / f"kappa-{kappa:g}.toml"
    costs = {name: value for name, value in msgspec.to_builtins(made).items() if name != "provenance"}
    file.write_text("".join(f"{name} = {msgspec.json.encode(value).decode()}\n" for name, value in costs.items()))
    STEP_TIMES["fast"] = str(file)
    for source in LENGTHS.values():
        source["total_max"] = 32_000


def cluster_text(name: str, settings: str = "") -> str:
    """The cluster's file for a trace."""
    group = '[[models.groups]]\nname = "{0}"\ncount = {1}\nengine = "modelled"\nstep_time = "{2}"\n'
    groups = {"fast": 2, "slow": 2} if "unequal" in name else {"fast": 4}
    text = f'[[models]]\nname = "{MODEL}"\npath = "millrace-mini"\n'
    text += "".join(group.format(kind, count, STEP_TIMES[kind]) for kind, count in groups.items())
    return cluster_toml(with_cluster_settings(parse_cluster(text), settings.split()))


def scenario(text: str) -> ScenarioSpec:
    """The scenario of a cluster's file; migrators run as they do live. Engines are slower than they say."""
    tables = cluster_tables(with_model_folders(parse_cluster(text)), lambda _model, group: (ENGINE, group.step_time))
    for group in tables["cluster"]["groups"]:
        group |= {"speed": 1 / SLOWER, "told_step_time": group["step_time"]}
    own = {"migration": {"on": True}, "prediction": {"kind": "recorded", "asked": "always"}}
    return scenario_of(merged(tables, {**own, "intervals": {"status_ms": 50, "summary_ms": 50}}))


def load_of(name: str, count: int, seed: int) -> list[Arrival]:
    """A trace at its share of the fluid bound; only conversations keep their own gaps, the others come by chance."""
    lengths, load, *_ = name.split(", ")
    times = {"kind": "trace"} if lengths in ("conversation", "Mooncake") else {"kind": "poisson", "rate_per_s": 1.0}
    spec = scenario_of({"workload": {"lengths": LENGTHS[lengths], "arrivals": times, "count": count}})
    found = arrivals(spec.workload, seed=seed, folders=(data_folder(),))
    rate = LOADS[load] * fluid_bound(scenario(cluster_text(name)), [each.shape for each in found])
    pace, rng = count * 1e9 / rate / (found[-1].at_ns - found[0].at_ns), Random(seed)
    outputs = [each.shape.output_tokens for each in found]
    told = [AskedRequest(MODEL, (n,), 0, max(1.0, float(round(n * rng.lognormvariate(0.0, 0.5))))) for n in outputs]
    begin_ns = found[0].at_ns
    return [Arrival(int((a.at_ns - begin_ns) * pace), a.shape, asks) for a, asks in zip(found, told, strict=True)]


def serve(cluster: PilotedCluster, load: Sequence[Arrival]) -> Replayed:
    """Plays a load to its end."""
    sim = cluster.simulation

    def arrive(number: int) -> None:
        call = call_of(number, load[number], model=MODEL, max_model_len=ENGINE.max_model_len, output_limit=0)
        assert cluster.ingresses[0].process is not None
        cluster.clients.submit(cluster.ingresses[0].process, call)
        if number + 1 < len(load):
            sim.after(load[number + 1].at_ns - load[number].at_ns, arrive, number + 1)

    sim.run(cluster.begin_ns)
    sim.after(0, arrive, 0)
    while cluster.clients.ended < len(load):
        sim.run_for(SECOND)
    sim.run_for(SECOND)
    finished = {each.number: each for each in cluster.observer.finished if each.outcome == "completed"}
    return Replayed(finished=finished, batch=0.0, waiting=0.0, preemptions=0, lost=len(load) - len(finished))


def play(name: str, setting: str, count: int, seed: int) -> dict[str, Any]:
    """A row: figures of the whole and of each phase with one setting, ms, shares of 1, and what the autopilot did."""
    names = DRIFT if name == "drift" else (name,)
    loads = [load_of(each, count, seed) for each in names]
    begins = [0, *accumulate(each[-1].at_ns for each in loads)]
    load = [Arrival(ns + a.at_ns, a.shape, a.asked) for ns, part in zip(begins, loads, strict=False) for a in part]
    spec = with_model_folders(parse_cluster(cluster_text(name if len(names) == 1 else names[0])))
    models = {kind: load_step_time(each).times(SLOWER) for kind, each in STEP_TIMES.items()}
    alone = scenario_of(cluster_tables(spec, lambda _model, group: (ENGINE, f"{FITTED}{group.name}")))
    known = FittedCluster(spec=spec, models=models)
    goals = [objectives_of(spec, alone, known, list(rows_of(part, origin=""))[1:]) for part in loads]  # type: ignore[arg-type]
    ttft_ms, tpot_ms = goals[0].ttft_ms, goals[0].tpot_ms
    settings = FIXED.get(setting, "").format(ttft_ms, tpot_ms, ttft_ms / 1e3, tpot_ms / 1e3)
    interval_s = WINDOW * begins[-1] / 1e9 / len(load) if setting == "on" else 0.0
    cluster = PilotedCluster(cluster_text(names[0], settings), load, scenario, interval_s=interval_s)
    latencies, phase = of_replay(serve(cluster, load), len(load)), np.arange(len(load)) // count
    kept = np.concatenate([kept_objectives(latencies.part(phase == i), goal) for i, goal in enumerate(goals)])
    parts = [phase >= 0, *(phase == i for i in range(len(goals)) if len(goals) > 1)]
    rows = [{**_figures(latencies.part(part)), "within": float(kept[part].mean())} for part in parts]
    return {"trace": name, "setting": setting, "seed": seed, "figures": rows, "done": cluster.done}


def _figures(latencies: Any) -> dict[str, float]:
    values = {name: getattr(latencies, name)[~np.isnan(latencies.e2e)] for name in ("ttft", "tpot", "e2e")}
    p99 = {f"{name}_p99": float(np.nanquantile(each, 0.99)) for name, each in values.items()}
    return {f"{name}_mean": float(np.nanmean(each)) for name, each in values.items()} | p99


def table(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    """Lines: each setting over the default of its trace, changes of figures in %, of the share in points."""
    base = {(row["trace"], row["seed"]): row["figures"] for row in rows if row["setting"] == "default"}
    yield f"{'':<58}" + "".join(f"{name.replace('_', ' '):>11}" for name in FIGURES)
    for row in rows:
        for place, found in enumerate(row["figures"]):
            was = base[row["trace"], row["seed"]][place]
            over = {name: found[name] - was[name] if name == "within" else found[name] / was[name] - 1 for name in was}
            where = f"{row['trace']}{f', {DRIFT[place - 1]}' if place else ''}: {row['setting']}"
            yield f"{where[:57]:<58}" + "".join(f"{100 * over[name]:>+11.1f}" for name in FIGURES)


def main() -> int:
    """Plays, or prints the table."""
    parser = argparse.ArgumentParser(prog="python -m bench autopilot_on", description=__doc__)
    parser.add_argument("--rows", type=Path, required=True)
    parser.add_argument("--traces", nargs="*", default=[], metavar="TRACE", help="'LENGTHS, LOAD[, unequal]' or drift")
    parser.add_argument("--settings", nargs="*", default=["default", "on"], choices=[*FIXED, "on"])
    parser.add_argument("--count", type=int, default=COUNT, help="requests of a trace (default %(default)s)")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--kappa", type=float)
    options = parser.parse_args()
    folder = tempfile.TemporaryDirectory()
    if options.kappa is not None:
        use_large_batches(options.kappa, Path(folder.name))
    for name, setting in ((name, setting) for name in options.traces for setting in options.settings):
        print(f"{name}: {setting}", flush=True)
        with options.rows.open("ab") as file:
            file.write(msgspec.json.encode(row := play(name, setting, options.count, options.seed)) + b"\n")
        print("\n".join(row["done"]), flush=True)
    rows = [msgspec.json.decode(line) for line in options.rows.read_bytes().splitlines()]
    print("\n".join(table(rows)))
    done = [(row["trace"], text) for row in rows for text in row["done"]]
    applied = [f"{trace}: {text[:180]}" for trace, text in done if " replayed: " not in text]
    replays = [text for _, text in done if " replayed: " in text]
    as_it_is = sum(" replayed: as it is" in text for text in replays)
    wrong = sum("the replay does not reproduce" in text for text in replays)
    told = f"{len(replays)} replays, {len(replays) - as_it_is} with advice, {wrong} are told not to reproduce something"
    print("\n".join([told, *applied]))
    report("on", f"{told}; {len(applied)} changes on {sum(row['setting'] == 'on' for row in rows)} traces")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
