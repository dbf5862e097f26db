"""Trains the demo models: small ones of three architectures, on books and on recall tasks strewn into them.

python scripts/train_demo.py --corpus books/ --architecture llama --minutes 50 --output demo/
"""

from __future__ import annotations

import argparse
import json
import random
import sys
from collections.abc import Sequence
from copy import deepcopy
from functools import cache
from pathlib import Path

import torch
from demo_training.corpus import held_out_passages, read_books
from demo_training.learn import Point, Settings, as_json, learn
from demo_training.rows import RowMaker
from demo_training.shapes import POSITIONS, SHAPES
from demo_training.tokenizer import START, learn_tokenizer
from demo_training.warm_start import warm_start
from safetensors.torch import load_file

from h2o_flexgen.evaluation.tasks.recall import RECALL_TASKS, Recall

VOCAB = 4096
HELD_OUT_CHARACTERS = 9000  # characters held out of every book
DTYPES = {"auto": None, "float32": torch.float32, "bfloat16": torch.bfloat16}


def main(argv: Sequence[str] | None = None) -> int:
    args = _arguments(argv)
    try:
        train(args)
    except ValueError as error:
        print(f"train_demo: {error}", file=sys.stderr)
        return 2
    return 0


def train(args: argparse.Namespace) -> None:
    torch.manual_seed(args.seed)
    books = read_books(args.corpus)
    prose = "\n".join(part for book in books for part in book.learned)
    tokenizer = learn_tokenizer([prose, _tasks_text()], VOCAB, POSITIONS)
    args.output.mkdir(parents=True, exist_ok=True)
    tokenizer.save_pretrained(str(args.output))
    (args.output / "held_out.txt").write_text(held_out_passages(books, HELD_OUT_CHARACTERS), encoding="utf-8")

    @cache  # notes and questions come again and again
    def encode(text: str) -> list[int]:
        return list(tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"])

    recall = Recall.of(prose, encode, [tokenizer.convert_tokens_to_ids(START)])
    print(f"{sum(map(len, recall.sentences)):,} tokens of prose from {len(books)} books", flush=True)
    model = SHAPES[args.architecture].build(len(tokenizer))
    print(f"{args.architecture}: {sum(one.numel() for one in model.parameters()):,} parameters", flush=True)
    if args.start is None:
        warm_start(model, args.seed)
    else:
        _take_weights(model, args.start)
    settings = Settings(
        minutes=args.minutes,
        steps=args.steps,
        matrix_rate=args.matrix_rate,
        table_rate=args.table_rate,
        near_price=args.near_price,
        far_price=args.far_price,
        since=args.since,
        device=args.device,
        dtype=DTYPES[args.dtype] or fast_dtype(args.device),
    )
    curve: list[Point] = []

    def note(point: Point) -> None:
        curve.append(point)
        print(json.dumps(as_json(point)), flush=True)
        if point.step % 200 == 0:
            save(model, args.output, curve)

    learn(model, RowMaker(recall, len(tokenizer), args.tasks, args.seed), settings, note)
    save(model, args.output, curve)


def save(model: torch.nn.Module, folder: Path, curve: Sequence[Point]) -> None:
    """Saves the model in 16 bits, which halves its size."""
    copy = deepcopy(model).to("cpu", torch.bfloat16)
    copy.save_pretrained(str(folder))  # type: ignore[operator]
    (folder / "curve.json").write_text("\n".join(json.dumps(as_json(point)) for point in curve) + "\n", encoding="utf-8")


def fast_dtype(device: str) -> torch.dtype:
    """float32 on a CPU without instructions for bfloat16, where bfloat16 is many times slower."""
    capabilities = torch.cpu.get_capabilities() if hasattr(torch.cpu, "get_capabilities") else {}
    slow = device == "cpu" and not (capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))
    return torch.float32 if slow else torch.bfloat16


def _take_weights(model: torch.nn.Module, folder: Path) -> None:
    for bias in (weight for name, weight in model.named_parameters() if name.endswith("bias")):
        torch.nn.init.zeros_(bias)
    model.load_state_dict(load_file(folder / "model.safetensors"), strict=False)


def _tasks_text() -> str:
    """Only facts and questions: their words and digits become tokens too. It does not depend on the rows, so training can go
    on from a model with other rows."""
    draw = random.Random(0)
    facts = [fact for _ in range(2000) for make in RECALL_TASKS.values() for fact in make(draw)]
    return "".join("".join(piece.text for note in fact.notes for piece in note) + fact.question + fact.answer for fact in facts)


def _arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--corpus", type=Path, required=True, help="folder of books, as *.txt")
    parser.add_argument("--output", type=Path, required=True, help="folder for the model and its tokenizer")
    parser.add_argument("--architecture", choices=sorted(SHAPES), default="llama", help="default: llama")
    parser.add_argument("--minutes", type=float, default=50, help="of training; rates fall with the clock (default: 50)")
    parser.add_argument("--steps", type=int, metavar="N", help="train for so many steps instead of minutes")
    parser.add_argument("--tasks", type=float, default=0.6, help="share of rows with recall tasks in them")
    parser.add_argument("--matrix-rate", type=float, default=2.5e-3, help="of Muon (default: %(default)s)")
    parser.add_argument("--table-rate", type=float, default=1.5e-3, help="of AdamW (default: %(default)s)")
    parser.add_argument("--near-price", type=float, default=0.2, help="in the loss, of attention to the last tokens")
    parser.add_argument("--far-price", type=float, default=0.5, help="in the loss, of attention that looks farther back")
    parser.add_argument("--start", type=Path, metavar="FOLDER", help="go on from this model, in place of a new one")
    parser.add_argument("--since", type=float, default=0.0, metavar="SHARE", help="of the time that it has had already")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--dtype", choices=DTYPES, default="auto", help="of products; auto: what the device is fast with")
    parser.add_argument("--seed", type=int, default=0, help="of the start and of the rows (default: 0)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
