"""What transformers makes of a tokenizer.json, by the class that a folder names. It takes the file as it is, or builds a
tokenizer anew from its vocabulary. Both give the same tokens if the file has the parts that the class has. The class of LLaMA
has other parts than its files, from release 5 on: they take the place of the file's.

Where a folder has the file tokenizer.model of SentencePiece alone, the parts of a tokenizer.json are made from it. That file is
a message of protocol buffers: fields with a number, a kind and a value, of which the pieces are read.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from typing import Any, NamedTuple

from h2o_flexgen.core.hints import shown
from h2o_flexgen.text.gguf_tokenizer import QWEN2, QWEN35, SPACE_MARK

# -- tokenizer.model ---------------------------------------------------------------------------------------------------

PIECES, TEXT, KIND = 1, 1, 3  # numbers of fields: of the file, and of a piece
NORMAL, CONTROL, USER_DEFINED = 1, 3, 4  # kinds of pieces
VARINT, EIGHT_BYTES, LENGTH, FOUR_BYTES = 0, 1, 2, 5  # kinds of fields
START, END, ADDED = "bos_token", "eos_token", "added_tokens_decoder"
LONGEST_PIECE = 512  # characters; every place where a piece could be parted is looked at
PLAIN = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
FIXED = {EIGHT_BYTES: struct.calcsize("<q"), FOUR_BYTES: struct.calcsize("<i")}


class Piece(NamedTuple):
    text: str
    kind: int


def said_by_pieces(file: bytes, settings: Mapping[str, Any], roles: Mapping[str, str]) -> dict[str, Any]:
    """What tokenizer.json would say of this file. `roles` are the tokens with one, by their names."""
    pieces = [_piece(value) for number, value in _fields(file) if number == PIECES]
    vocab = {piece.text: token for token, piece in enumerate(pieces)}
    added = {piece.text: {"special": piece.kind == CONTROL} for piece in pieces if piece.kind in (CONTROL, USER_DEFINED)}
    added |= {text: {"special": True} for text in roles.values()}
    added |= {one["content"]: {key: one[key] for key in (*PLAIN, "special")} for one in (settings.get(ADDED) or {}).values()}
    return {
        "model": {"type": "BPE", "vocab": vocab, "merges": [*map(list, _merges(vocab))]},
        "added_tokens": sorted(
            ({"id": vocab[text], **PLAIN, **own, "content": text} for text, own in added.items()), key=_place
        ),
        **dict.fromkeys(("normalizer", "pre_tokenizer", "decoder", "truncation", "padding")),
        "post_processor": _around_texts(vocab, settings, roles),
    }


def _place(added: Mapping[str, Any]) -> int:
    return int(added["id"])


def _around_texts(vocab: Mapping[str, int], settings: Mapping[str, Any], roles: Mapping[str, str]) -> dict[str, object]:
    """The tokens before and behind texts: none where the settings do not ask for them."""
    before, behind = ([roles[role]] if settings.get(f"add_{role}") and role in roles else [] for role in (START, END))
    single, second = (
        [*_named(before, at), {"Sequence": {"id": "AB"[at], "type_id": at}}, *_named(behind, at)] for at in (0, 1)
    )
    known = {text: {"id": text, "ids": [vocab[text]], "tokens": [text]} for text in (*before, *behind)}
    return {"type": "TemplateProcessing", "single": single, "pair": [*single, *second], "special_tokens": known}


def _named(tokens: Sequence[str], text: int) -> list[dict[str, object]]:
    return [{"SpecialToken": {"id": token, "type_id": text}} for token in tokens]


def _merges(vocab: Mapping[str, int]) -> list[tuple[str, str]]:
    """The pairs of pieces that make a piece. Those that make an earlier piece come first, then those with shorter ones."""
    if len(longest := max(vocab, key=len, default="")) > LONGEST_PIECE:
        raise ValueError(f"the piece {shown(longest)} is longer than {LONGEST_PIECE} characters")
    pairs = [(vocab[text], *pair) for text in vocab for pair in _halves(text) if pair[0] in vocab and pair[1] in vocab]
    pairs.sort(key=lambda pair: (pair[0], len(pair[1]), len(pair[2])))
    return [(left, right) for _, left, right in pairs]


def _halves(text: str) -> Iterator[tuple[str, str]]:
    return ((text[:place], text[place:]) for place in range(1, len(text)))


def _piece(message: bytes) -> Piece:
    said = dict(_fields(message))
    kind = said.get(KIND, NORMAL)
    return Piece(bytes(said[TEXT]).decode(), int(kind))


def _fields(message: bytes) -> Iterator[tuple[int, Any]]:
    """The number and the value of each field."""
    place = 0
    while place < len(message):
        key, place = _varint(message, place)
        kind = key & 7
        if kind == VARINT:
            value, place = _varint(message, place)
            yield key >> 3, value
            continue
        length, place = _varint(message, place) if kind == LENGTH else (FIXED[kind], place)
        if place + length > len(message):
            raise ValueError("it is cut off")
        yield key >> 3, message[place : place + length]
        place += length


def _varint(message: bytes, place: int) -> tuple[int, int]:
    """A whole number, seven bits a byte, the lowest first; and the place behind it."""
    value = shift = 0
    while True:
        byte = message[place]
        value, shift, place = value | (byte & 0x7F) << shift, shift + 7, place + 1
        if byte < 0x80:
            return value, place


# -- tokenizer.json ----------------------------------------------------------------------------------------------------

SETTINGS_LEFT = ("auto_map", "fix_mistral_regex", "split_special_tokens", "model_specific_special_tokens")
ADDS_SPACE = "add_prefix_space"
ROLES = tuple(f"{role}_token" for role in ("bos", "eos", "unk", "sep", "pad", "cls", "mask"))
AS_IT_IS = ("PreTrainedTokenizer", "TokenizersBackend")
# Models of which transformers takes the file as it is, whatever class a folder names; those that have one class, whatever it
# names; and those that have the named class, even one with parts of its own.
TAKEN_AS_THEY_ARE = (
    *("mistral", "mixtral", "ministral", "ministral3", "mistral3", "phi3", "ernie4_5", "ernie4_5_moe", "minimax_m2"),
    *("granite", "granitemoe", "granitemoehybrid", "stablelm", "olmo2", "olmo3", "glm4", "glm4_moe", "glm4_moe_lite"),
    "kimi_linear",
)
OF_ONE_CLASS: Mapping[str, str] = {
    "qwen2": "Qwen2Tokenizer",
    **dict.fromkeys(("qwen3_5", "qwen3_5_moe", "qwen3_5_moe_text"), "Qwen3_5Tokenizer"),
}
OF_THE_NAMED_CLASS = (
    *("llama", "gemma", "gemma2", "gemma3", "gemma3_text", "gpt_neox", "olmo", "olmoe", "mpt"),
    *("falcon", "deepseek_v2", "deepseek_v3", "smollm3", "arcee", "apertus", "bamba"),
)
# The release of transformers that builds tokenizers of LLaMA with other parts than their files have. Those before put tokens
# around texts of LLaMA, Gemma and GPT-NeoX as settings say, whatever their files do.
REBUILT_FROM = 5
LARGE = 100_000  # tokens: of larger vocabularies of Mistral transformers says that their rule may be wrong
SUFFIXES = "end_of_word_suffix", "continuing_subword_prefix"
OF_MODELS = ("dropout", "unk_token", "fuse_unk", "byte_fallback", "ignore_merges", *SUFFIXES)
LLAMA, OF_BYTES = "LlamaTokenizer", "ByteLevel"
ROLES_OF_LLAMA: Mapping[str, str] = dict(zip(ROLES, ("<s>", "</s>", "<unk>")))


def _cut_at(pattern: str) -> dict[str, object]:
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return _in_order("pretokenizers", cut, _of_bytes(finds_words=False))


def _of_bytes(finds_words: bool) -> dict[str, object]:
    return {"type": OF_BYTES, ADDS_SPACE: False, "use_regex": finds_words}


def _in_order(name: str, *parts: Mapping[str, object]) -> dict[str, object]:
    return {"type": "Sequence", name: [*parts]}


def _replacing(text: str, content: str) -> dict[str, object]:
    return {"type": "Replace", "pattern": {"String": text}, "content": content}


BEFORE_SPACES = {"type": "Split", "pattern": {"String": " "}, "behavior": "MergedWithPrevious", "invert": False}
JOINED = (_replacing(SPACE_MARK, " "), {"type": "ByteFallback"}, {"type": "Fuse"})
STRIPPED = {"type": "Strip", "content": " ", "start": 1, "stop": 0}
OF_PIECES = {"fuse_unk": True, "byte_fallback": True}
COMPOSED = {"type": "NFC"}


@dataclass(frozen=True)
class BuiltParts:
    """What a class has around its vocabulary, in the words of tokenizer.json."""

    normalizer: object
    pre_tokenizer: object
    decoder: object = field(default_factory=lambda: {"type": OF_BYTES})
    model: Mapping[str, object] = field(default_factory=dict)  # what it says of BPE beside its vocabulary
    names_unknown: bool = False  # to the model
    roles: Mapping[str, str] = field(default_factory=dict)  # its tokens where a folder says nothing of them
    have_to_be_said: tuple[str, ...] = ()
    adds_tokens: bool = True  # to texts, as the file says

    def are_in(self, said: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
        """Whether a file has them already."""
        unknown = text_of(settings.get("unk_token", self.roles.get("unk_token"))) if self.names_unknown else None
        wanted, model = {**self.model, "unk_token": unknown}, said["model"]
        found = [_bare(said["normalizer"]), _bare(said["pre_tokenizer"]), _of_decoder(said["decoder"])]
        return (
            model["type"] == "BPE"
            and all((model.get(key) or None) == wanted.get(key) for key in OF_MODELS)
            and found == [self.normalizer, self.pre_tokenizer, self.decoder]
            and (self.adds_tokens or not _adds_tokens(said["post_processor"]))
        )


OF_QWEN = BuiltParts(COMPOSED, _cut_at(QWEN2), have_to_be_said=(*ROLES[:3], "pad_token"))
BUILT_ANEW: Mapping[str, BuiltParts] = {
    "GPT2Tokenizer": BuiltParts(None, _of_bytes(finds_words=True), have_to_be_said=ROLES[:3]),
    "Qwen2Tokenizer": OF_QWEN,
    "Qwen3_5Tokenizer": replace(OF_QWEN, pre_tokenizer=_cut_at(QWEN35)),
    "GPTNeoXTokenizer": BuiltParts(
        COMPOSED,
        _of_bytes(finds_words=True),
        roles={**dict.fromkeys(ROLES[:3], "<|endoftext|>"), "pad_token": "<|padding|>"},
        adds_tokens=False,
    ),
    "GemmaTokenizer": BuiltParts(
        _replacing(" ", SPACE_MARK),
        BEFORE_SPACES,
        _in_order("decoders", *JOINED),
        OF_PIECES,
        names_unknown=True,
        roles={f"{role}_token": f"<{role}>" for role in ("unk", "bos", "eos", "pad", "mask")},
    ),
}
ANY_MODEL = ("GPT2Tokenizer", *OF_ONE_CLASS.values())  # that names these has them


class Understood(NamedTuple):
    """What transformers makes of tokenizer.json."""

    said: Mapping[str, Any]
    is_built: bool = False  # anew: then tokens with a role are special ones
    roles: Mapping[str, str] = {}  # tokens of which the settings say nothing


def understood(said: Mapping[str, Any], settings: Mapping[str, Any], model_type: object) -> Understood | None:
    """None: transformers alone knows."""
    kind = settings["tokenizer_class"].removesuffix("Fast")
    is_rebuilt = int(version("transformers").partition(".")[0]) >= REBUILT_FROM
    if any(settings.get(key) for key in SETTINGS_LEFT) or OF_ONE_CLASS.get(str(model_type), kind) != kind:
        return None
    if kind in AS_IT_IS or (is_rebuilt and model_type in TAKEN_AS_THEY_ARE):
        return None if _is_changed(said, settings, model_type) else Understood(said)
    if kind not in ANY_MODEL and (not is_rebuilt or model_type not in (None, *OF_THE_NAMED_CLASS)):
        return None
    if kind == LLAMA:
        return _of_llama(said, settings)
    parts = BUILT_ANEW.get(kind)
    if parts is None or settings.get(ADDS_SPACE) or any(role not in settings for role in parts.have_to_be_said):
        return None
    return Understood(said, is_built=True, roles=parts.roles) if parts.are_in(said, settings) else None


def _is_changed(said: Mapping[str, Any], settings: Mapping[str, Any], model_type: object) -> bool:
    """Whether a file that is taken may be changed then, or be warned of."""
    adds_space = settings.get(ADDS_SPACE) and ADDS_SPACE in (said["pre_tokenizer"] or {})
    is_mistral = isinstance(model_type, str) and model_type.startswith(("mistral", "ministral", "mixtral"))
    return bool(adds_space) or (is_mistral and len(said["model"]["vocab"]) > LARGE)


def _of_llama(said: Mapping[str, Any], settings: Mapping[str, Any]) -> Understood | None:
    """The library takes files with bytes as they are. In others a pre-tokenizer marks spaces, not a normalizer."""
    if OF_BYTES in _kinds((said["pre_tokenizer"], said["decoder"], said["normalizer"], said["post_processor"])):
        return None if _is_changed(said, settings, None) else Understood(said)
    model, adds_space = said["model"], settings.get(ADDS_SPACE) is not False
    if model["type"] != "BPE":
        return None
    scheme = ("always" if settings.get("legacy") else "first") if adds_space else "never"
    anew: dict[str, Any] = {
        **said,
        "model": {**model, **dict.fromkeys(OF_MODELS), **OF_PIECES, "ignore_merges": False},
        "normalizer": None,
        "pre_tokenizer": {"type": "Metaspace", "replacement": SPACE_MARK, "prepend_scheme": scheme, "split": False},
        "decoder": _in_order("decoders", *JOINED, *([STRIPPED] if adds_space else [])),
    }
    if (added := settings.get(ADDED)) is not None:
        anew["added_tokens"] = [{"id": token, **added[str(token)]} for token in sorted(map(int, added))]
    return Understood(anew, is_built=True, roles=ROLES_OF_LLAMA)


def _kinds(part: object) -> set[object]:
    """The types of all parts within some."""
    if isinstance(part, Mapping):
        return {part.get("type")}.union(*map(_kinds, part.values()))
    return set().union(*map(_kinds, part)) if isinstance(part, (list, tuple)) else set()


def _adds_tokens(part: Mapping[str, Any] | None) -> bool:
    """Whether a post-processor may add tokens to texts."""
    if part is None or part["type"] == OF_BYTES:
        return False
    if part["type"] == "Sequence":
        return any(map(_adds_tokens, part["processors"]))
    return part["type"] != "TemplateProcessing" or bool(part["special_tokens"])


def _of_decoder(part: Mapping[str, object]) -> object:
    return {"type": OF_BYTES} if part["type"] == OF_BYTES else part


def _bare(part: object) -> object:
    """A part without what says nothing of its tokens."""
    if isinstance(part, list):
        return [_bare(one) for one in part]
    return {key: _bare(one) for key, one in part.items() if key != "trim_offsets"} if isinstance(part, dict) else part


def text_of(token: object) -> str | None:
    """Tokens are texts, or have one among what else is said of them."""
    if isinstance(token, Mapping):
        return str(token["content"])
    return None if token is None else str(token)
