"""The paper's worked example of the routing objective (Cascadia, section 3.3): J of three strategies.

Aim: 21.0, 11.4 and 12.2, and strategy 2 chosen. The paper gives L and Q of each.
"""

from __future__ import annotations

from papers.cascadia.objective import latency_quality_score

#: Name, p95 latency (s), quality, the paper's J.
STRATEGIES = (("θ1", 11.0, 0.88, 21.0), ("θ2", 11.4, 0.91, 11.4), ("θ3", 12.2, 0.93, 12.2))


def main() -> int:
    """Print J of each strategy beside the paper's; 1 where one differs."""
    scores = {
        name: latency_quality_score(latency, quality, quality_min=0.90, utopia=0.95, nadir=0.75, weight=100)
        for name, latency, quality, _ in STRATEGIES
    }
    print(f"{'strategy':<10}{'L s':>8}{'Q':>8}{'J':>10}{'paper':>8}")
    for name, latency, quality, paper in STRATEGIES:
        print(f"{name:<10}{latency:>8.1f}{quality:>8.2f}{scores[name]:>10.4f}{paper:>8.1f}")
    chosen = min(scores, key=lambda name: scores[name])
    print(f"chosen: {chosen} (paper: θ2)")
    exact = all(abs(scores[name] - paper) < 1e-9 for name, _, _, paper in STRATEGIES)
    return 0 if exact and chosen == "θ2" else 1
