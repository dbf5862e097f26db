"""A chat, in two ways: messages that are answered at once, and a conversation whose KV cache lives on from turn to turn.

With rolling positions and a policy that evicts, the conversation has no end. (The demo model was never taught to chat: it goes
on as a novel would.)
"""

from __future__ import annotations

from h2o_flexgen import LLM, SamplingParams

PARAMS = SamplingParams(max_tokens=24, temperature=0.5, seed=1)


def main() -> None:
    with LLM("demo", kv_policy="h2o", heavy=20, recent=20, positions="rolling") as llm:
        (answer,) = llm.chat([{"role": "user", "content": "Who came to the house last night?"}], PARAMS)
        print(f"Who came to the house last night?{answer.text}\n")
        with llm.converse() as talk:
            for turn in ("The old man came into the room.", " He sat down by the fire.", " Then he said:"):
                print(turn, end="")
                talk.reply(turn, PARAMS, on_text=lambda piece: print(piece, end="", flush=True))
            print(f"\n\n{talk.seen} tokens were said, {talk.held} are held")


if __name__ == "__main__":
    main()
