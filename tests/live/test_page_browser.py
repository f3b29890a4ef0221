"""The page in Chromium, beside a cluster of modelled engines: each view, an order, a killed worker, the past, speed.

`./task test:page` runs it; it is skipped where playwright or Chromium are not there. With MILLRACE_PAGE_PICTURES=FOLDER
it writes the pictures of docs/PAGE.md there. With MILLRACE_PAGE_MINUTES=10 it also leaves a page open for so long.
"""

import asyncio
import json
import os
import shutil
import signal
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from pathlib import Path
from typing import Any

import psutil
import pytest
from millrace.workloads.recording import read_recording
from millrace.workloads.shape import WorkloadError

from tests.testbed import waiting
from tests.testbed.timed_streams import client
from tests.testbed.up_cluster import UpRig, free_port, prompt_text, stream

playwright = pytest.importorskip("playwright.async_api", reason="playwright is not installed; ./task test:page does")
CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
pytestmark = [pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium; apt-get install chromium")]

ROOT = Path(__file__).resolve().parents[2]
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-extensions",
]
PICTURES = os.environ.get("MILLRACE_PAGE_PICTURES", "")
MINUTES = int(os.environ.get("MILLRACE_PAGE_MINUTES", "0"))
INSTANCES, STAGES = 6, 3
LIMIT_S = 90.0


@pytest.fixture(scope="module")
def rig(tmp_path_factory: pytest.TempPathFactory) -> Iterator[UpRig]:
    folder = tmp_path_factory.mktemp("browser")
    sizes = ["--instances", str(INSTANCES), "--processes", str(INSTANCES), "--stages", str(STAGES)]
    sizes += ["--instances-max", str(INSTANCES + 1)]
    ports = [f"page.port={free_port()}", f"telemetry.metrics_port={free_port()}"]
    words = ["--engine", "modelled", *sizes, *(word for port in ports for word in ("--set", port))]
    cluster = UpRig.of_words(folder / "c", words, model="millrace-mini")
    cluster.start()
    yield cluster
    cluster.stop()


@asynccontextmanager
async def opened(rig: UpRig, path: str = "/", scheme: str = "light") -> AsyncIterator[Any]:
    """A tab that shows the cluster's page, connected."""
    port = json.loads((rig.folder / "run" / "page.json").read_text())["port"]
    async with opened_at(f"http://127.0.0.1:{port}{path}", scheme) as tab:
        await until(tab, "document.body.dataset.time === 'live'")
        yield tab


@asynccontextmanager
async def opened_at(url: str, scheme: str = "light") -> AsyncIterator[Any]:
    """A tab; an error in it fails the test."""
    errors: list[str] = []
    async with playwright.async_playwright() as driver:
        browser = await driver.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        tab = await browser.new_page(viewport={"width": 1280, "height": 800}, color_scheme=scheme)
        tab.set_default_timeout(LIMIT_S * 1000)
        tab.on("pageerror", lambda error: errors.append(str(error)))
        tab.on("console", lambda said: errors.append(said.text) if said.type == "error" else None)
        await tab.goto(url)
        yield tab
        await browser.close()
    assert not [error for error in errors if "404" not in error], errors


@asynccontextmanager
async def load(rig: UpRig, rate: float = 5.0) -> AsyncIterator[None]:
    """Requests of many lengths, until the block ends."""

    async def offer() -> None:
        async with client(120) as http, asyncio.TaskGroup() as group:
            for number in range(10_000):
                length = (300, 1300, 600, 1900, 800, 1600)[number % 6]
                group.create_task(stream(http, rig, prompt_text(number), max_tokens=length, ignore_eos=True))
                await asyncio.sleep(1 / rate)

    task = asyncio.create_task(offer())
    try:
        yield
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def until(tab: Any, expression: str) -> Any:
    """Its value once it is true. Asked from here: the page's policy lets nobody evaluate text in it."""
    return await waiting.until(lambda: tab.evaluate(expression), LIMIT_S, 0.1)


async def picture(tab: Any, name: str) -> None:
    if PICTURES:
        await tab.screenshot(path=Path(PICTURES) / f"page-{name}.png")


async def test_requests_are_seen_on_their_instances_and_in_the_table(rig: UpRig) -> None:
    async with load(rig), opened(rig) as tab:
        await until(tab, f"document.querySelectorAll('.card').length === {INSTANCES}")
        assert await tab.locator(".stage").count() == STAGES
        await until(tab, "millrace.river.particles.size >= 12")
        homes = """() => [...millrace.river.particles.values()].filter((p) => p.settled && p.card).map((p) => {
            const { x, y, w, h } = p.card.rect; return p.x >= x && p.x <= x + w && p.y >= y - 1 && p.y <= y + h; })"""
        sits = await tab.evaluate(homes)
        assert sits.count(True) > 0.9 * len(sits) > 0
        await until(tab, "Object.values(millrace.cluster.e).some((e) => e.k === 'move')")
        await tab.wait_for_timeout(9000 if PICTURES else 0)
        await picture(tab, "river")
        await tab.keyboard.press("t")
        await tab.wait_for_selector("#view table")
        assert await tab.locator("#view tbody").first.locator("tr").count() == INSTANCES
        await tab.keyboard.press("p")
        await tab.wait_for_selector(".ranges .range")
        assert await tab.locator(".range").count() == STAGES
        await picture(tab, "plans")
        await tab.set_viewport_size({"width": 390, "height": 844})
        assert await tab.evaluate("document.documentElement.scrollWidth") == 390


async def test_a_deep_link_tells_the_life_of_a_request(rig: UpRig) -> None:
    async with load(rig, 3.0), opened(rig) as tab:
        ended = "Object.entries(millrace.cluster.f).find(([, row]) => row.moves && row.what === 'completed')?.[0]"
        request = await until(tab, ended)
        async with opened(rig, f"/r/{request}") as other:
            await other.wait_for_selector(".waterfall .span.move")
            assert await other.locator(".words").inner_text() == rig.cli("explain", request).strip()
            assert await other.locator("caption", has_text="Forecasts").count() >= 1
            await picture(other, "request")


async def test_an_instance_tells_what_a_drain_would_do_and_is_drained_by_its_operator(rig: UpRig) -> None:
    async with load(rig), opened(rig, scheme="dark") as tab:
        await until(tab, "millrace.river.particles.size >= 10")
        await tab.wait_for_timeout(9000 if PICTURES else 0)
        name = await until(tab, "Object.entries(millrace.cluster.i).find(([, row]) => row.running > 3)?.[0]")
        await tab.locator(f".card[data-name={name}]").focus()
        await tab.keyboard.press("Enter")
        await tab.wait_for_selector("#panel h2:has-text('What a drain would do')")
        await picture(tab, "drain")
        await tab.locator("#panel button[data-verb=drain]").click()
        await tab.locator("dialog input[name=key]").fill(rig.cluster_file()["operator_password"])
        await tab.locator("dialog button[type=submit]").click()
        await tab.wait_for_selector("dialog .said[data-code='0']")
        await tab.locator("dialog button", has_text="Close").click()
        await tab.wait_for_selector(f".card[data-name={name}][data-state=drained]")
        await tab.locator("#panel button[data-verb=back]").click()
        await tab.locator("dialog button[type=submit]").click()  # the key is remembered in this tab
        await tab.wait_for_selector(f".card[data-name={name}][data-state=ready]")


async def first_answers(rig: UpRig) -> None:
    """A newcomer finds three answers at the address that was printed, and the fourth by a click there."""
    printed = next(line.split()[1] for line in rig.output().splitlines() if line.split()[:1] == ["look"])
    async with opened_at(printed) as tab:
        for question in ("Slowest request now", "Fullest instance", "Last failover"):
            answer = tab.locator(f"#panel section:has(h2:text('{question}'))")
            await answer.locator("p").first.wait_for()
            print(f"{question}: {' '.join((await answer.inner_text()).split())}")
        await tab.locator("#panel section:has(h2:text('Fullest instance')) button").click()
        await tab.wait_for_selector("#panel h2:text('What a drain would do')")


async def test_a_killed_worker_is_seen_and_the_past_shows_it_alive(rig: UpRig) -> None:
    async with load(rig), opened(rig) as tab:
        await until(tab, "millrace.river.particles.size >= 10")
        busy = "Object.entries(millrace.cluster.i).find(([, row]) => row.running > 1)?.[0]"
        victim = await until(tab, busy)
        before = await tab.evaluate("millrace.feed.at")
        (pid,) = rig.pids(f"{victim}.json")
        watch = f"""() => new Promise((seen) => {{ const begin = performance.now(); const look = () =>
            document.querySelector(".card[data-name={victim}][data-state=dead]") ? seen(performance.now() - begin)
            : setTimeout(look, 10); look(); }})"""
        watching = asyncio.create_task(tab.evaluate(watch))
        await asyncio.sleep(0.2)
        os.kill(pid, signal.SIGKILL)
        print(f"seen {await watching - 200:.0f} ms after the kill")
        await tab.wait_for_selector("section:has(h2:text('Last failover')) strong")
        await picture(tab, "failover")
        await first_answers(rig)
        await tab.evaluate(f"millrace.feed.go({before})")
        await tab.wait_for_selector(f".card[data-name={victim}][data-state=ready]")
        assert await tab.evaluate("document.body.dataset.time") == "past"
        await tab.locator("#live").click()
        await until(tab, "document.body.dataset.time === 'live'")
        await until(tab, f"millrace.cluster.i['{victim}'].state === 'ready'")


async def test_an_idle_instance_says_that_a_drain_moves_nothing(rig: UpRig) -> None:
    async with opened(rig) as tab:
        await until(tab, "Object.keys(millrace.cluster.q).length === 0")
        await tab.locator(".card[data-name=worker-2]").click()
        await tab.wait_for_selector("#panel p:text('Nothing runs or waits there: it stops at once')")


def simulated(*words: str) -> AbstractAsyncContextManager[str]:
    """As ``served``, by `millrace sim`."""
    return served("sim", "--scenario", "examples/scenarios/mixed.toml", "--set", "workload.warm_up=0", *words)


@asynccontextmanager
async def served(*words: str) -> AsyncIterator[str]:
    """The address of a page that a verb of the simulator serves, while the block lasts."""
    command = (sys.executable, "-m", "millrace.cli", *words, "--page", str(free_port()))
    pipe = asyncio.subprocess.PIPE
    process = await asyncio.create_subprocess_exec(
        *command, stdout=pipe, cwd=ROOT, env=os.environ | {"PYTHONPATH": "libs"}
    )
    assert process.stdout is not None
    try:
        async with asyncio.timeout(LIMIT_S):
            while not (line := (await process.stdout.readline()).decode()).startswith("look:"):
                assert line, "it ended"
        yield line.split()[1]
    finally:
        process.kill()
        await process.wait()


async def test_a_simulation_is_watched_as_it_runs_and_harmed_by_a_click() -> None:
    async with simulated("--set", "workload.count=2000") as url, opened_at(url) as tab:
        await until(tab, "millrace.river.particles.size >= 20")
        await tab.locator("#speed").click()
        await until(tab, "millrace.cluster.c.page.pace === 4")
        for verb in ("slow_link", "stall", "partition", "kill"):
            await tab.locator(".card[data-name=fast-1]").focus()
            await tab.keyboard.press("Enter")
            await tab.locator(f"#panel button[data-verb={verb}]").click()
        await tab.wait_for_selector(".card[data-name=fast-1][data-state=dead]")
        await tab.keyboard.press("Escape")
        await tab.wait_for_selector("section:has(h2:text('Last failover')) strong")
        for verb in ("slow_disk", "stop_bus"):
            await tab.locator(f"#panel button[data-verb={verb}]").click()
        await until(tab, "Object.values(millrace.cluster.e).filter((e) => e.k === 'order').length === 6")
        await until(tab, "millrace.cluster.i['fast-1'].state === 'ready'")


async def test_two_runs_stand_side_by_side_with_their_differences() -> None:
    sweep = ("--set", "workload.count=500", "--sweep", "dispatch.policy=random,forecast")
    async with simulated(*sweep) as url, opened_at(url) as tab:
        await until(tab, "millrace.feed.recorded && millrace.comparison.river.particles.size > 40")
        await tab.wait_for_selector(".mark:not(:empty)")
        await tab.wait_for_selector(".better")
        assert await tab.evaluate("Math.abs(millrace.feed.at - millrace.comparison.feed.at)") < 1000
        await tab.wait_for_timeout(6000 if PICTURES else 0)
        await picture(tab, "compare")
        await tab.locator("#panel [data-run=b]").select_option("0")
        await until(tab, "[...millrace.river.marks, ...millrace.comparison.river.marks].length === 0")


def requests_recorded(rig: UpRig) -> int:
    try:
        return len(read_recording(rig.folder / "recording").requests)
    except WorkloadError:
        return 0  # nothing is written yet


async def test_what_a_cluster_recorded_stands_beside_its_replay(rig: UpRig) -> None:
    async with client(120) as http:
        await asyncio.gather(*(stream(http, rig, prompt_text(n), max_tokens=40 + 10 * n) for n in range(12)))
    await waiting.until(lambda: requests_recorded(rig) >= 12, LIMIT_S, 0.2)
    async with served("what-if", "--dir", str(rig.folder), "--most", "40") as url, opened_at(url) as tab:
        await until(tab, "millrace.feed.recorded && millrace.comparison.river.particles.size > 0")
        runs = await tab.locator("#panel [data-run=a] option").all_inner_texts()
        assert runs[0] == "recorded"
        assert len(runs) == 2
        ended = await until(tab, "millrace.comparison.ended.every((e) => e.length) && millrace.comparison.ended")
        assert {name for name, _ in ended[0]} == {name for name, _ in ended[1]}
        assert await tab.evaluate("Object.keys(millrace.cluster.i).length") == INSTANCES
        await picture(tab, "recorded")


#: Frames of a cluster that is made up: instances, requests; every frame some requests come, move and end.
_MADE_UP = """async ([instances, requests, seconds]) => {
  const { feed, cluster, river } = millrace;
  feed.waiting = [];  // the live stream is put aside
  const begin = Date.now(), name = (n) => `w${n % instances}`;
  const stages = [0, 1, 2].map((s) => ({ name: `s${s}`, length_min: s * 1000,
    length_max: s < 2 ? s * 1000 + 1000 : null,
    instances: [...Array(instances).keys()].filter((n) => n % 3 === s).map(name), roles: {} }));
  const row = (n) => ({ inst: name(n), model: "m", st: n % 9 ? "r" : "w", prompt: 50 + (n * 37) % 2000,
    max: 4000, at: 0, moves: 0, cont: 0, o: [n % 500, 0, 20], e2e: 60000 });
  const table = (count, key, of) => Object.fromEntries([...Array(count).keys()].map((n) => [key(n), of(n)]));
  const instance = (n) => ({ model: "m", inc: 1, running: 30, waiting: 2,
    used: 500, total: 1000, step: 20, tps: 600 });
  const tables = { c: { page: { t0: begin, cluster: "made up", connected: true } },
    q: table(requests, (n) => `q${n}.0`, row), report: table(instances, name, instance),
    plan: { m: { epoch: 1, model: "m", boundary_epoch: 0, stages } } };
  feed.take({ t: begin, k: tables });
  let [next, at] = [requests, begin];
  const timer = setInterval(() => {
    at += 200;
    const q = {};
    for (let n = 0; n < requests / 100; n++) {
      q[`q${next - requests}.0`] = null;
      q[`q${next}.0`] = row(next++);
    }
    for (let n = 0; n < 20; n++) {
      const moved = `q${next - 1 - n * 7}.0`;
      q[moved] = { ...(q[moved] ?? {}), inst: name(next + n * 5) };
    }
    feed.at = at; feed.heard = performance.now();
    feed.take({ t: at, d: { q, report: table(instances, name, (n) => ({ used: 400 + (at / 200 + n * 31) % 500 })) } });
  }, 200);
  const heap = () => performance.memory?.usedJSHeapSize ?? 0;
  await new Promise((done) => setTimeout(done, 1500));
  const [frames, ms, first, start] = [river.drawn.frames, river.drawn.ms, heap(), performance.now()];
  await new Promise((done) => setTimeout(done, seconds * 1000));
  clearInterval(timer);
  const took = (performance.now() - start) / 1000;
  return { particles: river.particles.size, cards: document.querySelectorAll(".card").length,
    fps: (river.drawn.frames - frames) / took, draw_ms: (river.drawn.ms - ms) / (river.drawn.frames - frames),
    heap_mb: [first / 1e6, heap() / 1e6] };
}"""


@pytest.mark.parametrize(("instances", "requests", "cards"), [(64, 2000, 64), (1000, 20_000, 64)])
async def test_many_instances_and_requests_are_drawn(rig: UpRig, instances: int, requests: int, cards: int) -> None:
    """Prints frames a second and the heap; asserts what is drawn. Beyond 160 instances cards stand for groups."""
    seconds = float(os.environ.get("MILLRACE_PAGE_SECONDS", "5"))
    async with opened(rig) as tab:
        measured = await tab.evaluate(_MADE_UP, [instances, requests, seconds])
        print(json.dumps({"instances": instances, "requests": requests} | measured))
        assert measured["cards"] == pytest.approx(cards, abs=2)
        assert measured["particles"] >= min(requests, 6000) * 0.8
        await picture(tab, f"many-{instances}")


@pytest.mark.timeout(240 + 60 * MINUTES)
@pytest.mark.skipif(not MINUTES, reason="MILLRACE_PAGE_MINUTES says for how many minutes")
async def test_the_heap_of_a_page_that_stays_open_is_flat(rig: UpRig) -> None:
    """Prints each minute what is left after garbage collection, and the memory of the page's process."""
    async with load(rig, 3.0), opened(rig) as tab:
        protocol = await tab.context.new_cdp_session(tab)
        (pid,) = rig.pids("services.page")
        heaps_mb: list[float] = []
        for minute in range(MINUTES + 1):
            await asyncio.sleep(60 if minute else 5)
            await protocol.send("HeapProfiler.collectGarbage")
            heaps_mb.append((await protocol.send("Runtime.getHeapUsage"))["usedSize"] / 1e6)
            counts = "[Object.keys(millrace.cluster.q).length, document.getElementsByTagName('*').length]"
            shown, elements = await tab.evaluate(counts)
            process_mb = round(psutil.Process(pid).memory_info().rss / 1e6, 1)
            known = {"requests": shown, "elements": elements, "process_mb": process_mb}
            print(json.dumps({"minute": minute, "heap_mb": round(heaps_mb[-1], 2)} | known), flush=True)
        settled = heaps_mb[len(heaps_mb) // 3 :]
        assert max(settled) < 1.3 * settled[0] + 0.5, "it holds more and more"


_TOLD = """() => {
  const { feed, cluster } = millrace;
  feed.waiting = [];  // the live stream is put aside
  const record = { model: "m", blocks_total: 100 }, worker = { role: "worker", state: "alive", incarnation: 1 };
  const report = { model: "m", inc: 1, running: 2, used: 50, total: 100, sums: [0, 0, 0, 0] };
  const service = (fields) => ({ drained: [], migrations: [], trouble: "", ...worker, ...fields });
  const ended = (n) => ({ instances: ["well"], output_tokens: [9], prompt_tokens: 100, cached_tokens: 100 * n });
  feed.take({ t: 1e6, k: { c: { page: { t0: 1e6 } }, f: { a: ended(0), b: ended(1) },
    instance: { well: record, mute: record, killed: record, new: record },
    report: { well: { ...report }, mute: { ...report }, killed: { ...report } },
    s: { "worker/killed": service({}), supervisor: service({ drained: [["put aside", "m"]] }) } } });
  feed.take({ t: 1e6 + 3000, d: { report: { well: { sums: [2500, 1000, 50, 100] }, killed: { sums: [2500, 1, 1, 1] } },
    s: { "worker/killed": { state: "dead" } } } });
  return Object.fromEntries(Object.entries(cluster.i).map(([name, row]) =>
    [name, [row.state, row.running, row.step, row.tps, row.hit ?? null]]));
}"""


_CASCADE = """() => {
  const { feed } = millrace;
  feed.waiting = [];  // the live stream is put aside
  const point = (threshold, share, quality, p95_s) =>
    ({ thresholds: [threshold], instances: [2, 1], shares: [1, share], quality, quality_low: quality - 2, p95_s });
  const tier = (model, threshold, share) => ({ model, threshold, share, instances: 1, awaited: false, p95_ns: 9e8 });
  const plan = { cascade: "auto", epoch: 4, tiers: [tier("nano", 70, 1), tier("mini", 0, 0.4)], judge: "confidence",
    quality: 62, quality_low: 60, p95_ns: 2.5e9, meets: true, coordinator: "c", reason: "least p95",
    front: [point(0, 0, 40, 1), point(70, 0.4, 62, 2.5), point(90, 0.8, 66, 6)] };
  feed.take({ t: 1e6, k: { c: { page: { t0: 1e6 } }, cascade: { auto: plan } } });
}"""


async def test_a_cascades_front_is_a_picture_and_a_table_beside_it(rig: UpRig) -> None:
    async with opened(rig, "/plans") as tab:
        await tab.evaluate(_CASCADE)
        section = tab.locator("#view section:has(h2:text('Cascade auto'))")
        await section.locator(".front circle").first.wait_for()
        places = "[...document.querySelectorAll('.front circle')].map((c) => [c.cx.baseVal.value, c.cy.baseVal.value])"
        (x0, y0), (x1, y1), (x2, y2) = await tab.evaluate(places)
        assert x0 < x1 < x2
        assert y0 > y1 > y2  # more quality is higher
        assert (x1 - x0) / (x2 - x0) == pytest.approx(0.3)
        assert (
            await section.locator(".front circle.chosen title").text_content()
            == await section.locator(".front circle title").nth(1).text_content()
        )
        assert "in force: quality 62.0, 95 % end within 2.5 s" in await section.locator("svg").get_attribute(
            "aria-label"
        )
        rows = await section.locator(".front tbody tr").all_inner_texts()
        assert [row.split() for row in rows][1] == "in force 2.5 s 62.0 60.0 70.0 100, 40 % 2, 1".split()
        assert ["in force" in row for row in rows] == [False, True, False]
        await picture(tab, "front")


_UPGRADE = """() => {
  const { feed } = millrace;
  feed.waiting = [];  // the live stream is put aside
  const engine = (version) => ({ engine: "vllm", engine_version: version });
  const record = (incarnation, version) => ({ model: "m", blocks_total: 100, incarnation, ...engine(version) });
  const worker = (name, incarnation, state = "alive") =>
    ({ role: "worker", name, state, incarnation, drained: [], migrations: [], trouble: "" });
  const holds = { model: "m", running: 2, used: 9, total: 100, sums: [2900, 0, 0, 0] };
  const report = (inc, draining) => ({ inc, draining, ...holds });
  const anew = { t: 2000, k: "ServicePresence", role: "worker", name: "w0", state: "alive" };
  const open = (inst) => ({ inst, model: "m", st: "r", at: 0, o: [5, 0, 20], moves: 0, cont: 0 });
  Object.assign(feed, { at: 1e6 + 3000, heard: performance.now() });
  feed.take({ t: 1e6 + 3000, k: { c: { page: { t0: 1e6 } }, e: { 1: anew },
    instance: { w0: record(5, "0.33"), w1: record(1, "0.32"), w2: record(1, "0.32"), w3: record(1, "0.32") },
    report: { w0: report(5, false), w1: report(1, true), w2: report(1, false) },
    q: { "a.0": open("w1"), "b.0": open("w2"), "c.0": open("w1") },
    s: { "worker/w0": worker("w0", 5), "worker/w1": worker("w1", 1), "worker/w2": worker("w2", 1) } } });
}"""


async def test_an_upgrade_under_way_is_told_with_what_drains_starts_and_runs_which_version(rig: UpRig) -> None:
    async with opened(rig, "/plans") as tab:
        await tab.evaluate(_UPGRADE)
        section = tab.locator("#view section:has(h2:text('Under way'))")
        await section.wait_for()
        done = await section.locator("p").inner_text()
        assert done == (
            "1 of 4 instances of m started anew within ten minutes: "
            "3 instances with vllm 0.32, 1 instance with vllm 0.33."
        )
        rows = [row.split() for row in await section.locator("tbody tr").all_inner_texts()]
        assert rows == [["w1", "m", "draining", "2"], ["w3", "m", "starting", "0"]]
        assert await tab.locator("#panel .verdict p").inner_text() == "2 of 4 instances are ready; 6 requests run."


async def give(tab: Any, rig: UpRig, done: str = "dialog .said[data-code='0']") -> None:
    """Confirms the order that is asked about, and waits until it is carried out."""
    await tab.locator("dialog input[name=key]").fill(rig.cluster_file()["operator_password"])
    await tab.locator("dialog button[type=submit]").click()
    await tab.wait_for_selector(done)


async def test_a_request_is_moved_and_a_role_a_count_and_the_clusters_file_are_changed(rig: UpRig) -> None:
    async with opened(rig) as tab, client(120) as http:
        running = asyncio.create_task(stream(http, rig, prompt_text(1), max_tokens=1900, ignore_eos=True))
        sequence, at = await until(tab, "(([id, row]) => row.st === 'r' && [id, row.inst])"
                                   "(Object.entries(millrace.cluster.q)[0] ?? ['', {}])")  # fmt: skip
        await tab.locator("#find input").fill(sequence.rpartition(".")[0])
        await tab.keyboard.press("Enter")
        await tab.locator("#view button[data-verb=migrate]").click()
        await give(tab, rig)
        await tab.locator("dialog button", has_text="Close").click()
        await until(tab, f"Object.values(millrace.cluster.e).some((e) => e.k === 'move' && e.a === '{at}')")

        await tab.keyboard.press("r")
        for role, label in (("decode", "Make it decode"), ("", "Make it do both")):
            await tab.locator(".card[data-name=worker-0]").click()
            await tab.locator("#panel button[data-verb=role]", has_text=label).click()
            await give(tab, rig)
            await tab.locator("dialog button", has_text="Close").click()
            await until(tab, f"document.querySelector('.card[data-name=worker-0] .role').textContent === '{role}'")

        await tab.keyboard.press("p")
        for label, count in (("One instance more", INSTANCES + 1), ("One less", INSTANCES)):
            await tab.locator("#view button[data-verb=scale]", has_text=label).click()
            await give(tab, rig)
            await tab.locator("dialog button", has_text="Close").click()
            await until(tab, f"Object.values(millrace.cluster.i).filter((i) => i.state === 'ready').length === {count}")

        await tab.locator("#view button[data-verb=apply]").click()
        await give(tab, rig, "dialog textarea")
        file = tab.locator("dialog textarea")
        await file.fill(await file.input_value() + "\n[settings.worker]\nmax_num_seqs = 24\n")
        await give(tab, rig)
        assert "drains and starts anew" in await tab.locator("dialog .said").inner_text()
        await give(tab, rig)
        await tab.locator("dialog button", has_text="Close").click()
        await tab.wait_for_selector(f"#view p:text('{INSTANCES} of {INSTANCES} instances')")
        assert await tab.evaluate("millrace.cluster.instance['worker-0'].max_sequences") == 24
        assert not (await running).error


async def test_states_and_rates_of_instances_follow_from_what_they_told(rig: UpRig) -> None:
    async with opened(rig) as tab:
        assert await tab.evaluate(_TOLD) == {
            "well": ["ready", 2, 20, 40, 0.5],
            "mute": ["suspect", 2, 0, 0, None],
            "killed": ["dead", 0, 0, 0, None],
            "new": ["starting", 0, 0, 0, None],
            "put aside": ["drained", 0, 0, 0, None],
        }
