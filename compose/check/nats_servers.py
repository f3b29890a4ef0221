"""Three NATS servers under load: each is killed and restarted in turn, then two are away at once."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

from compose.check.calls import Failed, call, say, wait
from compose.check.deployment import Container, Deployment, is_healthy
from compose.check.operator import Operator
from compose.check.streams import Api, Streams, ready

HOSTS = ("nats", "nats-1", "nats-2")
OTHERS = ("tagger", "predictor", "coordinator", "ingress", "worker-0", "worker-1", "migrator-0", "migrator-1")
#: Modelled engines start in seconds, and what is tried here is not in them. A stream takes five seconds.
SETTINGS = ("nats.servers=3", "models.0.groups.0.engine=modelled", "models.0.groups.0.processes=2")
OPTIONS = ("--no-traces", *(word for setting in SETTINGS for word in ("--set", setting)))
START_SECONDS_MAX = 120
#: Of a request that only asks whether new ones are served.
FEW_TOKENS = 20


class Load:
    """Streams of every prompt, all at once, again and again until it is ended.

    Attributes:
        rounds: How often all of them have ended.
        gap_s: Longest pause that any client saw.
    """

    def __init__(self, api: Api) -> None:
        self.rounds = 0
        self.gap_s = 0.0
        self._api = api
        self._undisturbed = Streams(api).texts()
        self._ending = False
        self._error: Failed | None = None
        self._thread = threading.Thread(target=self._run)

    @contextlib.contextmanager
    def offered(self) -> Iterator[None]:
        """While this lasts.

        Raises:
            Failed: a stream did, or its text changed.
        """
        self._thread.start()
        try:
            yield
        finally:
            self._ending = True
            self._thread.join()
        self._raise()

    def wait_for_a_new_round(self) -> None:
        """Until streams that begin from now on have ended."""
        wanted = self.rounds + 2
        wait("streams", START_SECONDS_MAX, lambda: self.rounds >= wanted or self._error)
        self._raise()

    def _run(self) -> None:
        try:
            while not self._ending:
                streams = Streams(self._api)
                if (texts := streams.texts()) != self._undisturbed:
                    raise Failed(f"a text changed:\n{self._undisturbed!r}\n{texts!r}")
                self.rounds, self.gap_s = self.rounds + 1, max(self.gap_s, streams.gap_s)
        except Failed as error:
            self._error = error

    def _raise(self) -> None:
        if self._error is not None:
            raise self._error


def try_three(deployment: Deployment, api: Api, port: int) -> None:
    """Brings the deployment up and breaks its NATS servers.

    Args:
        deployment: Prepared with OPTIONS.
        api: Its API.
        port: Of one of the servers.

    Raises:
        Failed: a stream failed or changed, a new request was not served, or something did not come back.
    """
    deployment.compose("up", "-d", "--no-build", *HOSTS, *OTHERS)
    took_s = wait("the API", START_SECONDS_MAX, lambda: ready(api))
    say(f"three NATS servers and two modelled engines: the API is ready {took_s:.0f} s after `up`")
    load = Load(api)
    with load.offered():
        for host in HOSTS:
            container = Container(deployment, host)
            container.crash()
            away_s = wait(f"{host} to be back", START_SECONDS_MAX, container.is_back)
            say(f"{host} killed under load: back and healthy after {away_s:.1f} s")
        for host in HOSTS:
            call(["docker", "restart", _container(deployment, host)])
            _wait_healthy(deployment, host)
        say("each NATS server restarted, one after the other")
        lost = [_container(deployment, host) for host in HOSTS[:2]]
        call(["docker", "kill", *lost])
        Streams(api, FEW_TOKENS).texts()
        load.wait_for_a_new_round()
        call(["docker", "start", *lost])
        _wait_healthy(deployment, *HOSTS)
        say("two NATS servers lost at once, new requests served by way of the third; both are back")
        load.wait_for_a_new_round()
    say(f"{4 * load.rounds} streams meanwhile: none failed, texts identical, longest pause {load.gap_s:.2f} s")
    _wait_healthy(deployment, *HOSTS, *OTHERS)
    operator = Operator(deployment, port)

    def planned() -> bool:
        with contextlib.suppress(Failed):  # the plan may have changed since the command read it
            return bool(operator.run("role", "worker-1", "decode"))
        return False

    wait("the buckets to take a plan", 60, planned)
    if "2 of 2 ready" not in (told := operator.run("status")):
        raise Failed(f"millrace status: {told}")
    say("millrace status: 2 of 2 ready; a new plan is taken")


def _wait_healthy(deployment: Deployment, *services: str) -> None:
    def all_healthy() -> bool:
        return all(is_healthy(deployment.inspect(service)) for service in services)

    wait(f"{', '.join(services)} to be healthy", START_SECONDS_MAX, all_healthy)


def _container(deployment: Deployment, service: str) -> str:
    return str(deployment.inspect(service)["Id"])
