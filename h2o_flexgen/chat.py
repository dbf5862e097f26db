"""The chat command: talk with a model, turn by turn, over a KV cache that lives on.

    python -m h2o_flexgen.chat --model Qwen/Qwen3-8B --percent 0 50 100 0 100 0
    python -m h2o_flexgen.chat --model ... --kv-policy h2o --heavy 512 --recent 512 --positions rolling --input turns.jsonl

Replies go to stdout as they come; where turns are not typed, each is shown before its reply, and the last line is one JSON
document, unless that is a terminal. Ctrl-C stops a reply; a second one leaves.
"""

from h2o_flexgen.cli.chat_request import PROGRAM, parse, request_of
from h2o_flexgen.cli.main import door

main = door("chat", PROGRAM, parse, request_of)

if __name__ == "__main__":
    raise SystemExit(main())
