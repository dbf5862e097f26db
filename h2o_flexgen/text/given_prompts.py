"""The prompts of a command: given as texts or in a file, or made up: readable, of one length, and every one different."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from pathlib import Path

from h2o_flexgen.core.files import parse_json, read_text
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.text.tokenizer import ByteTokenizer, Tokenizer


def given_prompts(texts: Sequence[str] | None, file: str | None, num: int | None = None) -> list[str]:
    """The prompts of --prompt, then those of the file, only the first `num` of them. The list is empty if none are given."""
    if texts is None and file is None:
        return []
    prompts = [*(texts or ()), *(read_prompts(Path(file).expanduser()) if file is not None else ())]
    for place, prompt in enumerate(prompts):
        if not prompt.strip():
            raise ValueError(f"prompt {place} is empty; every prompt needs at least one token")
    if num is not None and not 1 <= num <= len(prompts):
        raise ValueError(f"--num-prompts is {num}, but {len(prompts)} prompts are given; give 1 to {len(prompts)}")
    return prompts[:num]


def read_prompts(file: Path) -> list[str]:
    take = _from_json if file.suffix == ".jsonl" else str
    lines = enumerate(read_lines(file, "prompt file"), start=1)
    return [_of_line(line, take, f"prompt file {file}, line {number}") for number, line in lines]


def read_lines(file: Path, what: str, of: str = "a prompt") -> list[str]:
    """The lines of a file, without empty ones at its end."""
    lines = read_text(file, f"{what} {file}").split("\n")
    while lines and not lines[-1].strip():
        lines.pop()
    if not lines:
        raise ValueError(f"{what} {file} is empty; write {of} per line")
    return lines


def _of_line(line: str, take: Callable[[str], str], where: str) -> str:
    try:
        prompt = take(line)
    except (ValueError, TypeError, KeyError) as error:
        raise ValueError(f'{where} is no {{"prompt": "..."}}; mend or remove it') from error
    if not prompt.strip():
        raise ValueError(f"{where} is empty; remove it")
    return prompt


def _from_json(line: str) -> str:
    prompt = parse_json(line)["prompt"] if line.strip() else ""
    if not isinstance(prompt, str):
        raise TypeError(prompt)
    return prompt


DEFAULT_TOKENS = 512  # of a prompt, where nothing else is asked
TOKEN_BYTES = 8  # of a token of a prompt that is kept: a reference to a small number
PARAGRAPH = (
    "The ferry left the harbour an hour before sunrise, when the water was flat and the gulls were still asleep on the roofs.",
    "Nobody on deck spoke much, because the baker's daughter had brought warm bread and everyone was busy with it.",
    "In the hold lay nine crates of apples, a piano without strings, and a clock promised to the island's school.",
    "The captain, who had crossed here four thousand times, still wrote down wind and depth every quarter of an hour.",
    "A boy asked why the lamp on the far cliff turned, and an old surveyor drew him the answer with a wet finger on the bench.",
    "Light travels in straight lines, she said, but people do not, and so a lamp that turns is seen by more of them.",
    "Toward eight the fog came down like a curtain, and the engine was slowed until its beat could be counted by hand.",
    "They listened for the bell of the sandbank, then for the second, and steered between the two as ever.",
    "By noon the sky had cleared, the crates stood on the quay, and three men argued about how to lift a piano.",
    "One wanted a crane, one wanted patience, and the third went home and came back with eleven cousins and a door.",
    "The clock was hung above the blackboard, where it ran four minutes fast for the rest of the winter.",
    "Children learned to subtract by it, and the teacher decided that a mistake which everybody knows is as good as the truth.",
    "When the first storm closed the strait, the island counted its flour, candles and books, and found enough.",
    "Letters were written and kept in a tin until the ferry could sail, so that news arrived in bundles, already a little old.",
    "In spring the surveyor measured the coast again and found that the northern beach had moved by the length of a boat.",
    "She drew the new line in blue beside the old one in black, signed the map, and left room at the edge for the next.",
)


def check_room(num: int, prompt_len: int, room: int | None) -> None:
    """Refuses prompts that would not fit into memory, before they are made."""
    if room is not None and num * prompt_len * TOKEN_BYTES > room:
        takes = f"take {format_bytes(num * prompt_len * TOKEN_BYTES)} of memory"
        raise ValueError(
            f"{num} made-up prompts of {prompt_len} tokens {takes}, and {format_bytes(room)} may be held; give fewer or shorter"
        )


def made_up_prompts(num: int, prompt_len: int, tokenizer: Tokenizer, vocab: int, seed: int = 0) -> list[list[int]]:
    """Prompts of exactly this many tokens, readable, and different from each other as far as their length allows. A model
    without a tokenizer gets their bytes: they are there to be computed, not to be read."""
    if num < 1 or prompt_len < 1:
        raise ValueError(f"cannot make {num} prompts of {prompt_len} tokens; give 1 or more of each")
    draw, tokenizer = random.Random(seed), tokenizer if tokenizer.reads_texts else ByteTokenizer(vocab)
    start = [token % vocab for token in tokenizer.encode("")][: prompt_len - 1]
    sentences = [[token % vocab for token in tokenizer.encode_more(" " + sentence)] for sentence in PARAGRAPH]
    made: set[int] = set()  # hashes: the texts themselves would be kept twice
    prompts = []
    for _ in range(num):
        text = _new_text(draw, sentences, prompt_len - len(start), made)
        made.add(hash(text))
        prompts.append([*start, *text])
    return prompts


def _new_text(draw: random.Random, sentences: list[list[int]], length: int, made: set[int]) -> tuple[int, ...]:
    """A text not made before. Short ones soon repeat: then tokens of the text in any order have to do."""
    text = _story(draw, sentences, length)
    tries = 100
    while hash(text) in made and tries:
        text = tuple(draw.choice(draw.choice(sentences)) for _ in range(length))
        tries -= 1
    return text


def _story(draw: random.Random, sentences: list[list[int]], length: int) -> tuple[int, ...]:
    """The sentences in an order of its own, over and over, from a place of its own."""
    order = draw.sample(sentences, len(sentences))
    ids = [token for sentence in order for token in sentence]
    place = draw.randrange(len(ids))
    around = ids[place:] + ids[:place]
    return tuple((around * (length // len(around) + 1))[:length])
