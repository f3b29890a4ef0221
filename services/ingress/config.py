"""Ingress's configuration. Durations are seconds here and nanoseconds in the code."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from millrace.actor.config import ProcessConfig
from millrace.actor.config_marks import CONSTANT, WIRED
from millrace.actor.errors import ConfigError
from millrace.contracts.bounds import Count, PortOrNone, Share, Span, Wait
from millrace.membership.config import MembershipConfig
from millrace.policies.dispatch import DISPATCH_POLICIES, DispatchPolicy, QueryParameters


class HttpConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The HTTP side.

    Attributes:
        host: Address that it binds.
        port: TCP port; 0 for a free one.
        url: How others reach it, told in its presence; empty for ``http(s)://<host>:<port>``.
        reuse_port: Bind with SO_REUSEPORT: several ingress processes share one port.
        body_bytes_max: Largest request body; a 128 Ki-token prompt is under 1 MB.
        keep_alive_s: Longest time without a byte in a stream: then it gets a comment, which clients skip.
        ssl_certfile: Certificate with its chain (PEM): the API speaks HTTPS then. Taken anew when the file changes.
        ssl_keyfile: Its key (PEM), without a passphrase.
        keys_file: File of API keys (hashed); empty for no keys.
        cors_origins: Origins of web pages that may call the API from a browser, such as ``https://chat.example``; ``*``
            for any.
        image_hosts: Hosts from which images in messages are fetched by their URLs. Ingress asks them from within your
            network: name no others.
        store_responses: Responses of ``/v1/responses`` may be stored; where false, none is, whatever a client asks.
    """

    host: Annotated[str, WIRED] = "127.0.0.1"
    port: Annotated[PortOrNone, WIRED] = 8000
    url: Annotated[str, WIRED] = ""
    reuse_port: Annotated[bool, WIRED] = False
    body_bytes_max: Count = 4_000_000
    keep_alive_s: Annotated[float, msgspec.Meta(ge=1)] = 5.0
    ssl_certfile: Annotated[str, WIRED] = ""
    ssl_keyfile: Annotated[str, WIRED] = ""
    keys_file: Annotated[str, WIRED] = ""
    cors_origins: list[str] = []
    image_hosts: list[str] = []
    store_responses: bool = True

    @property
    def address(self) -> str:
        scheme = "https" if self.ssl_certfile else "http"
        return self.url or f"{scheme}://{self.host}:{self.port}"


class ModelConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A model that ingress can tokenise for.

    Attributes:
        name: As clients and instances call it.
        path: Folder with ``config.json``, ``tokenizer.json``, ``tokenizer_config.json`` and the chat template.
        judge: File of a confidence judge that was fitted to this model's answers; empty for ``judge/confidence.json``
            in its folder. Where that is missing, 100 times the mean token probability is the score, which is not
            calibrated.
        reasoning_parser: Parser of its reasoning, a name of vLLM's ``--reasoning-parser``; ``auto`` for what its folder
            calls for, ``none`` for none.
        tool_call_parser: The same of ``--tool-call-parser``.
    """

    name: str
    path: str
    judge: str = ""
    reasoning_parser: Annotated[str, WIRED] = "auto"
    tool_call_parser: Annotated[str, WIRED] = "auto"


class TierConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A tier of a cascade until a plan is published.

    Attributes:
        model: A configured model.
        threshold: Least score at which its answer is delivered, 0 to 100.
    """

    model: str
    threshold: float = 70.0


class CascadeConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cascade that clients may name as ``model``. A plan in the KV bucket ``cascade`` replaces tiers and judge.

    Attributes:
        name: Not the name of a model.
        tiers: In rising order of cost; empty where only published plans count.
        judge: Kind of judge: ``confidence`` is computed here, others are asked on ``judge.<name>``.
        judge_timeout_s: Time for a judge to answer; then confidence decides.
        judge_pause_s: After three failures in a row the judge is not asked for so long.
        without_score: What becomes of an answer that cannot be scored: ``escalate`` (costs more) or ``accept`` (may be
            wrong).
        entry: Name of an entry policy (``cascade/entry.py``).
        entry_file: Of ``learnt``: what ``millrace train entry`` wrote; empty for ``judge/entry.json`` in the folder of
            the last tier's model. One that is missing, or was fitted to other models, is said once and not used.
        early_rejection: Cancel an attempt as soon as its score can no longer reach the threshold.
        early_commit_tokens: Tokens after which ``early_commit`` looks at an answer.
        early_commit_score: Least score of those tokens; the threshold, where that is higher.
        deadline_s: No escalation whose expected end (the plan's p95) is later than this after arrival; 0 for the
            call's own time limit.
        escalation_share_max: Share of a tier's judged answers that may be rejected in ``escalation_window_s``; above it
            thresholds are lowered until the share holds. 1 for no limit.
        escalation_window_s: See there.
        tier_wait_s: How long an attempt waits for an instance of its model while another tier could answer.
    """

    name: Annotated[str, WIRED]
    tiers: Annotated[list[TierConfig], WIRED] = []
    judge: Annotated[str, WIRED] = "confidence"
    judge_timeout_s: Annotated[Span, WIRED] = 2.0
    judge_pause_s: Annotated[float, CONSTANT] = 5.0
    without_score: Literal["escalate", "accept"] = "escalate"
    entry: Literal["first", "given", "learnt"] = "given"
    entry_file: str = ""
    early_rejection: bool = True
    early_commit_tokens: Annotated[int, CONSTANT] = 16
    early_commit_score: Annotated[float, CONSTANT] = 90.0
    deadline_s: float = 0.0
    escalation_share_max: Share = 1.0
    escalation_window_s: Annotated[Span, CONSTANT] = 60.0
    tier_wait_s: Span = 2.0


class LimitsConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Bounds of what is open at once.

    Attributes:
        calls_open_max: Calls of all keys together, waiting ones included; beyond it, or beyond twice as many sequences,
            or 4,096 times as many tokens of prompts, QUEUE_FULL. At 30 KB per open call 8,192 are 250 MB.
        call_timeout_s: Deadline of a call that names none.
        drain_s: After SIGTERM running calls may go on for so long; `millrace up` makes it 8.
    """

    calls_open_max: Count = 8_192
    call_timeout_s: Span = 600.0
    drain_s: Wait = 30.0


class DispatchConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Choice of instances, and submission to them.

    Attributes:
        policy: A name of ``DISPATCH_POLICIES``, a file that ends in ``.py``, or an entry point. Where nobody predicts,
            ``forecast`` is as good as its fallback.
        parameters: The policy's parameters.
        wait_s: How long a new call waits for an instance of a model that has a plan when none is usable just now. While
            one that is registered is only silent, or answers too late, it waits on, up to its own time limit. Once NATS
            is out of reach for so long, nothing waits for it.
        stage_by: Which length chooses the stage: ``present``, or ``expected``, the final one that is predicted.
    """

    policy: Annotated[str, WIRED] = "forecast"
    parameters: Annotated[dict[str, Any], WIRED] = {}
    wait_s: Wait = 10.0
    stage_by: Literal["present", "expected"] = "present"


class TaggingConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Questions to the tagger.

    Attributes:
        mode: ``always``; ``needed``: only where the policy looks at the expected length; ``never``.
        timeout_s: Then the length is unknown; a request never fails for it.
    """

    mode: Literal["always", "needed", "never"] = "always"
    timeout_s: Annotated[Span, CONSTANT] = 0.05


class ContinuationConfig(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Loss of instances, and failover.

    Attributes:
        hang_s: An engine process without a sign of life for so long hangs: it gets no new sequence, and those that wait
            there for their first token are moved.
        hang_failover_s: After so long its streams are moved, too. Together with recompute their pause stays below 3 s.
        stall_s: A stream without a token for so long is continued elsewhere though its instance lives.
        queue_stall_s: The same before the epoch's first token: queues are slower than streams.
        deadline_s: A sequence that found no instance, or NATS, for so long fails: an engine with a large model takes a
            minute or two to come back.
        fruitless_max: Continuations in a row without a single new token, then the call fails.
    """

    hang_s: Span = 0.5
    hang_failover_s: Span = 1.75
    stall_s: Span = 30.0
    queue_stall_s: Annotated[Span, CONSTANT] = 120.0
    deadline_s: Span = 120.0
    fruitless_max: Annotated[Count, CONSTANT] = 6


class IngressConfig(ProcessConfig, frozen=True, kw_only=True):
    """Everything that ``python -m services.ingress --config FILE`` takes.

    Attributes:
        models: Models that it tokenises for.
        cascades: Cascades that clients may name.
        membership: When an instance counts as silent: it is lost then.
    """

    name: Annotated[str, WIRED] = "ingress-0"
    http: HttpConfig = HttpConfig()
    models: Annotated[list[ModelConfig], WIRED] = []
    cascades: Annotated[list[CascadeConfig], WIRED] = []
    limits: LimitsConfig = LimitsConfig()
    dispatch: DispatchConfig = DispatchConfig()
    tagging: TaggingConfig = TaggingConfig()
    continuation: ContinuationConfig = ContinuationConfig()
    membership: MembershipConfig = MembershipConfig()


def dispatch_policy(config: DispatchConfig) -> tuple[DispatchPolicy, msgspec.Struct]:
    """The chosen policy, read from its file where it is one, and its parameters.

    Raises:
        ConfigError: there is no such policy, the file is none, or a parameter is wrong.
    """
    policy, parameters = DISPATCH_POLICIES.choose(config.policy, config.parameters, table="dispatch.")
    heuristics = [each.name for each in DISPATCH_POLICIES.shipped() if each.ask is None]
    if isinstance(parameters, QueryParameters) and parameters.fallback not in heuristics:
        wrong = f"fallback {parameters.fallback!r} is none of {', '.join(heuristics)}"
        raise ConfigError(f"dispatch.parameters of {policy.name}: {wrong}")
    return policy, parameters
