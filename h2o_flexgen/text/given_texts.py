"""Texts that commands are given: prompts, from flags, from files or made up, and texts to measure a model on, which are turned
into tokens and cut into windows."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from h2o_flexgen.checkpoints.model_places import held_out_prose
from h2o_flexgen.core.files import DOCUMENT, JSON_LINES, local_path, may_hold_texts, parse_json, read_text
from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.text.tokenizer import ByteTokenizer, Tokenizer


def given_prompts(texts: Sequence[str] | None, file: str | None, num: int | None = None) -> list[str]:
    """The prompts of --prompt, then those of the file, only the first `num` of them. The list is empty if none are given."""
    if texts is None and file is None:
        return []
    prompts = [*(texts or ()), *(read_prompts(local_path(file)) if file is not None else ())]
    for place, prompt in enumerate(prompts):
        if not prompt.strip():
            raise ValueError(f"prompt {place} is empty; every prompt needs at least one token")
    if num is not None and not 1 <= num <= len(prompts):
        given = (
            "1 prompt is given; give 1" if len(prompts) == 1 else f"{len(prompts)} prompts are given; give 1 to {len(prompts)}"
        )
        raise ValueError(f"--num-prompts is {num}, but {given}, or leave it out")
    return prompts[:num]


def read_prompts(file: Path) -> list[str]:
    refuse_other_names(file, "prompt file", "a prompt")
    take = _from_json if file.suffix == JSON_LINES else str
    lines = enumerate(read_lines(file, "prompt file"), start=1)
    return [_of_line(line, take, f"prompt file {file}, line {number}") for number, line in lines]


def refuse_other_names(file: Path, what: str, of: str) -> None:
    """Refuses a file that is called neither as texts nor as JSON lines are: each of its lines would be taken for a text."""
    if file.suffix == DOCUMENT:
        forms = f"{of} per line, as a text (.txt) or as JSON (.jsonl)"
        raise ValueError(f"{what} {file} is called .json, as one value of JSON is, and is read line by line; give {forms}")
    if file.suffix != JSON_LINES and not may_hold_texts(file):
        would = f"is called {file.suffix}, and each of its lines would be {of}"
        raise ValueError(f"{what} {file} {would}; if they are, call it .txt, or for JSON .jsonl")


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


# -- prompts that are made up: readable, of one length, and every one different ----------------------------------------

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


# -- texts to measure a model on ---------------------------------------------------------------------------------------

USUAL_TOKENS, USUAL_TEXTS = 512, 8  # of texts that are read twice, and so many of them


@dataclass(frozen=True)
class Text:
    name: str
    content: str

    @classmethod
    def read(cls, file: str) -> Text:
        content = read_text(local_path(file), f"text {file}")
        if not content.strip():
            raise ValueError(f"text {file} is empty; give a file with a text in it")
        return cls(file, content)

    @classmethod
    def held_out(cls) -> Text:
        """Prose that comes with the package and that its own models have never seen."""
        return cls("of the package", held_out_prose())


@dataclass(frozen=True)
class Windows:
    ids: tuple[tuple[int, ...], ...]
    of_texts: int  # all windows of the texts; `ids` may be fewer


def start_tokens(tokenizer: Tokenizer) -> list[int]:
    """The tokens that every text begins with."""
    text = "a text"
    whole, plain = tokenizer.encode(text), tokenizer.encode_more(text)
    begun = len(whole) - len(plain)
    return whole[:begun] if whole[begun:] == plain else []


def windows(texts: Sequence[Text], tokenizer: Tokenizer, length: int, count: int, flag: str = "--window") -> Windows:
    """At most `count` whole windows that do not overlap, taken evenly from all texts; each begins as a text does.
    `flag` is the one that says how long they are."""
    start = start_tokens(tokenizer)
    own = length - len(start)
    found = []
    for text in texts:
        ids = tokenizer.encode_more(text.content)
        if len(ids) < own:
            raise ValueError(
                f"text {text.name} has {len(ids) + len(start)} tokens, but a window takes {length}; "
                f"give a longer text or a smaller {flag}"
            )
        found += [(*start, *ids[place : place + own]) for place in range(0, len(ids) - own + 1, own)]
    taken = min(count, len(found))
    return Windows(tuple(found[place * len(found) // taken] for place in range(taken)), len(found))


def described(texts: Sequence[Text], count: int, tokens: int) -> str:
    """What was read, for people."""
    read = f"{count} texts" if count > 1 else "1 text"
    return f"{read} of {tokens} tokens: {', '.join(Path(text.name).stem for text in texts)}"


def checksum(*parts: object) -> str:
    """Identifies the measured data."""
    return blake2b(repr(parts).encode(), digest_size=8).hexdigest()
