"""A conversation's next turn after it has moved: predictors know that its target has what was said, and so has it."""

import pytest
from millrace.actor.effects import Effect, Publish
from millrace.contracts.message import Message
from millrace.contracts.migration import MigrateSequence, MigrationFinished, MigrationMode, MigrationOutcome
from millrace.contracts.observers import CandidateForecast, DecisionMade, RequestFinished
from millrace.contracts.worker import Sampling
from millrace.sim.checkers import Checker
from millrace.sim.process import SimProcess
from millrace.sim.runtime_sim import MILLISECOND, SECOND

from services.ingress.calls.messages import Call, CallKind
from simulator.soak.clients import ClientExchange
from simulator.soak.cluster import SoakCluster
from simulator.soak.shape import MODEL, MigrationShape, SoakShape
from simulator.vocabulary import byte_vocabulary

BLOCK = 16
PROMPT = [97 + index % 26 for index in range(100)]


class Heard(Checker):
    """Record of what everybody hears: decisions, outcomes and moves."""

    def __init__(self) -> None:
        self.decisions: dict[str, DecisionMade] = {}
        self.outcomes: dict[str, RequestFinished] = {}
        self.moves: list[MigrationFinished] = []

    def on_handled(self, process: SimProcess, message: Message, effects: list[Effect]) -> None:
        for effect in effects:
            match effect:
                case Publish(body=DecisionMade() as body):
                    self.decisions[body.request] = body
                case Publish(body=RequestFinished() as body):
                    self.outcomes[body.request] = body
                case Publish(body=MigrationFinished() as body):
                    self.moves.append(body)

    def forecast(self, request: str, instance: str) -> CandidateForecast:
        return next(each for each in self.decisions[request].forecasts if each.name == instance)


class World:
    """Two instances that ask two predictors, undisturbed."""

    def __init__(self) -> None:
        shape = SoakShape(
            ingresses=1, workers=2, predictors=2, coordinators=1, policy="forecast", migration=MigrationShape()
        )
        self.cluster, self.heard = SoakCluster(3, shape), Heard()
        self.cluster.simulation.check_with(self.heard)
        self.cluster.simulation.run_for(3 * SECOND)

    def ask(self, request: str, prompt: list[int], max_tokens: int) -> ClientExchange:
        (ingress,) = self.cluster.ingresses
        assert ingress.process is not None
        sampling = Sampling(max_tokens=max_tokens, min_tokens=max_tokens, temperature=0.0, ignore_eos=True)
        call = Call(
            request=request, kind=CallKind.COMPLETION, model=MODEL, prompts=[prompt], sampling=sampling, stream=True
        )
        self.cluster.clients.submit(ingress.process, call)
        return self.cluster.clients.exchanges[request]

    def until(self, done: object, what: str) -> None:
        assert callable(done)
        for _ in range(3_000):
            if done():
                return
            self.cluster.simulation.run_for(10 * MILLISECOND)
        raise AssertionError(f"waited in vain for {what}")

    def move(self, request: str, mode: MigrationMode) -> MigrationFinished:
        source = self.heard.decisions[request].chosen
        (target,) = {"w0", "w1"} - {source}
        wish, subject = MigrateSequence(sequence=f"{request}.0", target=target, mode=mode), self.cluster.subjects
        self.cluster.simulation.publish(subject.migrate(source, "start"), wish, sender="somebody")
        self.until(lambda: self.heard.moves, "the move")
        return self.heard.moves[0]


@pytest.mark.parametrize("mode", list(MigrationMode))
def test_the_next_turn_of_a_conversation_that_moved_is_predicted_to_find_it_there_and_does(mode: MigrationMode) -> None:
    world = World()
    heard, first = world.heard, world.ask("first", PROMPT, 90)
    world.until(lambda: first.tokens[0] > 20 or first.outcome, "some tokens")
    moved = world.move("first", mode)
    assert moved.outcome is MigrationOutcome.MOVED
    world.until(lambda: first.outcome, "the end")
    assert heard.outcomes["first"].instances == [moved.source, moved.target]

    vocabulary = byte_vocabulary()
    ids = {vocabulary.piece_text(token): token for token in range(256)}
    said = [ids[letter] for letter in first.texts[0]]
    second = world.ask("second", [*PROMPT, *said, *PROMPT[:7]], 5)
    world.until(lambda: second.outcome, "the second turn")
    outcome = heard.outcomes["second"]
    whole = (len(PROMPT) + len(said) - 1) // BLOCK * BLOCK
    assert heard.forecast("second", moved.target).cached_tokens == whole
    assert 96 <= heard.forecast("second", moved.source).cached_tokens < whole
    assert outcome.instances == [moved.target]
    assert outcome.cached_tokens == outcome.predicted_cached_tokens == whole
