"""Prompts that are made up: readable, of one length, and every one different."""

from __future__ import annotations

import random

from h2o_flexgen.core.units import format_bytes
from h2o_flexgen.text.tokenizer import ByteTokenizer, Tokenizer

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
