"""Pipelines as lanes of the engine model."""

from millrace.enginemodel.forecast.question import ReplicaRequest
from millrace.enginemodel.parameters import EngineParameters
from millrace.enginemodel.step_cost import FS_PER_NS, StepCost

from papers.cascadia.pipelines import pipelined
from papers.cascadia.replicas import ReplicaShape, serve

PARAMETERS = EngineParameters(blocks_total=64, max_model_len=512)


def test_a_pipeline_is_lanes_with_hops_that_share_the_memory() -> None:
    engine = ReplicaShape(tensor=1, cost=StepCost(fixed=FS_PER_NS), parameters=PARAMETERS)
    [alone] = serve([ReplicaRequest(0, 20, 4)], engine)
    shape = pipelined(engine, stages=2, hop_ns=1000.0, hop_token_ns=10.0, blocks=600)
    assert (shape.name, shape.gpus, shape.parameters.blocks_total) == ("tp1pp2", 2, 300)
    assert serve([ReplicaRequest(0, 20, 4)], shape) == [alone + 4 * 1000 + (20 + 3) * 10]
    together = serve([ReplicaRequest(0, 20, 4)] * 2, shape)
    assert together[0] == together[1]  # each on its own lane
