"""Trains a head from recorded states and decides whether it may replace the one in force. Needs torch; slow (minutes).

Requests are parted by prompt, so that no prompt is on both sides: a third of the held-out ones tell when to stop, the
rest judge. Every token weighs the same: a scheduler meets a long output more often. (Were requests to weigh the same,
few tokens of a long one would stand for all, and survival, which speaks of those that came so far, would not be right.)

AdamW, early stopping on held-out requests; the loss is the pinball at 0.5 and 0.9 of log(1 + rest), and the guard is
the tagger's.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Sequence
from typing import Any

import msgspec
import numpy as np
from millrace.lengths.coverage import COVERED_MIN
from millrace.lengths.head import FEATURES, HeadInfo, RemainingHead, survival_table
from millrace.lengths.scoring import Numbers, Score, pinball, score
from millrace.lengths.survival import Survival
from numpy.typing import NDArray

from papers.ares.hidden_states.recorded import SequenceStates, StatesHeader

#: Shares of the prompts.
TUNING, HOLDOUT = 0.10, 0.25
#: Fewer held-out requests than this give no judgement.
HOLDOUT_MIN = 50
#: Standard errors of the paired gain that a candidate must exceed: one in 44 passes by chance.
STANDARD_ERRORS = 2.0
#: Width of the hidden layer.
WIDTH = 64
EPOCHS = 60
PATIENCE = 6
BATCH = 512
RATE = 2e-3
DECAY = 1.0
#: Chosen with the decay on folds of the training prompts alone: some 3,000 requests over-fit with less.
DROPOUT = 0.5
#: Share of samples that are shown without their submitted length: a cluster without a tagger must not be surprised.
BLANKED = 0.3
#: Bounds of what calibration may make of a p90: beyond, the tuning requests were too few to say.
STRETCH = (0.5, 3.0)
SEED = 7
SHARES = (0.5, 0.9)


class StateMatrix(msgspec.Struct, frozen=True, kw_only=True):
    """Samples of many requests.

    Attributes:
        states: (samples, width), float32.
        generated, left, submitted: (samples,), as RemainingHead.features takes them.
        rest: (samples,), true rest, tokens.
        request: (samples,), index of the request.
        weight: (samples,), tokens that each stands for: the output's length over the number of its samples.
    """

    states: Any
    generated: Any
    left: Any
    submitted: Any
    rest: Any
    request: Any
    weight: Any

    def __len__(self) -> int:
        return len(self.rest)


class HeadResult(msgspec.Struct, frozen=True, kw_only=True):
    """Result of training a head.

    Attributes:
        head: None where there was too little to learn from.
        scores: Of the held-out requests, by predictor.
    """

    head: RemainingHead | None
    accepted: bool
    reason: str
    scores: dict[str, Score] = {}


def part_of(prompt: Sequence[int]) -> str:
    """``held``, ``tuning`` or ``trained``, fixed by the prompt alone."""
    place = zlib.crc32(np.asarray(prompt, "<i4").tobytes()) / 2**32
    return "held" if place < HOLDOUT else "tuning" if place < HOLDOUT + TUNING else "trained"


def matrix(sequences: Sequence[SequenceStates]) -> StateMatrix:
    """Samples of these requests. The rest of one that its bound cut is what the bound left: it takes no more."""
    kept = [one for one in sequences if one.generated]
    counts = [len(one.generated) for one in kept]
    generated = np.array([at for one in kept for at in one.generated], np.int64)

    def repeated(values: Iterable[int]) -> NDArray[np.int64]:
        return np.repeat(np.fromiter(values, np.int64), counts)

    return StateMatrix(
        states=np.concatenate([one.matrix() for one in kept]) if kept else np.empty((0, 0), np.float32),
        generated=generated,
        left=repeated(one.max_tokens for one in kept) - generated,
        submitted=repeated(one.submitted for one in kept),
        rest=repeated(one.length for one in kept) - generated,
        request=repeated(range(len(kept))),
        weight=np.repeat([one.length / len(one.generated) for one in kept], counts),
    )


def survival_of(sequences: Sequence[SequenceStates]) -> Survival:
    """Return the baseline trained on these requests, cut ones included."""
    survival = Survival(half_life=1e9)
    for one in sequences:
        survival.learn(one.length, ended=one.ended)
    return survival


def train_head(
    sequences: Sequence[SequenceStates], *, header: StatesHeader, incumbent: RemainingHead | None, seed: int = SEED
) -> HeadResult:
    """Trains on some prompts and judges by others: against the head in force, or survival where there is none."""
    parts: dict[str, list[SequenceStates]] = {"held": [], "tuning": [], "trained": []}
    for one in sequences:
        parts[part_of(one.prompt)].append(one)
    seen, tuning, held = (matrix(parts[name]) for name in ("trained", "tuning", "held"))
    requests = len(np.unique(held.request))
    if requests < HOLDOUT_MIN or not len(seen) or not len(tuning):
        return HeadResult(head=None, accepted=False, reason=f"{requests} held-out requests are too few")
    survival = survival_of(parts["trained"])
    head = fit(seen, tuning, survival=survival, header=header, seed=seed)
    predicted = predictions(seen, held, survival=survival, head=head, incumbent=incumbent)
    scores = {name: weighted_score(said, held) for name, said in predicted.items()}
    against = "in force" if incumbent is not None else "survival, with the submitted length"
    accepted, reason = judge(predicted["head"], predicted[against], held)
    info = msgspec.structs.replace(head.info, requests=len(parts["trained"]), figures=msgspec.to_builtins(scores))
    head = RemainingHead(info, head.layers, head.survival)
    return HeadResult(head=head, accepted=accepted, reason=f"against {against}: {reason}", scores=scores)


def predictions(
    seen: StateMatrix,
    held: StateMatrix,
    *,
    survival: Survival,
    head: RemainingHead,
    incumbent: RemainingHead | None = None,
) -> dict[str, Numbers]:
    """(samples, 3) of every predictor: the rest's point (its median), median and 90th percentile."""
    order = np.argsort(seen.rest)
    below = np.cumsum(seen.weight[order]) / seen.weight.sum()
    constant = np.array([seen.rest[order][np.searchsorted(below, share)] for share in SHARES], np.float64)
    alone = survival.quantiles(held.generated, SHARES)
    submitted = (held.submitted - held.generated).astype(np.float64)
    known = submitted > 0
    plus_ten = np.where(known, submitted, np.where(held.submitted > 0, 10.0, alone[:, 0]))
    first = np.where(known, submitted, alone[:, 0])
    said = {
        "constant": np.tile(constant, (len(held), 1)),
        "submitted length, plus ten": np.stack([plus_ten, np.maximum(plus_ten, alone[:, 1])], axis=1),
        "survival": alone,
        "survival, with the submitted length": np.stack([first, np.maximum(first, alone[:, 1])], axis=1),
        "head": _estimates(head, held),
    }
    if incumbent is not None:
        said["in force"] = _estimates(incumbent, held)
    bounded = {name: np.clip(value, 1.0, np.maximum(held.left, 1)[:, None]) for name, value in said.items()}
    return {name: np.concatenate([value[:, :1], value], axis=1) for name, value in bounded.items()}


def _estimates(head: RemainingHead, data: StateMatrix) -> NDArray[np.float64]:
    return head.estimate(data.states, data.generated, data.left, data.submitted).astype(np.float64)


def by_request(values: Numbers, data: StateMatrix) -> Numbers:
    """Share of each request in the mean over tokens, (requests,): the mean of these is that mean."""
    sums = np.bincount(data.request, weights=values * data.weight)
    return np.asarray(sums * (len(sums) / data.weight.sum()))


def weighted_score(predicted: Numbers, data: StateMatrix) -> Score:
    """Figures in which every token weighs the same."""
    plain = score(predicted, data.rest)
    errors = by_request(np.abs(predicted[:, 1] - data.rest), data)
    covered = by_request((data.rest <= predicted[:, 2]).astype(np.float64), data)
    losses = by_request(pinball(predicted, data.rest), data)
    mean_rest = float(by_request(data.rest.astype(np.float64), data).mean())
    return msgspec.structs.replace(
        plain,
        count=len(errors),
        error=float(errors.mean()),
        error_rate=float(errors.mean()) / mean_rest,
        pinball=float(losses.mean()),
        covered_90=float(covered.mean()),
    )


def judge(candidate: Numbers, incumbent: Numbers, held: StateMatrix) -> tuple[bool, str]:
    """Whether a candidate is better on held-out requests, beyond what chance explains.

    Its mean pinball loss must be lower by more than two standard errors of the paired differences, its mean absolute
    error must not be higher, and its 90th percentile must cover the least share of rests with which a worker would
    believe it. With one standard error, as the tagger has it, one in six heads of states that tell nothing passed.
    """
    gains = by_request(pinball(incumbent, held.rest) - pinball(candidate, held.rest), held)
    gain, deviation = float(gains.mean()), float(gains.std() / np.sqrt(len(gains)))
    errors = [float(by_request(np.abs(p[:, 1] - held.rest), held).mean()) for p in (incumbent, candidate)]
    covered = float(by_request((held.rest <= candidate[:, 2]).astype(np.float64), held).mean())
    accepted = bool(np.isfinite(candidate).all()) and gain > STANDARD_ERRORS * deviation and errors[1] <= errors[0]
    accepted = accepted and covered >= COVERED_MIN
    verb = "is better" if accepted else "is not better"
    return accepted, (
        f"the candidate {verb} on {len(gains)} held-out requests: pinball loss lower by {gain:.2f} ± {deviation:.2f}, "
        f"mean error {errors[1]:.1f} tokens against {errors[0]:.1f}, p90 covers {covered:.1%}"
    )


def fit(
    seen: StateMatrix, tuning: StateMatrix, *, survival: Survival, header: StatesHeader, seed: int = SEED
) -> RemainingHead:
    """Fits a head to samples; keeps the weights of the epoch that was best on ``tuning``."""
    import torch

    width = header.hidden_size
    table = survival_table(survival)
    empty = [(np.zeros((width + len(FEATURES), WIDTH), np.float32), np.zeros(WIDTH, np.float32))]
    empty.append((np.zeros((WIDTH, 2), np.float32), np.zeros(2, np.float32)))
    info = HeadInfo(
        model=header.model, fingerprint=header.fingerprint, hidden_size=width, samples=len(seen), requests=0
    )
    plain = RemainingHead(info, empty, table)
    torch.manual_seed(seed)
    rng = np.random.default_rng(seed)
    inputs = _inputs(plain, seen, blanked=rng.random(len(seen)) < BLANKED)
    mean, scale = _standard(inputs)
    data = _tensors(inputs, seen, mean, scale)
    check = _tensors(_inputs(plain, tuning), tuning, mean, scale)
    network = torch.nn.Sequential(
        torch.nn.Linear(inputs.shape[1], WIDTH), torch.nn.ReLU(), torch.nn.Dropout(DROPOUT), torch.nn.Linear(WIDTH, 2)
    )
    torch.nn.init.zeros_(network[3].weight)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # products this small only wait for each other
    try:
        _train(network, data, check, seed=seed)
    finally:
        torch.set_num_threads(threads)
    return _calibrated(RemainingHead(info, _layers(network, mean, scale), table), tuning)


def _calibrated(head: RemainingHead, data: StateMatrix) -> RemainingHead:
    """The same head, its p90 moved so that it covers 90 % of these tokens (split conformal prediction)."""
    logs = head.logs(data.states, head.features(data.generated, data.left, data.submitted)).astype(np.float64)
    distance = np.maximum(logs[:, 1] - logs[:, 0], 1e-6)
    reached = (np.log1p(data.rest) - logs[:, 0]) / distance
    order = np.argsort(reached)
    below = np.cumsum(data.weight[order]) / data.weight.sum()
    stretch = float(np.clip(reached[order][np.searchsorted(below, SHARES[1])], *STRETCH))
    return RemainingHead(msgspec.structs.replace(head.info, stretch=stretch), head.layers, head.survival)


def _inputs(head: RemainingHead, data: StateMatrix, blanked: Any = None) -> NDArray[np.float32]:
    submitted = data.submitted if blanked is None else np.where(blanked, 0, data.submitted)
    return np.concatenate([data.states, head.features(data.generated, data.left, submitted)], axis=1)


def _standard(inputs: NDArray[np.float32]) -> tuple[Any, Any]:
    """Mean and one over deviation of each column; a column that never varies counts for nothing."""
    deviation = inputs.std(axis=0)
    return inputs.mean(axis=0), np.where(deviation > 1e-6, 1.0 / np.maximum(deviation, 1e-6), 0.0).astype(np.float32)


def _tensors(inputs: Any, data: StateMatrix, mean: Any, scale: Any) -> tuple[Any, ...]:
    import torch

    base = inputs[:, -len(FEATURES) + 2]  # survival's median, which the output corrects
    target = np.log1p(data.rest.astype(np.float32))
    bound = np.log1p(np.maximum(data.left, 1).astype(np.float32))
    columns = ((inputs - mean) * scale, base, target, bound, data.weight.astype(np.float32))
    return tuple(torch.from_numpy(np.ascontiguousarray(column, np.float32)) for column in columns)


def _loss(network: Any, inputs: Any, base: Any, target: Any, bound: Any, weight: Any) -> Any:
    import torch

    said = network(inputs)
    median = base + said[:, 0]
    total = 0.0
    for value, share in ((median, 0.5), (median + torch.nn.functional.softplus(said[:, 1]), 0.9)):
        above = target - torch.minimum(value, bound)
        total = total + torch.maximum(share * above, (share - 1.0) * above)
    return (total * weight).sum() / weight.sum()


def _train(network: Any, data: tuple[Any, ...], check: tuple[Any, ...], *, seed: int) -> None:
    import torch

    optimizer = torch.optim.AdamW(network.parameters(), lr=RATE, weight_decay=DECAY)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, EPOCHS)
    order = torch.Generator().manual_seed(seed)
    best, best_loss, waited = {}, float("inf"), 0
    for _ in range(EPOCHS):
        network.train()
        for rows in torch.randperm(len(data[0]), generator=order).split(BATCH):
            optimizer.zero_grad()
            _loss(network, *(column[rows] for column in data)).backward()
            optimizer.step()
        schedule.step()
        network.eval()
        with torch.no_grad():
            loss = float(_loss(network, *check))
        if loss < best_loss:
            best, best_loss, waited = {k: v.clone() for k, v in network.state_dict().items()}, loss, 0
        elif (waited := waited + 1) >= PATIENCE:
            break
    network.load_state_dict(best)


def _layers(network: Any, mean: Any, scale: Any) -> list[tuple[Any, Any]]:
    """The network's weights with the standardisation folded into the first layer."""
    first, last = ((layer.weight.detach().numpy().T, layer.bias.detach().numpy()) for layer in (network[0], network[3]))
    weights = first[0] * scale[:, None]
    bias = first[1] - mean @ weights
    return [
        (np.ascontiguousarray(weights, np.float32), bias.astype(np.float32)),
        (np.ascontiguousarray(last[0], np.float32), np.ascontiguousarray(last[1], np.float32)),
    ]
