"""H2O beside the full cache: of each head's keys and values 64 slots are kept, the heavy hitters and the newest.

The first model keeps everything, the second evicts at every step; both continue the same long prompt.
"""

from __future__ import annotations

from h2o_flexgen import LLM, SamplingParams
from h2o_flexgen.checkpoints.model_places import held_out_prose

PROMPT_WORDS = 200


def main() -> None:
    words = held_out_prose().split()[:PROMPT_WORDS]
    prompt, params = " ".join(words), SamplingParams(max_tokens=40)
    print(f"... {' '.join(words[-20:])}\n")
    for options in ({}, {"kv_policy": "h2o", "heavy": 32, "recent": 32}):
        with LLM("demo", **options) as llm:
            (out,) = llm.generate(prompt, params)
            print(f"{llm.plan.kv_policy}, {len(out.prompt_token_ids)} + {len(out.token_ids)} tokens: {out.text}\n")


if __name__ == "__main__":
    main()
