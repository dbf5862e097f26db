"""The models that travel with the package: small, trained on novels and on recall tasks (docs/demo-model.md); and prose that
none of them has seen.

    LLM("demo").generate(["It was a dark night, and"])
"""

from __future__ import annotations

from pathlib import Path

DEMO = "demo"
ARCHITECTURES = ("llama", "opt", "neox")  # the first is meant by the name alone
HERE = Path(__file__).parent
DEMO_MODELS = {DEMO: HERE / ARCHITECTURES[0]} | {f"{DEMO}-{name}": HERE / name for name in ARCHITECTURES}


def demo_folder(name: str) -> Path | None:
    """The folder of `demo`, `demo-llama`, `demo-opt` or `demo-neox`; None for other names."""
    return DEMO_MODELS.get(name)


def held_out_prose() -> str:
    """Passages of the novels that were kept out of training: a paragraph per line."""
    return (HERE / "held_out.txt").read_text(encoding="utf-8")
