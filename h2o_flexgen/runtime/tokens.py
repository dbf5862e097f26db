"""Text and tokens: the tokenizer of a model folder (or bytes, for a model without one), text that grows token by token, and the
state of one row of a generation: what it was given, what it has made, whether and why it is finished."""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Protocol, cast

from h2o_flexgen.runtime.output import Completion, StepLogprobs

if TYPE_CHECKING:
    from h2o_flexgen.runtime.sampling import SamplingParams

UNFINISHED = "\ufffd"  # what a decoder shows for a character of which bytes are still to come
UNFINISHED_AT_MOST = 3  # of these at the end can become a character: it has at most four bytes
CONTEXT_TOKENS = 6  # of the prompt: decoders that drop a leading space need something before the first new token
WINDOW_TOKENS = 16  # are decoded again with each new token, before the window moves on
WINDOW_TOKENS_AT_MOST = 64  # where no place to move to was found: this is no text

TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "spiece.model", "vocab.json", "vocab.txt")


class Tokenizer(Protocol):
    @property
    def vocab_size(self) -> int: ...

    @property
    def bos_id(self) -> int | None: ...

    @property
    def eos_ids(self) -> frozenset[int]:
        """Every one of them ends a row."""

    def encode(self, text: str) -> list[int]:
        """With the special tokens that the model expects around a prompt."""

    def decode(self, ids: Sequence[int]) -> str:
        """Without special tokens."""


class HfTokenizer:
    """The tokenizer of a model folder. Code that comes with a folder is never run, and nothing is fetched."""

    def __init__(self, folder: Path, config: object = None) -> None:
        from transformers import AutoTokenizer  # takes seconds to import

        try:
            self._tokenizer = AutoTokenizer.from_pretrained(str(folder), trust_remote_code=False, local_files_only=True)
        except Exception as error:  # whatever a broken file makes the library raise
            reason = str(error).strip().partition("\n")[0]
            raise ValueError(f"the tokenizer in {folder} cannot be read ({reason}); mend or remove its files") from error
        self.vocab_size = len(self._tokenizer)
        self.bos_id: int | None = self._tokenizer.bos_token_id
        self.eos_ids = _eos_ids(folder, config, self._tokenizer.eos_token_id)

    def encode(self, text: str) -> list[int]:
        return list(self._tokenizer(text, verbose=False)["input_ids"])  # how long it may be is the engine's business

    def decode(self, ids: Sequence[int]) -> str:
        """Spaces are left as the tokens have them: "cleaned up" text would change behind what is already shown."""
        return cast(str, self._tokenizer.decode(list(ids), skip_special_tokens=True, clean_up_tokenization_spaces=False))


class ByteTokenizer:
    """For models without tokenizer files: a byte is a token. Every text can be encoded and every id decoded, at any vocabulary;
    ids that stand for no byte show as numbers. There is no end of sequence."""

    SPECIALS = 4  # ids 0 to 3 have a meaning in most vocabularies

    def __init__(self, vocab: int) -> None:
        self.vocab_size = vocab
        self.bos_id: int | None = None
        self.eos_ids: frozenset[int] = frozenset()
        self._first = self.SPECIALS if vocab > self.SPECIALS else 0

    def encode(self, text: str) -> list[int]:
        return [self._first + byte % (self.vocab_size - self._first) for byte in text.encode("utf-8", errors="replace")]

    def decode(self, ids: Sequence[int]) -> str:
        return b"".join(map(self._bytes_of, ids)).decode("utf-8", errors="replace")

    def _bytes_of(self, token: int) -> bytes:
        byte = token - self._first
        if byte < 0:
            return b""
        return bytes((byte,)) if byte < 256 else f"<{token}>".encode()


def load_tokenizer(folder: Path | None, config: object, vocab: int) -> Tokenizer:
    """`config` is the model's, as an object or as a mapping: it may name the end of sequence."""
    if folder is None or not any((folder / name).is_file() for name in TOKENIZER_FILES):
        return ByteTokenizer(vocab)
    return HfTokenizer(folder, config)


def _eos_ids(folder: Path, config: object, of_tokenizer: int | None) -> frozenset[int]:
    """The first that says so: generation_config.json, the model's config, the tokenizer."""
    of_config = config.get("eos_token_id") if isinstance(config, Mapping) else getattr(config, "eos_token_id", None)
    for given in (_generation_config(folder).get("eos_token_id"), of_config, of_tokenizer):
        if given is not None:
            return frozenset(given if isinstance(given, (list, tuple)) else (given,))
    return frozenset()


def _generation_config(folder: Path) -> Mapping[str, object]:
    path = folder / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{path} is no JSON ({error}); mend or remove it") from error
    return found if isinstance(found, dict) else {}


class Detokenizer:
    """Text that grows token by token: only a short window of the last tokens is decoded again for each new one, and characters
    of which bytes are missing are held back. The pieces joined are the text; it goes on where the prompt ends."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> None:
        self._tokenizer = tokenizer
        self._window = _context(tokenizer, prompt_ids)
        self._text = tokenizer.decode(self._window)
        self._shown = _length_shown(self._text)  # characters of the window's text that were handed out
        self._clean = self._last_clean = 0  # the last two places that no character spans: a window may start there

    def add(self, token: int) -> str:
        """The text that is certain now."""
        self._window.append(token)
        self._text = self._tokenizer.decode(self._window)
        held = _unfinished(self._text)  # all of them: while one byte misses, some decoders show none of the characters before
        is_garbage = len(self._window) > WINDOW_TOKENS_AT_MOST
        piece = self._text[self._shown : _length_shown(self._text) if is_garbage else len(self._text) - held]
        self._shown += len(piece)
        if piece and not held:
            self._clean, self._last_clean = self._last_clean, len(self._window)
        if len(self._window) > WINDOW_TOKENS and self._clean and not held:
            self._move_to(self._clean)
        elif is_garbage:
            self._move_to(len(self._window) - WINDOW_TOKENS)
        return piece

    def rest(self) -> str:
        """What was held back, at the end: a character that will never be complete."""
        piece, self._shown = self._text[self._shown :], len(self._text)
        return piece

    def _move_to(self, start: int) -> None:
        """The window starts here from now on: before the last clean place, so that it holds some text that was shown."""
        held = len(self._text) - self._shown
        self._window = self._window[start:]
        self._text = self._tokenizer.decode(self._window)
        self._shown = max(0, len(self._text) - held)
        self._clean, self._last_clean = 0, max(0, self._last_clean - start)


def _context(tokenizer: Tokenizer, prompt_ids: Sequence[int]) -> list[int]:
    """The last tokens of the prompt, from where a character begins."""
    for length in range(CONTEXT_TOKENS, 0, -1):
        ids = list(prompt_ids[-length:])
        if UNFINISHED not in tokenizer.decode(ids):
            return ids
    return list(prompt_ids[-CONTEXT_TOKENS:])


def _unfinished(text: str) -> int:
    return len(text) - len(text.rstrip(UNFINISHED))


def _length_shown(text: str) -> int:
    """Without the characters at its end that the next token may still complete."""
    return len(text) - min(UNFINISHED_AT_MOST, _unfinished(text))


def decode_new(tokenizer: Tokenizer, prompt_ids: Sequence[int], ids: Sequence[int]) -> str:
    """All at once what a Detokenizer gives piece by piece (bytes that are no text may show differently)."""
    context = _context(tokenizer, prompt_ids)
    return tokenizer.decode([*context, *ids])[_length_shown(tokenizer.decode(context)) :]


class StopChecker:
    """Looks for stop strings in text that comes in pieces, however the pieces cut them. What may become one is held back."""

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.stopped = False

    def add(self, piece: str) -> str:
        """The text that surely stands before any stop string."""
        text = self._held + piece
        found = [place for stop in self._stops if (place := text.find(stop)) >= 0]
        if found:
            self._held, self.stopped = "", True
            return text[: min(found)]
        begun = self._begun(text)
        self._held = text[len(text) - begun :]
        return text[: len(text) - begun]

    def rest(self) -> str:
        held, self._held = self._held, ""
        return held

    def _begun(self, text: str) -> int:
        """Length of the longest end of the text that a stop string begins with."""
        longest = max(map(len, self._stops), default=0) - 1
        for length in range(min(longest, len(text)), 0, -1):
            if any(stop.startswith(text[-length:]) for stop in self._stops):
                return length
        return 0


class RowText:
    """The text of a row while it grows: decoded, searched for stop strings, and never taken back once handed out."""

    def __init__(self, tokenizer: Tokenizer, prompt_ids: Sequence[int], stops: Sequence[str]) -> None:
        self._detokenizer = Detokenizer(tokenizer, prompt_ids)
        self._stops = StopChecker(stops)
        self._pieces: list[str] = []

    @property
    def stopped(self) -> bool:
        return self._stops.stopped

    @property
    def text(self) -> str:
        return "".join(self._pieces)

    def add(self, token: int) -> str:
        return self._keep(self._stops.add(self._detokenizer.add(token)))

    def finish(self) -> str:
        """What was held back, unless the text has stopped."""
        if self.stopped:
            return ""
        last = self._stops.add(self._detokenizer.rest())
        return self._keep(last if self.stopped else last + self._stops.rest())

    def _keep(self, piece: str) -> str:
        if piece:
            self._pieces.append(piece)
        return piece


class RowState:
    """One sequence of a generation. Text is made per token only for rows that need it: with stop strings, or streamed."""

    def __init__(
        self,
        index: int,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        tokenizer: Tokenizer,
        prompt: str | None = None,
        streamed: bool = False,
    ) -> None:
        self.index = index
        self.params = params
        self.prompt = prompt
        self.seen = list(prompt_ids)  # prompt and generated ids
        self.prompt_len = len(self.seen)
        self.logprobs: list[StepLogprobs] = []
        self.finish_reason: str | None = None
        self._tokenizer = tokenizer
        self._ends = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else tokenizer.eos_ids)
        needs_text = streamed or bool(params.stop_strings)
        self._text = RowText(tokenizer, self.seen, params.stop_strings) if needs_text else None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    @property
    def prompt_ids(self) -> list[int]:
        return self.seen[: self.prompt_len]

    @property
    def token_ids(self) -> list[int]:
        return self.seen[self.prompt_len :]

    @property
    def num_generated(self) -> int:
        return len(self.seen) - self.prompt_len

    def push(self, token: int, logprobs: StepLogprobs | None = None) -> str | None:
        """Takes the token that was generated. The new piece of text for rows whose text is followed, else None."""
        assert not self.finished, f"row {self.index} is finished"
        self.seen.append(token)
        if logprobs is not None:
            self.logprobs.append(logprobs)
        if token in self._ends:
            return self._finish("stop")
        piece = None if self._text is None else self._text.add(token)
        if self._text is not None and self._text.stopped:
            self.finish_reason = "stop"
        elif self.num_generated == self.params.max_tokens:
            return self._finish("length", piece)
        return piece

    def completion(self) -> Completion:
        assert self.finish_reason is not None, f"row {self.index} is not finished"
        return Completion(
            index=self.index,
            prompt=self.prompt,
            prompt_token_ids=tuple(self.prompt_ids),
            text=self._whole_text(),
            token_ids=tuple(self.token_ids),
            logprobs=None if self.params.logprobs is None else tuple(self.logprobs),
            finish_reason=self.finish_reason,
        )

    def _finish(self, reason: str, piece: str | None = "") -> str | None:
        self.finish_reason = reason
        if self._text is None:
            return None
        rest = self._text.finish()
        if self._text.stopped:
            self.finish_reason = "stop"
        return (piece or "") + rest

    def _whole_text(self) -> str:
        if self._text is not None:
            return self._text.text
        ids = self.token_ids
        return decode_new(self._tokenizer, self.prompt_ids, ids[:-1] if ids[-1] in self._ends else ids)


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


def synthetic_prompts(num: int, prompt_len: int, tokenizer: Tokenizer, vocab: int, seed: int = 0) -> list[list[int]]:
    """Prompts of exactly this many tokens, readable, and different from each other as far as their length allows."""
    if num < 1 or prompt_len < 1:
        raise ValueError(f"cannot make {num} prompts of {prompt_len} tokens; give 1 or more of each")
    draw = random.Random(seed)
    start = [token % vocab for token in tokenizer.encode("")][: prompt_len - 1]
    sentences = [[token % vocab for token in _without_start(tokenizer, " " + sentence)] for sentence in PARAGRAPH]
    made: set[tuple[int, ...]] = set()
    prompts = []
    for _ in range(num):
        text = _new_text(draw, sentences, prompt_len - len(start), made)
        made.add(text)
        prompts.append([*start, *text])
    return prompts


def _without_start(tokenizer: Tokenizer, text: str) -> list[int]:
    """The text's own tokens: without what the tokenizer puts before every text."""
    start, ids = tokenizer.encode(""), tokenizer.encode(text)
    return ids[len(start) :] if ids[: len(start)] == start else ids


def _new_text(draw: random.Random, sentences: list[list[int]], length: int, made: set[tuple[int, ...]]) -> tuple[int, ...]:
    """A text not made before. Short ones soon repeat: then tokens of the text in any order have to do."""
    text = _story(draw, sentences, length)
    tries = 100
    while text in made and tries:
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
