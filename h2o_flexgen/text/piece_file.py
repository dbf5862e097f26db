"""The file tokenizer.model of SentencePiece, as tokenizer.json would say it. It is a message of protocol buffers: fields with a
number, a kind and a value, of which the pieces are read."""

from __future__ import annotations

import struct
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from h2o_flexgen.core.hints import shown

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
