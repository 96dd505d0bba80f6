"""Plot the loss of each speedup, or share of zeros, that a budget can reach, as SVG."""

from __future__ import annotations

import math
from xml.sax.saxutils import escape

from slidesparse.convert.budget import Choice
from slidesparse.convert.choose import Outcome

WIDTH, HEIGHT = 640, 400
LEFT, RIGHT, TOP, BOTTOM = 70, 30, 30, 50
LINE, POINT, CHOSEN = "#2563eb", "#6b7280", "#dc2626"
STEPS = (1, 2, 5)  # ticks are such a number of a power of ten apart


def svg(outcome: Outcome) -> str:
    """Draw loss against speed, or zeros with ``--zeros``: the frontier, uniform patterns and the choice."""
    problem = outcome.problem

    def gain(choice: Choice) -> float:
        return 100 * choice.zeros if problem.by_zeros else choice.speedup

    line = [(gain(choice), 100 * outcome.loss(choice)) for choice in problem.frontier()]
    uniform = [(p.ratio, problem.uniform(p)) for p in problem.patterns]
    points = [(name, gain(choice), 100 * outcome.loss(choice)) for name, choice in uniform]
    coordinates = [*line, *((x, y) for _, x, y in points)]
    xs, ys = [x for x, _ in coordinates], [y for _, y in coordinates]
    low, high, most = min(xs), max(xs), max(ys)

    def at(x: float, y: float) -> tuple[float, float]:
        across = (x - low) / max(high - low, 1e-12) * (WIDTH - LEFT - RIGHT)
        return LEFT + across, HEIGHT - BOTTOM - y / max(most, 1e-12) * (HEIGHT - TOP - BOTTOM)

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    for tick in _ticks(0.0, most):
        y = at(low, tick)[1]
        parts.append(f'<path d="M{LEFT} {y:.1f}H{WIDTH - RIGHT}" stroke="#e5e7eb"/>')
        parts.append(f'<text x="{LEFT - 8}" y="{y + 4:.1f}" text-anchor="end">{tick:g}%</text>')
    for tick in _ticks(low, high):
        x = at(tick, 0.0)[0]
        label = f"{tick:g}%" if problem.by_zeros else f"{tick:g}x"
        parts.append(f'<text x="{x:.1f}" y="{HEIGHT - BOTTOM + 18}" text-anchor="middle">{label}</text>')
    y_label = "perplexity above dense" if outcome.in_nats else "1 - cosine"
    x_label = (
        "zeros"
        if problem.by_zeros
        else f"speed of linear layers over dense ones in vLLM, {outcome.budget.gpu}"
    )
    parts.append(f'<text x="{LEFT}" y="{TOP - 12}">{y_label}, estimated</text>')
    parts.append(f'<text x="{WIDTH - RIGHT}" y="{HEIGHT - 10}" text-anchor="end">{escape(x_label)}</text>')
    path = " ".join(f"{x:.1f},{y:.1f}" for x, y in (at(*point) for point in line))
    parts.append(f'<polyline points="{path}" fill="none" stroke="{LINE}" stroke-width="2"/>')
    for name, gained, lost in points:
        x, y = at(gained, lost)
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{POINT}"/>')
        parts.append(f'<text x="{x - 8:.1f}" y="{y - 6:.1f}" text-anchor="end">{name}</text>')
    if outcome.choice:
        x, y = at(gain(outcome.choice), 100 * outcome.loss(outcome.choice))
        parts.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="6" fill="{CHOSEN}"/>')
        goal = escape(outcome.budget.goal)
        parts.append(f'<text x="{x + 10:.1f}" y="{y + 16:.1f}" fill="{CHOSEN}">{goal}</text>')
    return "\n".join([*parts, "</svg>", ""])


def _ticks(low: float, high: float) -> list[float]:
    """Return round numbers from ``low`` to ``high``, four to nine of them."""
    target = max(high - low, 1e-9) / 5
    power = 10.0 ** math.floor(math.log10(target))
    step = min((power * part for part in (*STEPS, 10)), key=lambda s: abs(s - target))
    first = math.ceil(low / step - 1e-9)
    return [step * number for number in range(first, math.floor(high / step + 1e-9) + 1)]
