"""Scoring: which of several endings a model finds likeliest, with weights as they are and in 4 bits."""

from __future__ import annotations

from h2o_flexgen import LLM

BEGINNING = "The captain of the ship stood on the deck and looked at the"
ENDINGS = (" sea.", " sky, which was dark.", " xylophone.")


def main() -> None:
    for codec in ("plain", "group4"):
        with LLM("demo", weight_codec=codec) as llm:
            scored = llm.score([(BEGINNING, ending) for ending in ENDINGS])
        for ending, one in zip(ENDINGS, scored):
            print(f"{codec:7} {one.logprob / len(one.logprobs):7.2f} per token  {BEGINNING}{ending}")


if __name__ == "__main__":
    main()
