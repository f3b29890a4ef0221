"""Paths of the code that each figure measures, for ``python -m bench --check``.

What a figure shares with everything (contracts, logs) is left out: a table that names all code says nothing.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

_LIBS, _POLICIES = "libs/millrace/", "libs/millrace/policies/"
_RUNTIME = (_LIBS + "actor",)
_INGRESS = ("services/ingress", "deployment/ingress.py", *_RUNTIME)
_WORKER = ("services/worker", *_RUNTIME)
_ENGINES = (_LIBS + "enginemodel", "native/enginemodel")
_PREDICTOR = ("services/predictor", *_ENGINES)
_SIMULATOR = ("simulator", _LIBS + "sim", *_ENGINES)
_DISPATCH = ("services/ingress/dispatch", _POLICIES + "dispatch", *_PREDICTOR)
_MOVING = ("services/broker", "services/migrator", "services/worker", "services/ingress/migration", _LIBS + "kvcopy")
_TRADING = ("services/broker", _POLICIES + "trading", *_SIMULATOR)
_STAGES = (_POLICIES + "stages", "services/coordinator/stages.py")
_ROLES = (_POLICIES + "roles", "services/coordinator/roles.py")
_CASCADE = (_LIBS + "cascade", "services/ingress/cascade")
_JUDGE = (_LIBS + "judging", "services/judge")
_BLOCK = (*_DISPATCH, *_SIMULATOR)

MEASURED: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        # serving
        "as_shipped": (*_INGRESS, "services/worker", "services/predictor", "services/tagger"),
        "hot_path": (*_INGRESS, "services/predictor", "services/tagger"),
        "vllm_overhead": (*_INGRESS, *_WORKER),
        "continuation_gap": ("services/ingress/failover", "services/worker"),
        "autopilot": ("services/coordinator/autopilot.py", "simulator/whatif"),
        "autopilot_on": ("services/coordinator/autopilot.py", "services/coordinator/adopting.py", "simulator/whatif"),
        "what_if": _SIMULATOR,
        "disturbed_streams": ("services/ingress/failover", *_MOVING),
        "upgrades": ("services/ingress/failover", *_MOVING, _LIBS + "cli/apply.py"),
        # forecasting
        "step_time": _ENGINES,
        "heterogeneity": _ENGINES,
        "forecast": _ENGINES,
        "predictor": _PREDICTOR,
        "tagger": ("services/tagger", _LIBS + "lengths"),
        "live_policies": _DISPATCH,
        "conversations": _DISPATCH,
        # lengths and moves
        "remaining": (_LIBS + "lengths", "papers/ares/hidden_states"),
        "ares_decision": (_POLICIES + "trading",),
        "ares_testbed": _TRADING,
        "ares_bandwidth": _TRADING,
        "ares_floor": _TRADING,
        "ares_scale": (_POLICIES + "trading", "papers/ares/bench/levelling.py"),
        "flowkv_roles": ("papers/flowkv", *_ROLES, *_TRADING),
        "flowkv_weights": ("papers/flowkv",),
        "flowkv_hetero": ("papers/flowkv/assignment.py", "papers/flowkv/mix.py", *_SIMULATOR),
        "scaling_shapes": ("papers/flowkv/assignment.py", "papers/flowkv/mix.py", *_SIMULATOR),
        "moving_unified": (_POLICIES + "dispatch", *_STAGES, *_TRADING),
        # cascades
        "cascade_example": _CASCADE,
        "cascade_solver": _CASCADE,
        "cascade_judge": _JUDGE,
        "cascade_entry": (*_CASCADE, *_JUDGE),
        "cascade_slo": (*_CASCADE, *_ENGINES),
        "cascade_parallelism": (*_CASCADE, *_ENGINES),
        "cascade_plans": _CASCADE,
        "cascade_drift": _CASCADE,
        "cascade_limits": (*_CASCADE, *_ENGINES),
        "cascade_fidelity": (*_CASCADE, *_SIMULATOR),
        "cascade_live": (*_CASCADE, *_JUDGE),
        # simulation
        "sim_speed": _SIMULATOR,
        "fidelity": _SIMULATOR,
        # Block
        "block_testbed": _BLOCK,
        "block_provisioning": _BLOCK,
        "block_beyond": _BLOCK,
        # migration
        "migration_gap": _MOVING,
        "migration_cap": _MOVING,
        "migration_soak": _MOVING,
        "role_flips": (*_MOVING, "services/coordinator/roles.py"),
        "forecast_default": _BLOCK,
        "migration_sim": ("services/broker", "services/migrator", *_SIMULATOR),
        "kv_replicas": (*_MOVING, "services/ingress/dispatch", "services/ingress/failover"),
        "kv_replicas_sim": ("services/broker", "services/migrator", *_SIMULATOR),
        "disaggregation_sim": ("services/broker", "services/migrator", *_SIMULATOR),
        "kvcopy": (_LIBS + "kvcopy", "native/kvcopy"),
        # stages
        "stage_planner": _STAGES,
        "qoe_fit": _STAGES,
        "stages_headline": (*_STAGES, *_TRADING),
        "stages_fairness": (*_STAGES, *_TRADING),
        "stages_layouts": (*_STAGES, *_TRADING),
        "stages_scale": ("services/broker", _LIBS + "membership", *_SIMULATOR),
        "trade_balance": (*_STAGES, *_TRADING),
        "trade_noise": _TRADING,
    }
)
