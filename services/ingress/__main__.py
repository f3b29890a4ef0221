"""Run an ingress: ``python -m services.ingress --config FILE``. The HTTP side and the core share one event loop."""

from __future__ import annotations

import argparse
import asyncio
import importlib.util
import os
import random
import signal
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from pathlib import Path

from millrace.actor.cell import HostingTerms
from millrace.actor.clock import unix_ns
from millrace.actor.config import load_config
from millrace.actor.deps import actor_rng
from millrace.actor.errors import BusError, ConfigError
from millrace.actor.loop import run_to_end
from millrace.actor.runtime_nats import ActorHandle, NatsRuntime
from millrace.cascade.entry_files import ENTRY_FILE, read_entry
from millrace.cluster.model_parsers import HERMES, ModelParsers, model_parsers
from millrace.contracts.catalog import Role
from millrace.contracts.message import Body
from millrace.contracts.subjects import subject_token
from millrace.hosting.service import Joining, masked
from millrace.http.certificate import Certificate
from millrace.http.client_connection import ConnectionLimits
from millrace.http.server import HttpServer
from millrace.judging.confidence import ConfidenceModel
from millrace.judging.files import CONFIDENCE_FILE, JudgeUnreadable, read_judge
from millrace.membership.member import Member
from millrace.telemetry import Telemetry, open_telemetry

from services.ingress.actor import ACCEPTS
from services.ingress.adapters import AdapterDone
from services.ingress.api.models import ModelRegistry, ServedModel, Serving
from services.ingress.api.tokenizer import ModelTokenizer
from services.ingress.build import build
from services.ingress.cascade.entry import LearntEntry
from services.ingress.config import CascadeConfig, HttpConfig, IngressConfig, ModelConfig
from services.ingress.http.adapters import AdapterOrders
from services.ingress.http.app import App
from services.ingress.http.keys import ApiKeyStore
from services.ingress.http.metrics import HttpMetrics
from services.ingress.http.open_calls import OpenCalls, Tracer
from services.ingress.http.responses import Responses
from services.ingress.parsing.messages import ParsedModel
from services.ingress.parsing.process import IMAGES, IMAGES_S, ParserProcess
from services.ingress.state import IngressDeps
from services.ingress.tokens.detokenizer import TextModel

#: How often the key file is looked at, seconds.
KEYS_CHECK_S = 1.0
#: What open responses get to be read out after the core has ended, seconds.
LAST_WORDS_S = 2.0
#: Time in which clients hear on their connections that these end, before one that is replaced closes the idle, seconds.
GIVE_WAY_S = 2.0
#: Bytes that may wait for a slow reader before it is cut, and how long more than a quarter of them may, seconds.
READER_BUFFER_BYTES, READER_BEHIND_S = 1_000_000, 20.0
#: Open connections; further ones are closed at once.
CONNECTIONS_MAX = 20_000
#: Time that a client has to send a whole request, and that a connection may be open without one, seconds.
READ_S, IDLE_S = 30.0, 75.0


class IngressProcess:
    """Composition of one ingress process."""

    def __init__(self, config: IngressConfig, telemetry: Telemetry, companions: Sequence[Joining] = ()) -> None:
        """Load tokenizers and keys.

        Args:
            companions: Actors that this process hosts, and reaches without the bus.

        Raises:
            ConfigError: a model folder or the key file is wrong.
        """
        self._config = config
        self._telemetry = telemetry
        self._companions = companions
        self._incarnation = unix_ns()
        self._rng = random.Random(f"{config.name}/{self._incarnation}")
        self._handle: ActorHandle | None = None
        self._keys = ApiKeyStore(config.http.keys_file) if config.http.keys_file else None
        http = config.http
        self._certificate = Certificate(http.ssl_certfile, http.ssl_keyfile) if http.ssl_certfile else None
        tokenizers = {model.name: ModelTokenizer.load(model.path) for model in config.models}
        deps = IngressDeps(
            incarnation=self._incarnation,
            rng=actor_rng(config.name, self._incarnation),
            registry=telemetry.registry,
            models={m.name: _text_model(tokenizers[m.name], m) for m in config.models},
            entries=self._entries(),
        )
        self._actor = build(config, deps)
        parsers = {model.name: _parsers(model) for model in config.models}
        self._parsers = self._parser_process(parsers)
        self._images = self._image_process(tokenizers)
        served = {n: self._served(n, t, parsers[n]) for n, t in tokenizers.items()}
        self._models = ModelRegistry(
            served, self._serving, self._cascades, self._serving_now, self._actor.state.cluster.adapters
        )
        self._metrics = HttpMetrics(telemetry.registry)
        self._calls = OpenCalls(
            deliver=self._deliver,
            models=self._models,
            metrics=self._metrics,
            tracer=Tracer(
                random.Random(self._rng.getrandbits(64)),
                config.telemetry.trace_sample,
                config.telemetry.trace_first_per_s,
            ),
            now_s=time.time,
            on_bug=self._report_bug,
            on_span=lambda span: self._telemetry.span(config.name, span),
            keep_alive_s=config.http.keep_alive_s,
            parsers=self._parsers,
            images=self._images,
            image_hosts=config.http.image_hosts,
        )
        self._adapters = AdapterOrders(deliver=self._deliver, models=self._models, calls=self._calls)
        self._responses = Responses(
            calls=self._calls,
            models=self._models,
            owner=f"{subject_token(config.name)}.{self._incarnation}",
            now_s=time.time,
            stored=config.http.store_responses,
        )

    async def run(self) -> None:
        """Serve until SIGTERM or SIGINT and the drain after it.

        Raises:
            BusError: the bus cannot be reached, or refuses.
            OSError: the port is taken.
        """
        config = self._config
        runtime = NatsRuntime(
            bus=config.bus,
            name=config.name,
            telemetry=self._telemetry,
            registry=self._telemetry.registry,
            local=bool(self._companions),
        )
        await runtime.connect()
        if config.http.store_responses:
            self._responses.values = runtime.values
        for companion in self._companions:
            companion.join(runtime, self._telemetry)
        self.attach(runtime)
        server = self.server()
        port = await server.start(config.http.host, config.http.port, reuse_port=config.http.reuse_port)
        self._telemetry.logger.info("listening", host=config.http.host, port=port)
        loop = asyncio.get_running_loop()
        tasks = [loop.create_task(self._watch_files())]
        tasks += [loop.create_task(each.run()) for each in (self._parsers, self._images) if each is not None]

        parent = os.getppid()

        def leave() -> None:
            server.stop_listening()
            server.close_idle()
            # The kernel sends SIGTERM as well when the supervisor has died (services/supervisor/launcher.py).
            runtime.request_stop(orphaned=os.getppid() != parent)

        def replaced() -> None:
            server.close_idle()
            runtime.request_stop(replaced=True)

        def give_way() -> None:
            server.stop_listening()
            loop.call_later(GIVE_WAY_S, replaced)

        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, leave)
        loop.add_signal_handler(signal.SIGUSR1, give_way)
        try:
            reason = await runtime.run(signals=False)
            self._telemetry.logger.info("stopped", reason=reason)
        finally:
            for task in tasks:
                task.cancel()
            await server.stop(LAST_WORDS_S)
            for companion in self._companions:
                companion.leave()

    def attach(self, runtime: NatsRuntime) -> None:
        self._handle = runtime.add(
            self._actor,
            accepts=ACCEPTS,
            handlers={**self._calls.handlers(), AdapterDone: self._adapters.done},
            terms=HostingTerms(role=Role.INGRESS if self._companions else None),
        )

    def server(self) -> HttpServer:
        http = self._config.http
        app = App(
            models=self._models,
            calls=self._calls,
            responses=self._responses,
            adapters=self._adapters,
            keys=self._keys,
            metrics=self._metrics,
            cut_off=self._cut_off,
            origins=http.cors_origins,
        )
        tls = self._certificate.context if self._certificate is not None else None
        server = HttpServer(
            app.handle,
            app.refused,
            limits=_limits(http),
            connections_max=CONNECTIONS_MAX,
            tls=tls,
            look=self._calls.keep_alive,
        )
        self._metrics.connections = lambda: server.connections
        return server

    def _report_bug(self, error: BaseException, path: str) -> None:
        lines = traceback.format_exception(error)
        self._telemetry.logger.error("http_bug", path=path, error=repr(error), traceback="".join(lines))

    def _deliver(self, body: Body, traceparent: str) -> None:
        assert self._handle is not None
        self._handle.deliver(body, traceparent=traceparent)

    def _serving(self, model: str) -> Serving:
        cluster = self._actor.state.cluster
        wanted = self._actor.state.cascades.wants(model, seen=cluster.expects(model))
        why = self._cut_off() or ("" if cluster.usable(model) else cluster.why_unserved(model))
        return Serving(0 if why else cluster.usable(model), cluster.length_max(model) or 0, wanted, why)

    def _cut_off(self) -> str:
        state = self._actor.state
        return state.cut_off(unix_ns(), state.cluster.members.silence_ns)

    def _serving_now(self) -> list[Member]:
        return [known.member for known in self._actor.state.cluster.instances.values() if not known.dead]

    def _cascades(self) -> dict[str, list[str]]:
        served = self._actor.state.cascades.served
        return {name: [tier.model for tier in cascade.plan.tiers] for name, cascade in served.items()}

    def _entries(self) -> dict[str, LearntEntry]:
        """Choices of tiers by prompt; a file that does not fit is told, and those requests enter at the first tier."""
        found = {}
        for cascade in self._config.cascades:
            if cascade.entry != "learnt":
                continue
            try:
                found[cascade.name] = read_learnt_entry(cascade, self._config.models)
            except (ValueError, OSError) as error:
                self._telemetry.logger.error("entry_refused", cascade=cascade.name, reason=str(error))
        return found

    def _served(self, name: str, tokenizer: ModelTokenizer, parsers: ModelParsers) -> ServedModel:
        created = self._incarnation // 1_000_000_000
        return ServedModel(
            name=name, tokenizer=tokenizer, max_model_len=tokenizer.max_model_len, created=created, parsers=parsers
        )

    def _parser_process(self, parsers: Mapping[str, ModelParsers]) -> ParserProcess | None:
        paths = {model.name: model.path for model in self._config.models}
        models = [
            ParsedModel(name, paths[name], each.reasoning, each.tool_calls)
            for name, each in parsers.items()
            if each.needs_vllm
        ]
        return ParserProcess(models, self._telemetry.logger.warning) if models else None

    def _image_process(self, tokenizers: Mapping[str, ModelTokenizer]) -> ParserProcess | None:
        models = [ParsedModel(each.name, each.path) for each in self._config.models if tokenizers[each.name].images]
        if not models or importlib.util.find_spec("vllm") is None:
            return None
        return ParserProcess(models, self._telemetry.logger.warning, host=IMAGES, answer_s=IMAGES_S, lazy=True)

    async def _watch_files(self) -> None:
        """Takes keys and a certificate that changed."""
        while self._keys is not None or self._certificate is not None:
            await asyncio.sleep(KEYS_CHECK_S)
            if self._keys is not None and (fault := self._keys.refresh()):
                self._telemetry.logger.error("keys_unchanged", error=fault)
            if self._certificate is not None and (fault := self._certificate.refresh()):
                self._telemetry.logger.error("certificate_unchanged", error=fault)


def read_learnt_entry(cascade: CascadeConfig, models: Sequence[ModelConfig]) -> LearntEntry:
    """The choice of tiers by prompt of a configured cascade.

    Raises:
        ValueError: it was fitted to other models, or is unreadable.
        OSError: it cannot be read.
    """
    paths = {model.name: Path(model.path) for model in models}
    tiers = [tier.model for tier in cascade.tiers]
    if not tiers:
        raise ValueError("the configuration names no tiers")
    file = Path(cascade.entry_file) if cascade.entry_file else paths[tiers[-1]] / ENTRY_FILE
    return LearntEntry(read_entry(file, folders=[paths[tier] for tier in tiers]), tiers)


def _parsers(model: ModelConfig) -> ModelParsers:
    """Parsers of a model's output. Without vLLM here only what ingress reads itself: the rest of its output is text."""
    found = model_parsers(Path(model.path), reasoning=model.reasoning_parser, tool_calls=model.tool_call_parser)
    if not found.needs_vllm or importlib.util.find_spec("vllm") is not None:
        return found
    missing = f"{found.tool_calls or found.reasoning} is a parser of vLLM, which is not installed beside ingress"
    calls = found.tool_calls if found.tool_calls == HERMES else ""
    return ModelParsers("", calls, missing, missing)


def _text_model(tokenizer: ModelTokenizer, model: ModelConfig) -> TextModel:
    return TextModel(tokenizer.vocabulary, tokenizer.eos_token_ids, _judge(model))


def _judge(model: ModelConfig) -> ConfidenceModel | None:
    """The fitted judge of a model's answers: the configured file, else the one in its folder, if there is one.

    Raises:
        ConfigError: the file is unreadable, or was fitted to other weights than those in the folder.
    """
    folder = Path(model.path)
    file = Path(model.judge) if model.judge else folder / CONFIDENCE_FILE
    if not model.judge and not file.is_file():
        return None
    weights = any(folder.glob("*.safetensors"))
    try:
        return read_judge(file, model_folder=folder if weights else None)
    except (JudgeUnreadable, OSError) as error:
        raise ConfigError(f"judge of {model.name}: {error}") from None


def _limits(http: HttpConfig) -> ConnectionLimits:
    return ConnectionLimits(
        body_bytes_max=http.body_bytes_max,
        buffer_bytes_max=READER_BUFFER_BYTES,
        slow_reader_s=READER_BEHIND_S,
        read_s=READ_S,
        idle_s=IDLE_S,
    )


async def serve(config: IngressConfig, companions: Sequence[Joining] = ()) -> None:
    """Run one ingress with its telemetry, and the actors that its process hosts."""
    telemetry = open_telemetry("ingress", config.name, config.telemetry)
    try:
        telemetry.logger.info("starting", config=masked(config))
        shell = IngressProcess(config, telemetry, companions)
        telemetry.serve_metrics()
        await shell.run()
    finally:
        telemetry.close()


def main() -> int:
    """Parse the command line; returns the exit code. What went wrong at start is said on stderr."""
    parser = argparse.ArgumentParser(prog="python -m services.ingress")
    parser.add_argument("--config", required=True, help="TOML or JSON file, see services/ingress/config.py")
    parser.add_argument("--name", default="", help="in place of the file's")
    try:
        asked = parser.parse_args()
        run_to_end(serve(load_config(IngressConfig, asked.config, name=asked.name)))
    except (ConfigError, BusError, OSError) as error:
        sys.stderr.write(f"ingress: {error}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
