"""A batch under a plan: half of the weights and of the KV cache on disk, and texts that come in the order of the prompts.

Blocks of 2 x 2 rows share each pass over the weights: so the more rows, the less a token costs.
"""

from __future__ import annotations

from h2o_flexgen import LLM, SamplingParams

PROMPTS = (
    "It was a dark and stormy night, and the captain of the ship",
    "Alice looked at the door for some time, and then she",
    "The two brothers had not met for many years. When at last",
    '"My dear," said the old lady, laying down her knitting, "I must tell you',
)


def main() -> None:
    plan = {"percent": (0, 50, 0, 50, 0, 100), "gpu_batch_size": 2, "num_gpu_batches": 2}
    with LLM("demo", **plan) as llm:
        for out in llm.generate(PROMPTS, SamplingParams(max_tokens=24)):
            print(f"{out.prompt}|{out.text}\n")
        stats = llm.stats
        assert stats is not None
        seconds = stats.decode_seconds
        print(f"{stats.generated_tokens} tokens; read from disk: {stats.moved_bytes['read'] / 1e6:.0f} MB in {seconds:.2f} s")


if __name__ == "__main__":
    main()
