"""The ways to reschedule that are compared, as settings over ``papers/ares/testbed.toml``."""

from __future__ import annotations

STANDING = 'trading.reasons=["drain", "handoff"]'
BALANCE = 'trading.reasons=["drain", "handoff", "balance"]'
ORACLE = ("prediction.kind=oracle", "prediction.asked=always")
HEAD = ("extension=head.py",)
CENTRAL = ("trading.policy=none", STANDING, "extension=central.py")

#: By the name in the tables. Without prediction (`none`, `reactive`) no rule looks at a rest; `survival` is what
#: instances learn from the outputs that ended there, from nothing at the beginning of each run. `asks earlier`: for
#: memory, over 20 s in place of three moves' time. `takes no risk`: no hand-off to where memory may run short in 20 s.
VARIANTS: dict[str, tuple[str, ...]] = {
    "none": ("trading.policy=none", STANDING),
    "reactive": ("trading.policy=reactive.py", BALANCE, "trading.fences.payback_factor=0"),
    "ares, survival": ("trading.policy=trading.py",),
    "ares, head": ("trading.policy=trading.py", *HEAD),
    "ares, oracle": ("trading.policy=trading.py", *ORACLE),
    "delay, survival": ("trading.policy=delay",),
    "delay, asks earlier": ("trading.policy=delay", "trading.memory={horizon_ms=20000}"),
    "delay, takes no risk": ("trading.policy=delay", "trading.memory={join_risk_max=0.05}"),
    "delay, head": ("trading.policy=delay", *HEAD),
    "delay, oracle": ("trading.policy=delay", *ORACLE),
    "central, survival": CENTRAL,
    "central, oracle": (*CENTRAL, *ORACLE),
}
