"""The page beside a cluster of modelled engines: requests, an operator's orders; Chromium shows the rest."""

import asyncio
import json
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import httpx

from tests.live.clusters import modelled_cluster
from tests.testbed.timed_streams import client
from tests.testbed.up_cluster import UpRig, free_port, prompt_text, stream
from tests.testbed.waiting import until

LIMIT_S = 60.0


PAGE = ("--processes", "3", "--set", f"page.port={free_port()}")
rig = modelled_cluster(*PAGE, instances=3)


def page_url(rig: UpRig) -> str:
    return f"http://127.0.0.1:{json.loads((rig.folder / 'run' / 'page.json').read_text())['port']}"


class Viewer:
    """The state of a browser: frames, merged."""

    def __init__(self) -> None:
        self.tables: dict[str, dict[str, Any]] = {}
        self.changed = asyncio.Event()

    async def follow(self, url: str) -> None:
        async with httpx.AsyncClient(timeout=None) as http, http.stream("GET", f"{url}/stream") as answer:
            async for line in answer.aiter_lines():
                if line.startswith("data: "):
                    self._merge(json.loads(line[6:]))

    def _merge(self, frame: dict[str, Any]) -> None:
        self.tables = frame.get("k", self.tables)
        for table, rows in frame.get("d", {}).items():
            for key, change in rows.items():
                if change is None:
                    self.tables[table].pop(key, None)
                else:
                    self.tables[table].setdefault(key, {}).update(change)
        self.changed.set()

    async def until(self, holds: Callable[[dict[str, dict[str, Any]]], Any]) -> Any:
        async with asyncio.timeout(LIMIT_S):
            while not (self.tables and (found := holds(self.tables))):
                self.changed.clear()
                await self.changed.wait()
        return found


@asynccontextmanager
async def viewer_of(rig: UpRig) -> AsyncIterator[Viewer]:
    viewer = Viewer()
    task = asyncio.create_task(viewer.follow(page_url(rig)))
    try:
        await viewer.until(lambda tables: serving(tables) == 3)
        yield viewer
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


def serving(tables: dict[str, dict[str, Any]]) -> int:
    """Instances that take requests: their worker is alive, and its engine has told of itself."""
    alive = [row for row in tables["s"].values() if row["role"] == "worker" and row["state"] == "alive"]
    return sum(tables["report"].get(row["name"], {}).get("inc") == row["incarnation"] for row in alive)


def drained(tables: dict[str, dict[str, Any]]) -> list[str]:
    return [each[0] for row in tables["s"].values() for each in row["drained"]]


def events(tables: dict[str, dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in tables["e"].values() if event["k"] == kind]


async def test_a_request_is_seen_where_it_runs_and_its_page_tells_what_explain_tells(rig: UpRig) -> None:
    async with viewer_of(rig) as viewer, client(60) as http:
        running = asyncio.create_task(stream(http, rig, prompt_text(1), max_tokens=300, ignore_eos=True))
        name, row = await viewer.until(lambda tables: next(iter(tables["q"].items()), None))
        assert row["inst"] in viewer.tables["report"]
        assert not (await running).error
        request = name.rpartition(".")[0]
        await viewer.until(lambda tables: request in tables["f"])
        assert name not in viewer.tables["q"]
        known: dict[str, Any] = {}
        async with asyncio.timeout(LIMIT_S):
            while "completed" not in "".join(known.get("text", [])):  # spans are written a moment after the end
                known = (await http.get(f"{page_url(rig)}/run/0/request/{request}")).json()
        assert {"DecisionMade/1", "RequestFinished/1"} <= {body["type"] for _, body in known["messages"]}
        assert "\n".join(known["text"]).strip() == rig.cli("explain", request).strip()
        (first, _), *_ = (await http.get(f"{page_url(rig)}/run/0/history")).json()
        kept = (await http.get(f"{page_url(rig)}/run/0/history/{first}")).text.splitlines()
        assert "k" in json.loads(kept[0])
        index = (await http.get(f"{page_url(rig)}/r/{request}")).text
        assert '<script type="module"' in index


async def order(rig: UpRig, key: str, order: str, file: str = "") -> tuple[int, list[dict[str, Any]]]:
    async with client(60) as http:
        headers = {"authorization": f"Bearer {key}"} if key else {}
        answer = await http.post(f"{page_url(rig)}/order", json={"order": order, "file": file}, headers=headers)
        lines = [json.loads(line[6:]) for line in answer.text.splitlines() if line.startswith("data: ")]
        return answer.status_code, lines


async def test_orders_need_the_operators_key_and_are_carried_out(rig: UpRig) -> None:
    key = rig.cluster_file()["operator_password"]
    async with viewer_of(rig) as viewer:
        assert (await order(rig, "", "drain worker-1"))[0] == 401
        refused = await order(rig, "wrong", "drain worker-1")
        assert refused[1][-1] == {"code": 1}
        assert "refuses user operator" in refused[1][0]["line"]
        assert not drained(viewer.tables)
        _, said = await order(rig, key, "drain worker-1")
        assert said[-1] == {"code": 0}, said
        await viewer.until(lambda tables: drained(tables) == ["worker-1"])
        _, said = await order(rig, key, "drain worker-1 --back")
        assert said[-1] == {"code": 0}, said
        await viewer.until(lambda tables: serving(tables) == 3)
        await viewer.until(lambda tables: [e["code"] for e in events(tables, "OrderGiven")][-2:] == [None, 0])
        log = (rig.folder / "logs" / "page.log").read_text()
        assert any("drain worker-1" in line and "code" in line for line in log.splitlines()), log


async def test_the_clusters_file_is_shown_and_a_changed_one_compared(rig: UpRig) -> None:
    key = rig.cluster_file()["operator_password"]
    _, said = await order(rig, key, "cluster show")
    assert said[-1] == {"code": 0}, said
    file = "\n".join(each["line"] for each in said[:-1]) + "\n[policies.dispatch]\nname = 'round_robin'\n"
    _, said = await order(rig, key, "apply - --dry-run", file)
    assert said[-1] == {"code": 0}, said
    assert any(each.get("line", "").startswith("ingress-0") for each in said), said


async def test_the_page_comes_back_when_it_was_killed(rig: UpRig) -> None:
    (pid,) = rig.pids("services.page")
    os.kill(pid, signal.SIGKILL)

    async def answers() -> bool:
        async with client(5) as http:
            try:
                return (await http.get(page_url(rig))).status_code == 200
            except httpx.HTTPError:
                return False

    await until(answers, look_s=0.1)
    async with viewer_of(rig):
        pass
    assert rig.pids("services.page") != [pid]
