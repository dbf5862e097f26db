"""Streaming: a listener gets every token of all rows as it comes, with the piece of text that is certain by then."""

from __future__ import annotations

from h2o_flexgen import LLM, SamplingParams

PROMPTS = ("It was a dark and stormy night, and", "Alice looked at the door, and")


def main() -> None:
    texts = list(PROMPTS)

    def hear(row: int, token: int, piece: str | None) -> None:
        texts[row] += piece or ""
        print(f"row {row}, token {token:4}: {piece!r}")

    params = SamplingParams(max_tokens=12, temperature=0.7, top_p=0.9, seed=0)
    with LLM("demo") as llm:
        outs = llm.generate(PROMPTS, params, on_token=hear)
    assert texts == [f"{prompt}{out.text}" for prompt, out in zip(PROMPTS, outs)]
    print("\n".join(texts))


if __name__ == "__main__":
    main()
