"""Data wrangling with the examples before every question read once, and read for each row: the application itself, on tables
that are made up in the shape of Amazon-Google (876 tokens in, of which some 800 are the same for all rows, 3 out).

    python benchmarks/data_wrangling.py --output benchmarks/results/data-wrangling-demo.json
    python benchmarks/data_wrangling.py --model smollm2 --examples 11 --rows 16 --repeats 2

Both ways are processes of their own and take turns, because machines drift; medians are compared. In float32 all answers are
the same. The last line is one JSON document. What answers say is not looked at: the tables are nonsense.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

if __name__ == "__main__":
    sys.path[0] = str(Path(__file__).resolve().parents[1])  # else transformers takes kernels.py for a package

from benchmarks.comparison.benchmark_command import add_output, parser_of, tell
from h2o_flexgen.apps.data_wrangling.data_sets import DATA_SETS
from h2o_flexgen.apps.made_up_tables import MadeUpDataSet

NAME = "Amazon-Google"
SHAPE = 876  # tokens of FlexGen's prompts
APART, SHARED = "apart", "shared"
AIM = 5.0


def main(argv: Sequence[str] | None = None) -> int:
    words = sys.argv[1:] if argv is None else argv
    args = parse(words)
    with TemporaryDirectory() as folder:
        MadeUpDataSet(DATA_SETS[NAME], max(args.rows, args.examples), args.seed).write(Path(folder))
        runs = [run(args, Path(folder), way, turn) for turn in range(args.repeats) for way in (APART, SHARED)]
    result = result_of(args, words, runs)
    print_table(result)
    tell(result, args.output)
    return 0


def parse(argv: Sequence[str]) -> argparse.Namespace:
    parser = parser_of(__doc__)
    add = parser.add_argument
    add("--model", default="demo")
    add("--dtype", default="auto")
    add("--rows", type=int, default=64, help="rows that are asked about")
    add(
        "--examples",
        type=int,
        default=7,
        help=f"before a question: 7 of the demo model make some {SHAPE} tokens, 11 of smollm2",
    )
    add("--gpu-batch-size", type=int, default=16)
    add("--num-gpu-batches", type=int, default=1)
    add("--percent", nargs=6, default=["0", "100", "0", "100", "0", "100"])
    add("--repeats", type=int, default=3)
    add("--threads", type=int, default=1)
    add("--seed", type=int, default=0)
    add_output(parser)
    return parser.parse_args(argv)


def run(args: argparse.Namespace, folder: Path, way: str, turn: int) -> dict[str, Any]:
    """The application in a process of its own."""
    output = folder / f"{way}{turn}.jsonl"
    sizes = ["--gpu-batch-size", args.gpu_batch_size, "--num-gpu-batches", args.num_gpu_batches, "--threads", args.threads]
    flags = ["--task", "entity_match", "--data-dir", folder, "--data-set", NAME, "-o", output, "-k", args.examples]
    flags += ["--num-run", args.rows]
    flags += ["--model", args.model, "--dtype", args.dtype, "--device", "cpu", "--percent", *args.percent, *sizes]
    flags += ["--shared-prefixes", int(way == SHARED), "--verbose", 0]
    command = [sys.executable, "-m", "h2o_flexgen.apps.data_wrangling", *map(str, flags)]
    root = Path(__file__).resolve().parents[1]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=root)
    found = json.loads(done.stdout.splitlines()[-1])
    answers = json.loads(output.with_name(f"{way}{turn}.result.json").read_text(encoding="utf-8"))["answers"]
    print(f"{way}: {found['speed']['rows_per_second']:.2f} rows/s", file=sys.stderr)
    return {"way": way, "machine": found["machine"], **found["speed"], "answers": [one["text"] for one in answers]}


def result_of(args: argparse.Namespace, words: Sequence[str], runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The result in the form that scripts/readme_results.py reads."""
    lines = [line_of(way, [one for one in runs if one["way"] == way]) for way in (APART, SHARED)]
    apart, shared = lines
    shape = " ".join(args.percent)
    saved = apart["computed_tokens"] / shared["computed_tokens"]
    ceiling = apart["rows_per_second"] * saved
    times = shared["rows_per_second"] / apart["rows_per_second"]
    mean = apart["prompt_tokens"] / apart["rows"]
    are_same = all(one["answers"] == runs[0]["answers"] for one in runs)
    answers = "all answers are the same" if are_same else "some answers differ, as sums do in their last bits"
    return {
        "benchmark": "data wrangling",
        "command": " ".join(["python benchmarks/data_wrangling.py", *words]),
        "title": f"{args.rows} rows in the shape of {NAME}, `{args.model}`, `--percent {shape}`, threads: {args.threads}",
        "machine": runs[0]["machine"],
        "ceiling": "as many tokens per second as apart, of which those that are shared are computed once",
        "aim": f"{AIM:g} times",
        "unit": "rows/s",
        "higher_is_better": True,
        "rows": [{"name": line["way"], "measured": line["rows_per_second"], "ceiling": ceiling} for line in lines],
        "times": times,
        "saved_times": saved,
        "same_answers": are_same,
        "notes": f"{times:.2f} times; prompts of {mean:.0f} tokens, {apart['longest_prompt']:.0f} at most; "
        f"{shared['computed_tokens']:.0f} instead of {apart['computed_tokens']:.0f} tokens computed; "
        f"{shared['flexgen_tokens_per_second']:.0f} instead of {apart['flexgen_tokens_per_second']:.0f} tokens/s of input and "
        f"output as FlexGen counts them; {answers}.",
        "lines": lines,
    }


def line_of(way: str, runs: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """The medians of a way's runs."""
    numbers = [name for name, value in runs[0].items() if isinstance(value, (int, float))]
    medians = {name: statistics.median(one[name] for one in runs) for name in numbers}
    return {"way": way, **medians, "rates": [one["rows_per_second"] for one in runs]}


def print_table(result: Mapping[str, Any]) -> None:
    print(f"\n{result['title']}\nmachine: {result['machine']}\nceiling: {result['ceiling']}\naim: {result['aim']}")
    print("\nway     rows/s  seconds  FlexGen's tokens/s  computed tokens  of ceiling")
    for line, row in zip(result["lines"], result["rows"]):
        print(
            f"{line['way']:6} {line['rows_per_second']:7.2f} {line['seconds']:8.1f} {line['flexgen_tokens_per_second']:19.0f} "
            f"{line['computed_tokens']:16.0f} {row['measured'] / row['ceiling']:11.2f}"
        )
    print(f"\n{result['notes']}")


if __name__ == "__main__":
    sys.exit(main())
