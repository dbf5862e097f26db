"""What guessed tokens bring to one row with weights on disk: texts that repeat what was asked, and prose, with guesses and
without, in turn.

    python benchmarks/drafts.py                     # SmolLM2 (scripts/fetch_smollm2), some minutes
    python benchmarks/drafts.py --rounds 1 --tokens 64 --output benchmarks/results

Both ways must say the same. The figures are medians of tokens per second in decode. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import defaultdict
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from statistics import median
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # else transformers takes kernels.py for a package

from benchmarks.comparison.command import commit
from h2o_flexgen import LLM, SamplingParams
from h2o_flexgen.core.files import write_text
from h2o_flexgen.planning.plan import NGRAM, OFF
from h2o_flexgen.profiling.measure import describe_machine

ON_DISK = (0, 0, 100, 0, 100, 0)  # weights alone
AIMS = {"edit": 1.8, "prose": 0.98}
PERSONS = """Anna Berg, born 1971, lives in Oslo, works as a carpenter.
Tomas Novak, born 1984, lives in Brno, works as a nurse.
Maria Silva, born 1990, lives in Porto, works as a pilot.
Jan de Vries, born 1965, lives in Utrecht, works as a baker.
Aiko Tanaka, born 1978, lives in Kyoto, works as a teacher.
Paul Martin, born 1959, lives in Lyon, works as a printer.
"""
ASKED = {
    "edit": f"Repeat these lines, and put a number in front of each:\n\n{PERSONS}",
    "prose": "Tell me a long story about a lighthouse keeper and a storm.",
}


def decode_rate(llm: LLM, asked: str, params: SamplingParams) -> tuple[float, list[int]]:
    """Tokens per second behind the first one, and all tokens."""
    (found,) = llm.chat([[{"role": "user", "content": asked}]], params)
    assert llm.stats is not None
    return (len(found.token_ids) - 1) / llm.stats.decode_seconds, [*found.token_ids]


def measured(ways: dict[str, LLM], rounds: int, tokens: int, temperature: float) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for kind, asked in ASKED.items():
        rates, drafts = defaultdict[str, list[float]](list), {}
        for number in range(rounds + 1):
            params, texts = SamplingParams(tokens, temperature, seed=number), []
            for way, llm in ways.items():
                rate, text = decode_rate(llm, asked, params)
                texts.append(text)
                assert llm.stats is not None
                drafts[way] = (*llm.stats.drafted, round((len(text) - 1) / len(llm.stats.step_seconds), 2))
                if number:  # the first is to warm up
                    rates[way].append(rate)
            assert texts[0] == texts[1], "guesses change no token"
        proposed, accepted, per_pass = drafts[NGRAM]
        gains = [fast / slow for fast, slow in zip(rates[NGRAM], rates[OFF], strict=True)]
        found[kind] = {
            **{f"tokens_per_second_{way}": round(median(own), 2) for way, own in rates.items()},
            "gain": round(median(gains), 3),
            "gains": [round(one, 3) for one in gains],
            "aim": AIMS[kind],
            "proposed": proposed,
            "accepted": accepted,
            "tokens_per_pass": per_pass,
        }
    return found


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--tokens", type=int, default=120)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--temperature", type=float, default=0.0)
    parser.add_argument("--dtype", default="float32")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--percent", type=float, nargs=6, default=ON_DISK, help="where weights, KV and activations lie")
    parser.add_argument("--output", help="also write a JSON document into this folder")
    args = parser.parse_args(argv)
    if args.output:
        Path(args.output).mkdir(parents=True, exist_ok=True)
    given = {"percent": args.percent, "dtype": args.dtype, "threads": args.threads, "gpu_batch_size": 1}
    with LLM(args.model, draft=OFF, **given) as plain, LLM(args.model, draft=NGRAM, **given) as guessing:
        found = measured({OFF: plain, NGRAM: guessing}, args.rounds, args.tokens, args.temperature)
        about = {"machine": describe_machine(plain.device), "commit": commit(), "date": date.today().isoformat()}
    document = {**{name: value for name, value in vars(args).items() if name != "output"}, **found, **about}
    for kind, own in found.items():
        print(f"{kind:6} {own['gain']:.3f} times as fast, {own['tokens_per_pass']} tokens a pass")
    if args.output:
        write_text(Path(args.output) / "drafts.json", json.dumps(document, indent=1) + "\n")
    print(json.dumps(document))
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
