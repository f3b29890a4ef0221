"""Alert rules under promtool, and every dashboard query against the Prometheus that scrapes the deployment."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import math
import shutil
import urllib.error
import urllib.parse
import urllib.request
from typing import Any

import nats

from compose.check.calls import COMPOSE, Failed, call, wait

#: Grafana's own would be shorter; the check wants what happened in the last minutes in view.
RATE_INTERVAL = "30m"
#: What need not happen in the check: brokers that move for balance, and moves that fail (what cannot be done is refused
#: before it is one).
NEVER = ("millrace_broker_", 'outcome!="moved"')


def promtool() -> str:
    """Checks configuration and rules, and runs the rules' tests; returns what promtool says of them.

    Raises:
        Failed: promtool is missing or finds something wrong.
    """
    tool = shutil.which("promtool")
    if tool is None:
        raise Failed("promtool is missing: apt-get install prometheus")
    folder = COMPOSE / "prometheus"
    call([tool, "check", "config", folder / "prometheus.yaml"])
    found = call([tool, "check", "rules", folder / "alerts.yaml"])
    call([tool, "test", "rules", folder / "alerts_test.yaml"])
    return next(line.strip() for line in found.splitlines() if "rules found" in line)


async def send_junk(server: str, password: str, subject: str) -> None:
    """Publishes bytes that are no message, as the user `ingress`: the receiver counts and refuses them."""
    client = await nats.connect(server, user="ingress", password=password, inbox_prefix=b"_INBOX.ingress")
    try:
        await client.publish(subject, b"\xc1 no message", reply="_INBOX.ingress.junk")
        await client.flush()
    finally:
        await client.close()


def refuse_junk(server: str, password: str, subject: str) -> None:
    """The same, from code without a loop."""
    asyncio.run(send_junk(server, password, subject))


def counter_of(page_url: str, name: str) -> float:
    """Sum of a counter's samples on a service's own metrics page; a name with all its labels is one sample."""
    with urllib.request.urlopen(page_url, timeout=10) as answer:
        lines = answer.read().decode().splitlines()
    return sum(float(line.rsplit(" ", 1)[1]) for line in lines if line.startswith((f"{name} ", f"{name}{{")))


class Prometheus:
    """A Prometheus server by its URL."""

    def __init__(self, url: str) -> None:
        self._url = url

    def query(self, expression: str) -> list[float]:
        """Values of an instant query.

        Raises:
            Failed: Prometheus does not accept the query.
        """
        found = self._get(f"query?query={urllib.parse.quote(expression)}")
        return [float(sample["value"][1]) for sample in found.get("result", [])]

    def rules_in_error(self) -> list[str]:
        """Names of alert rules whose evaluation fails; a line that says so where none is loaded."""
        rules = [rule for group in self._get("rules").get("groups", []) for rule in group["rules"]]
        return [rule["name"] for rule in rules if rule["health"] != "ok"] if rules else ["no rule is loaded"]

    def _get(self, what: str) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(f"{self._url}/api/v1/{what}", timeout=10) as answer:
                data: dict[str, Any] = json.load(answer)["data"]
                return data
        except urllib.error.HTTPError as error:
            raise Failed(f"{what}: {error.read().decode()}") from None
        except OSError:
            return {}


def panels(prometheus: Prometheus) -> int:
    """Runs every panel's query until it has data, but for what never happens here; returns how many there are.

    Raises:
        Failed: one has none: no series, or nothing but NaN.
    """
    asked = [query for query in _dashboard_queries() if not any(name in query for name in NEVER)]
    queries = [query.replace("$__rate_interval", RATE_INTERVAL) for query in asked]

    def empty() -> list[str]:
        return [query for query in queries if not any(math.isfinite(value) for value in prometheus.query(query))]

    try:
        wait("panels", 60, lambda: not empty())
    except Failed:
        raise Failed("panels without data: " + "; ".join(empty())) from None
    return len(queries)


def _dashboard_queries() -> list[str]:
    spec = importlib.util.spec_from_file_location("dashboard", COMPOSE / "grafana" / "dashboard.py")
    if spec is None or spec.loader is None:
        raise Failed("compose/grafana/dashboard.py cannot be read")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    queries: list[str] = module.queries()
    return queries
