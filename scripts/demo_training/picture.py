"""The loss curves of demo models, as a picture.

python -m demo_training.picture curve.png llama=demo/llama/curve.json opt=demo/opt/curve.json
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from matplotlib.figure import Figure

AVERAGED = 10  # points: a single one covers few answers


def draw(curves: Mapping[str, Sequence[Mapping[str, float]]], file: Path) -> None:
    figure = Figure(figsize=(12.5, 3.4), layout="constrained")
    losses, answers, looks = figure.subplots(1, 3)
    for name, points in curves.items():
        tokens = [point["tokens"] / 1e6 for point in points]
        (line,) = losses.plot(tokens, smooth([point["prose_loss"] for point in points]), label=name)
        answers.plot(tokens, smooth([100 * point["answers_right"] for point in points]))
        first = [100 * (1 - point["near"] - point["far"]) for point in points]
        looks.plot(tokens, smooth(first), color=line.get_color())
        looks.plot(tokens, smooth([100 * point["far"] for point in points]), color=line.get_color(), linestyle=":")
    losses.set(xlabel="million tokens read", ylabel="loss per token of prose", ylim=(3, 8))
    answers.set(xlabel="million tokens read", ylabel="tokens of answers right, per cent", ylim=(0, 101))
    looks.set(xlabel="million tokens read", ylabel="attention at the first token, % (dotted: far)", ylim=(0, 101))
    losses.legend()
    figure.savefig(file, dpi=110)


def smooth(values: Sequence[float]) -> list[float]:
    """Averages each point with those before it; nan (a step without answers) is left out."""
    held: list[float] = []
    means = []
    for value in values:
        held = [*held, value][-AVERAGED:] if value == value else held
        means.append(sum(held) / max(1, len(held)))
    return means


def read_curve(file: Path) -> list[Mapping[str, float]]:
    return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]


if __name__ == "__main__":
    named = (one.partition("=") for one in sys.argv[2:])
    draw({name: read_curve(Path(curve)) for name, _, curve in named}, Path(sys.argv[1]))
