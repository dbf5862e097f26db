"""The models that travel with the package: small, trained on novels and on recall tasks (docs/demo-model.md); and prose that
none of them has seen.

    LLM("demo").generate(["It was a dark night, and"])
"""

from __future__ import annotations

from pathlib import Path

DEMO = "demo"
ARCHITECTURES = ("llama", "opt", "neox")  # the first is meant by the name alone
HERE = Path(__file__).parent


def demo_folder(name: str) -> Path | None:
    """Of `demo`, `demo-llama`, `demo-opt`, `demo-neox`; None for other names."""
    known = {DEMO: ARCHITECTURES[0], **{f"{DEMO}-{architecture}": architecture for architecture in ARCHITECTURES}}
    return HERE / known[name] if name in known else None


def held_out_prose() -> str:
    """Passages of the novels that were kept out of training: a paragraph per line."""
    return (HERE / "held_out.txt").read_text(encoding="utf-8")
