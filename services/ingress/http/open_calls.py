"""The OpenAI API over one ingress core: exchanges in, calls to the core, its effects back into responses.

Deliveries of one loop turn are written together: one write per stream and turn. With the bus keeping pace that is one
server-sent event and one write per bus message; when ingress is behind, several events share a write.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Coroutine, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import msgspec
from millrace.actor.effects import Effect, RecordSpan
from millrace.http.exchange import DisconnectReason, Exchange
from millrace.http.server import SWEEP_S
from millrace.telemetry.tracecontext import (
    TraceContext,
    child,
    format_traceparent,
    new_trace,
    parse_traceparent,
    sample,
)

from services.ingress.api.answer_forms import Keep, hand_on
from services.ingress.api.cascade_reports import answering_headers
from services.ingress.api.cascade_requests import build_any_call
from services.ingress.api.dialects import error_body
from services.ingress.api.errors import SERVER, ApiError, bad_value, refusal, unsupported
from services.ingress.api.images import images_of
from services.ingress.api.messages import text_of
from services.ingress.api.models import ModelRegistry
from services.ingress.api.output_readers import JsonCallReader, OutputReader, PromptOnlyReader
from services.ingress.api.parsed_requests import Caller, ParsedRequest, distinct, refuse_hopeless
from services.ingress.api.parser_requests import parser_request
from services.ingress.api.pooling_api.parsing import PooledCall
from services.ingress.api.requests import ChatRequest, StreamOptions
from services.ingress.api.responses import ChatResponse, CollectedResponse, CompletionResponse
from services.ingress.api.streams import (
    COMMENT,
    ChatStream,
    CompletionStream,
    EchoedPrompt,
    EventStream,
    ResponseHead,
    error_event,
)
from services.ingress.api.tokenizer import LOOP_CHARACTERS_MAX
from services.ingress.api.tools import ToolMode
from services.ingress.calls.messages import (
    AcceptCall,
    Call,
    CallAbandoned,
    CallKind,
    CallSubmitted,
    ChoiceDelta,
    CompleteCall,
    DeliverDeltas,
    FailCall,
    RefuseCall,
)
from services.ingress.http.image_fetch import fetched
from services.ingress.http.keys import KeyHolder
from services.ingress.http.metrics import HttpMetrics
from services.ingress.parsing.messages import ExpandImages, ImagesExpanded, OpenParser, ParserOpened
from services.ingress.parsing.process import ImageQuestion, ParserProcess, ProcessReader
from services.ingress.parsing.reading_times import ReadingTimes
from services.ingress.vllm_metrics import load_report

#: Requests whose images wait to be read: 49 MB of files.
IMAGES_WAITING_MAX = 64

_SANE_ID = re.compile(rb"[A-Za-z0-9._:/+=-]{1,128}")


class RoutedRequest(NamedTuple):
    """A request as it came; ``path`` is the route that serves it."""

    exchange: Exchange
    path: str
    holder: KeyHolder


#: Token ids of each variant's prompts.
Prompts = list[list[list[int]]]

#: Told the request, which may have got its images by then, and the token ids of each variant's prompts.
Tokenised = Callable[[ParsedRequest, Prompts], None]


@dataclass(slots=True, eq=False)
class ResponseView:
    """One call as the client sees it. ``stream`` or ``collected`` is set, as the client asked.

    Attributes:
        keep: Gets its last bytes, and what hands them to the client.
        reader: Tells reasoning and calls apart from text; None where all is text.
        reading: Of that reader, where the call is traced.
        shape: Of a cascade's call until it is known which model answers: sets one of the two for that model.
        opens_early: Whether its stream may begin with comments: a cascade's, which may be undecided for long.
        ending: Ends it; set while its reader still reads what came before.
        reasoning_tokens: So far; None where nothing tells them.
        written: Whether anything was written since the last look of ``keep_alive``.
        quiet_s: Time of the first look after the last write.
    """

    exchange: Exchange
    path: str
    headers: list[tuple[bytes, bytes]]
    opens_early: bool
    stream: EventStream | None = None
    collected: CollectedResponse | None = None
    keep: Keep = hand_on
    reader: OutputReader | None = None
    reading: ReadingTimes | None = None
    shape: Callable[[str], None] | None = None
    pending: list[bytes] = field(default_factory=list)
    ending: Callable[[], None] | None = None
    reasoning_tokens: int | None = None
    dirty: bool = False
    written: bool = True
    quiet_s: float = 0.0


class Tracer:
    """Source of trace ids.

    Attributes:
        rng: Source of request and trace ids.
        share: Share of requests traced where the client does not say.
        first_per_s: So many of each second are traced whatever the share.
    """

    __slots__ = ("_second", "_seen", "first_per_s", "rng", "share")

    def __init__(self, rng: random.Random, share: float, first_per_s: int = 0) -> None:
        self.rng = rng
        self.share = share
        self.first_per_s = first_per_s
        self._second = self._seen = 0

    def begin(self, now_s: float) -> TraceContext:
        """The root context of a request of that time; ``now_s`` never goes back by more than the clock does."""
        second = int(now_s)
        if second != self._second:
            self._second, self._seen = second, 0
        self._seen += 1
        return new_trace(self.rng, sampled=self._seen <= self.first_per_s or sample(self.rng, self.share))


class OpenCalls:
    """Open calls: starts them in the core, and carries out what it says. All on one event loop."""

    def __init__(
        self,
        *,
        deliver: Callable[[CallSubmitted | CallAbandoned, str], None],
        models: ModelRegistry,
        metrics: HttpMetrics,
        tracer: Tracer,
        now_s: Callable[[], float],
        on_bug: Callable[[BaseException, str], None],
        on_span: Callable[[RecordSpan], None],
        keep_alive_s: float,
        parsers: ParserProcess | None = None,
        images: ParserProcess | None = None,
        image_hosts: Sequence[str] = (),
    ) -> None:
        """Args:
        deliver: Gives the core a body with a trace context.
        now_s: Unix time, for ``created``.
        on_bug: Told of an exception that should not have been, with the path.
        on_span: Records a span.
        keep_alive_s: Longest time without a byte in a stream.
        parsers: None where no model's output needs one.
        images: Expands prompts with images; None where no model takes them.
        image_hosts: From these images are fetched by their URLs.
        """
        self._parsers = parsers
        self._images = images
        self._image_hosts = frozenset(image_hosts)
        self._deliver = deliver
        self._models = models
        self._metrics = metrics
        self._tracer = tracer
        self._now_s = now_s
        self._on_bug = on_bug
        self._on_span = on_span
        self._keep_alive_s = keep_alive_s
        self._prefix = f"{tracer.rng.getrandbits(40):010x}-"
        self._count = 0
        self._views: dict[str, ResponseView] = {}
        self._dirty: list[ResponseView] = []
        self._tasks: set[asyncio.Task[None]] = set()

    def __len__(self) -> int:
        return len(self._views)

    def handlers(self) -> Mapping[type[Effect], Callable[[Any], None]]:
        """Handlers by which the runtime carries out the core's own effects."""
        return {
            AcceptCall: self._accept,
            DeliverDeltas: self._deltas,
            CompleteCall: self._complete,
            RefuseCall: self._refuse,
            FailCall: self._fail,
        }

    def next_id(self) -> str:
        """A request id: unique over processes by its random beginning."""
        self._count += 1
        return f"{self._prefix}{self._count:x}"

    def submit(self, exchange: Exchange, path: str, parsed: ParsedRequest, holder: KeyHolder) -> None:
        """Tokenize and start a call.

        Raises:
            ApiError: what the client has to change (where tokenising needed no thread).
        """
        refuse_hopeless(parsed, self._models.limit)
        self.tokenise(exchange, path, parsed, partial(self._start, RoutedRequest(exchange, path, holder)))

    def submit_pooled(self, exchange: Exchange, path: str, pooled: PooledCall, holder: KeyHolder) -> None:
        """Tokenize and start a call whose output is pooled.

        Raises:
            ApiError: what the client has to change (where tokenising needed no thread).
        """

        def start(parsed: ParsedRequest) -> None:
            self._start(RoutedRequest(exchange, path, holder), parsed, [parsed.token_ids or []])

        async def later() -> None:
            parsed = await asyncio.to_thread(pooled.tokenised)
            if not exchange.closed:
                start(parsed)

        if pooled.characters <= LOOP_CHARACTERS_MAX:
            start(pooled.tokenised())
        else:
            self.spawn(path, later(), exchange)

    def tokenise(self, exchange: Exchange, path: str, parsed: ParsedRequest, then: Tokenised) -> None:
        """Hand on the token ids of each variant's prompts, later where that needs a thread or the image process.

        Raises:
            ApiError: what ``then`` raises (where tokenising needed neither).
        """
        if parsed.token_ids is not None:
            then(parsed, [parsed.token_ids] * len(parsed.variants))
        elif parsed.image_files or _characters(parsed) > LOOP_CHARACTERS_MAX:
            self.spawn(path, self._tokenise_later(exchange, parsed, then), exchange)
        else:
            ids = {
                each.key: [each.model.tokenizer.encode(text, special=each.special) for text in each.texts or []]
                for each in distinct(parsed)
            }
            then(parsed, [ids[each.key] for each in parsed.variants])

    async def _tokenise_later(self, exchange: Exchange, parsed: ParsedRequest, then: Tokenised) -> None:
        ids = {}
        for each in distinct(parsed):
            encode = each.model.tokenizer.encode_off_loop
            ids[each.key] = [await encode(text, special=each.special) for text in each.texts or []]
        prompts = [ids[each.key] for each in parsed.variants]
        if parsed.image_files:
            parsed, prompts = await self._expanded(parsed, prompts)
        if not exchange.closed:
            then(parsed, prompts)

    async def _expanded(self, parsed: ParsedRequest, prompts: Prompts) -> tuple[ParsedRequest, Prompts]:
        """The request with its images, and its prompt with as many tokens for each as it takes.

        Raises:
            ApiError: 400 for an image that cannot be used, 503 where the image process does not answer.
        """
        if self._images is None or parsed.members:
            why = "a cascade takes none" if parsed.members else "vLLM is not installed beside ingress"
            raise unsupported("messages", f"Images are not supported: {why}.")
        files = [
            await asyncio.to_thread(fetched, file, self._image_hosts) if isinstance(file, str) else file
            for file in parsed.image_files
        ]
        images = images_of(files, prompts[0][0])
        if len(self._images) >= IMAGES_WAITING_MAX:
            raise ApiError(503, "too many requests with images wait", kind=SERVER, code="overloaded")
        told = asyncio.get_running_loop().create_future()
        question = ExpandImages(self.next_id(), parsed.model.name, images.prompt, files)
        ImageQuestion(self._images, question, told.set_result)
        answer: ImagesExpanded | None = await told
        if answer is None:
            raise ApiError(503, "the process that reads images does not answer", kind=SERVER, code="no_images")
        if answer.refusal:
            raise bad_value("messages", f"Images are refused: {answer.refusal}", "invalid_image")
        return msgspec.structs.replace(parsed, images=images), [[answer.prompt]]

    def spawn(self, path: str, work: Coroutine[Any, Any, None], exchange: Exchange | None = None) -> None:
        """Carry out what takes a while; its ApiError, or a bug, is the answer of a request that waits for one."""

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            error = None if task.cancelled() else task.exception()
            gone = exchange is None or exchange.closed
            if error is None or (gone and isinstance(error, ApiError)):
                return
            if exchange is None or gone or exchange.streaming:  # a stream that began takes no answer
                self._on_bug(error, path)
            else:
                self.answer_fault(exchange, path, error)

        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(ended)

    def _start(self, routed: RoutedRequest, parsed: ParsedRequest, prompts: Prompts) -> None:
        request = self.next_id()
        if parsed.tools.mode is ToolMode.PARSED and parsed.opened is None:
            self._open_parser(routed, parsed, request, prompts)
        else:
            self._begin(routed, parsed, request, prompts, None)

    def _open_parser(self, routed: RoutedRequest, parsed: ParsedRequest, request: str, prompts: Prompts) -> None:
        """Ask the parser of the call's output what it needs of the engine, and begin then."""
        assert isinstance(parsed.request, ChatRequest)
        assert self._parsers is not None, "no model has parsers without it"

        def opened(answer: ParserOpened | None) -> None:
            if routed.exchange.closed:
                reader.close()
                return
            try:
                if answer is None:
                    raise ApiError(
                        503, "the parser of this model's output does not answer", kind=SERVER, code="no_parser"
                    )
                if answer.refusal:
                    raise bad_value("tools", answer.refusal)
                self._begin(routed, msgspec.structs.replace(parsed, opened=answer), request, prompts, reader)
            except ApiError as error:
                reader.close()
                self.answer_error(routed.exchange, routed.path, error)

        question = OpenParser(
            request,
            parsed.model.name,
            parser_request(parsed.request),
            prompts[0],
            parsed.request.n or 1,
            not parsed.request.stream,
        )
        reader = ProcessReader(self._parsers, question, opened)
        reader.named = bool(parsed.tools.function)
        reader.hidden = parsed.request.include_reasoning is False

    def _begin(
        self, routed: RoutedRequest, parsed: ParsedRequest, request: str, prompts: Prompts, reader: OutputReader | None
    ) -> None:
        exchange, path, holder = routed
        trace, parent = self._trace(exchange)
        caller = Caller(
            request=request,
            key=holder.name,
            limits=holder.limits,
            traceparent=format_traceparent(trace),
            parent_span_id=parent,
            client_id=client_id(exchange).decode(),
        )
        call = build_any_call(parsed, prompts, caller, self._models.limit)
        headers = [(b"x-request-id", client_id(exchange) or request.encode())]
        if form := exchange.request.headers.get(b"endpoint-load-metrics-format", b""):
            report = load_report(self._models.members_now(), parsed.model.name, form.decode("latin-1"))
            headers += [(b"endpoint-load-metrics", report)] if report else []
        view = ResponseView(exchange, path, headers, opens_early=bool(parsed.members) and call.stream)
        view.reader = reader
        if reader is not None and trace.sampled:
            view.reading = ReadingTimes(trace)
        if parsed.members:
            view.shape = lambda model: self._shape_member(view, parsed, call, model)
        else:
            self._shape(view, parsed, call)
        self._views[request] = view
        exchange.on_gone = lambda reason: self._abandon(request, reason)
        self._deliver(CallSubmitted(call=call), call.traceparent)

    def _shape_member(self, view: ResponseView, parsed: ParsedRequest, call: Call, model: str) -> None:
        """Choose it for the model of a cascade that answers."""
        view.shape = None
        member = next(member for member in parsed.members if member.model.name == model)
        self._shape(view, member, next(own for own in call.members if own.model == model))

    def _shape(self, view: ResponseView, parsed: ParsedRequest, call: Call) -> None:
        """Choose what turns deltas into bytes."""
        chat = parsed.kind is CallKind.CHAT
        choices = len(call.prompts) * call.n
        prefix = parsed.form.prefix if parsed.form is not None else "chatcmpl-" if chat else "cmpl-"
        prompt_tokens = sum(map(len, call.prompts))
        prompts = call.prompts if parsed.request.return_token_ids else None
        identity = f"{prefix}{call.request}"
        head = ResponseHead(identity, int(self._now_s()), call.shown, choices, prompt_tokens, prompts)
        echo = self._echo(parsed, call)
        options = parsed.request.stream_options or StreamOptions()
        usage = bool(options.include_usage)
        continuous = usage and bool(options.continuous_usage_stats)  # as vLLM has it: with the final ones alone
        if view.reader is None and parsed.tools.mode is not ToolMode.NONE:
            view.reader = JsonCallReader(parsed.tools, choices)
        elif parsed.echo and parsed.request.max_tokens == 0:
            view.reader = PromptOnlyReader()
        if parsed.form is not None:
            view.keep = parsed.form.keep
            if call.stream:
                assert parsed.form.stream is not None
                view.stream = parsed.form.stream(head)
            else:
                view.collected = parsed.form.collected(head)
        elif not call.stream:
            view.collected = ChatResponse(head, parsed.tools, echo) if chat else CompletionResponse(head, echo)
        elif chat:
            view.stream = ChatStream(head, include_usage=usage, continuous=continuous, echo=echo)
        else:
            view.stream = CompletionStream(head, include_usage=usage, continuous=continuous, echo=echo)

    def _echo(self, parsed: ParsedRequest, call: Call) -> list[EchoedPrompt]:
        if not parsed.echo:
            return []
        if isinstance(parsed.request, ChatRequest):
            return [EchoedPrompt(text_of(parsed.request.messages[-1]), "")]
        tokenizer, texts = parsed.model.tokenizer, parsed.texts
        if texts is None or parsed.request.truncate_prompt_tokens is not None:
            texts = [tokenizer.decode(ids) for ids in call.prompts]
        name = "token_id:{}".format if call.tokens_as_ids else tokenizer.vocabulary.piece_text
        return [EchoedPrompt(text, name(ids[0])) for text, ids in zip(texts, call.prompts, strict=True)]

    def _trace(self, exchange: Exchange) -> tuple[TraceContext, str]:
        """The root span's context, and the client's span id."""
        tracer = self._tracer
        header = exchange.request.headers.get(b"traceparent")
        theirs = parse_traceparent(header.decode("latin-1")) if header else None
        if theirs is not None:
            return child(theirs, tracer.rng), theirs.span_id
        return tracer.begin(self._now_s()), ""

    # Effects of the core. One for a call that is not here any more comes after its client left: nothing to do.

    def _accept(self, effect: AcceptCall) -> None:
        view = self._views.get(effect.request)
        if view is None:
            return
        if effect.answering is not None and view.shape is not None:
            view.shape(effect.answering.model)
            view.headers = view.headers + answering_headers(effect.answering)
        if view.stream is not None:
            self._open_stream(view, view.stream.opening())

    def _open_stream(self, view: ResponseView, events: bytes) -> None:
        """Send the first events, after the head where comments have not opened the stream before."""
        view.written = True
        if view.exchange.streaming:
            view.exchange.write(events)
            return
        self._metrics.responses.add(view.path, "200")
        view.exchange.start_stream(view.headers, events)

    def _deltas(self, effect: DeliverDeltas) -> None:
        view = self._views.get(effect.request)
        if view is None:
            return
        if view.reader is None:
            self._show(view, effect)
        else:
            asked_ns = self._now_ns()
            view.reader.read(
                effect.deltas, lambda deltas, reasoning: self._show_read(view, effect, asked_ns, deltas, reasoning)
            )

    def _now_ns(self) -> int:
        return int(self._now_s() * 1e9)

    def _show_read(
        self,
        view: ResponseView,
        effect: DeliverDeltas,
        asked_ns: int,
        deltas: list[ChoiceDelta],
        reasoning: int | None,
    ) -> None:
        """Show what a reader made of a delivery, and then the end, if it waits for this."""
        if view.reading is not None:
            view.reading.on_read(asked_ns, self._now_ns(), deltas)
        view.reasoning_tokens = reasoning
        usage = msgspec.structs.replace(effect.usage, reasoning_tokens=reasoning)
        self._show(view, msgspec.structs.replace(effect, deltas=deltas, usage=usage))
        if view.ending is not None:
            view.ending()

    def _show(self, view: ResponseView, effect: DeliverDeltas) -> None:
        if view.stream is None:
            assert view.collected is not None
            view.collected.deltas(effect.deltas)
            return
        if effect.report is not None:
            view.stream.tell(effect.report)
        events = view.stream.deltas(effect.deltas, effect.usage)
        if events:
            view.pending.append(events)
            if not view.dirty:
                view.dirty = True
                if not self._dirty:
                    asyncio.get_running_loop().call_soon(self._flush)
                self._dirty.append(view)

    def _flush(self) -> None:
        dirty, self._dirty = self._dirty, []
        for view in dirty:
            view.dirty = False
            view.written = True
            if view.pending:
                events = view.pending[0] if len(view.pending) == 1 else b"".join(view.pending)
                view.pending.clear()
                view.exchange.write(events)

    def _complete(self, effect: CompleteCall) -> None:
        view = self._views.get(effect.request)
        if view is None:
            return
        if view.reader is not None and view.reader.busy:
            view.ending = lambda: self._complete(effect)
            return
        self._drop(effect.request)
        usage = msgspec.structs.replace(effect.usage, reasoning_tokens=view.reasoning_tokens)
        if view.stream is not None:
            view.pending.append(view.stream.closing(usage))
            self._end_stream(view)
            return
        assert view.collected is not None
        self._metrics.responses.add(view.path, "200")
        body = view.collected.body(usage, effect.report)
        view.keep(body, lambda body: view.exchange.respond(200, body, headers=view.headers))

    def _end_stream(self, view: ResponseView) -> None:
        view.keep(b"".join(view.pending), view.exchange.end)
        view.pending.clear()

    def _drop(self, request: str) -> ResponseView | None:
        view = self._views.pop(request, None)
        if view is not None and view.reader is not None:
            view.reader.close()
        if view is not None and view.reading is not None:
            for span in view.reading.spans(request, view.reasoning_tokens, self._tracer.rng):
                self._on_span(span)
        return view

    def _refuse(self, effect: RefuseCall) -> None:
        error = refusal(effect.kind, effect.detail, effect.param, effect.retry_after_s)
        self._end_with(effect.request, error)

    def _fail(self, effect: FailCall) -> None:
        self._end_with(effect.request, refusal(effect.kind, effect.detail, effect.param))

    def _end_with(self, request: str, error: ApiError) -> None:
        view = self._views.get(request)
        if view is None:
            return
        if view.reader is not None and view.reader.busy:
            view.ending = lambda: self._end_with(request, error)
            return
        self._drop(request)
        if view.exchange.streaming:
            view.pending.append(error_event(error) if view.stream is None else view.stream.failed(error))
            self._end_stream(view)
        else:
            self.answer_error(view.exchange, view.path, error, view.headers)

    def keep_alive(self, now_s: float) -> None:
        """Send a comment in each stream that would else have nothing for ``keep_alive_s``. Called every SWEEP_S.

        A write is noticed at the next look, and the look after the last in time comes too late: hence two looks less.
        A call that no instance has taken yet is not opened: it waits for a bounded time, and its refusal has a status.
        """
        for view in self._views.values():
            if view.written:
                view.written, view.quiet_s = False, now_s
            elif now_s - view.quiet_s >= self._keep_alive_s - 2 * SWEEP_S and (
                view.exchange.streaming or view.opens_early
            ):
                self._open_stream(view, COMMENT)

    def _abandon(self, request: str, reason: DisconnectReason) -> None:
        if self._drop(request) is None:
            return
        self._metrics.gone.add(reason.value)
        self._deliver(CallAbandoned(request=request, reason=reason.value), "")

    def answer(
        self, exchange: Exchange, path: str, body: bytes, status: int = 200, kind: bytes = b"application/json"
    ) -> None:
        """Answer a request that is no call."""
        self._metrics.responses.add(path, str(status))
        headers = [(b"x-request-id", client_id(exchange) or self.next_id().encode())]
        exchange.respond(status, body, kind, headers=headers)

    def answer_fault(self, exchange: Exchange, path: str, error: BaseException) -> None:
        """Answer with an ApiError, or with one in place of a bug, which is reported."""
        if not isinstance(error, ApiError):
            self._on_bug(error, exchange.request.path)
            error = ApiError(500, "Internal error.", kind=SERVER)
        self.answer_error(exchange, path, error)

    def answer_error(
        self, exchange: Exchange, path: str, error: ApiError, headers: list[tuple[bytes, bytes]] | None = None
    ) -> None:
        extra = list(headers) if headers else [(b"x-request-id", client_id(exchange) or self.next_id().encode())]
        extra += error.headers
        self._metrics.responses.add(path, str(error.status))
        exchange.respond(error.status, error_body(path, error), headers=extra)


def _characters(parsed: ParsedRequest) -> int:
    return sum(len(text) for each in distinct(parsed) for text in each.texts or [])


def client_id(exchange: Exchange) -> bytes:
    """The client's own request id where it is sane, else nothing."""
    theirs = exchange.request.headers.get(b"x-request-id", b"")
    return theirs if theirs and _SANE_ID.fullmatch(theirs) else b""
