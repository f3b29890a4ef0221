"""Views of trading policies, and policies asked about them, by name or path."""

import msgspec
from millrace.contracts.broker import MoveReason
from millrace.policies.trading import TRADING_POLICIES, BidView, LoadView, MovableSequence, PickView, TriggerView

MS = 1_000_000
SECOND = 1_000 * MS


def load(name: str, tokens: int, **fields) -> LoadView:
    return LoadView(name=name, tokens=tokens, blocks_free=1_000, blocks_total=2_000, **fields)


def sequence(name: str, tokens: int, rest: int | None = None) -> MovableSequence:
    return MovableSequence(sequence=name, tokens=tokens, output_tokens=1, blocks=-(-tokens // 16), rest_p50=rest)


def bid(name: str, **fields) -> BidView:
    return BidView(bidder=name, **{"burden_ns": 0, "load_tokens": 0, "blocks_idle": 100} | fields)


def parameters(name: str, **fields) -> msgspec.Struct:
    return msgspec.convert(fields, TRADING_POLICIES.load(name).parameters)


def trigger(name: str, view: TriggerView, *, state=None, now_ns: int = 0, **fields):
    policy = TRADING_POLICIES.load(name)
    return policy.trigger(view, parameters(name, **fields), policy.initial_state if state is None else state, now_ns)


def pick(name: str, *bids: BidView, reason: MoveReason = MoveReason.BALANCE, **fields) -> str | None:
    view = PickView(
        sequence=fields.pop("moved", sequence("r.0", 1_000)),
        reason=reason,
        own=fields.pop("own", load("a", 10_000)),
        bids=bids,
        gain_ns=fields.pop("gain_ns", 0),
        stay_ns=fields.pop("stay_ns", 0),
        cost_ns=fields.pop("cost_ns", 0),
    )
    return TRADING_POLICIES.load(name).pick(view, parameters(name, **fields)).chosen


def unequal(own: int = 10_000, **fields) -> TriggerView:
    """An instance with ``own`` tokens beside one with 2,000."""
    sequences = (sequence("r.0", 500), sequence("r.1", 3_000), sequence("r.2", 9_000))
    return TriggerView(own=load("a", own, **fields), peers=(load("b", 2_000),), sequences=sequences)
