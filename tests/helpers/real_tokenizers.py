"""Real tokenizers of three kinds: byte-level BPE, byte fallback, plain bytes. They are trained and saved here; nothing is
fetched."""

from __future__ import annotations

from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from h2o_flexgen.text import tokenizer
from h2o_flexgen.text.load_tokenizer import FolderTokenizer
from h2o_flexgen.text.tokenizer import ByteTokenizer

SENTENCES = [
    "The quick brown fox jumps over the lazy dog.",
    "Pack my box with five dozen jugs, then rest.",
    "hello world hello",
]
TEXTS = [
    "hello world",
    "naïve café: über 10 €",
    "👩‍🚀🎉🎉 done",
    "日本語のテキスト",
    "  two  spaces \n\tand lines\n",
    "a\u200db 😀" * 30,
]


def save_byte_level(folder: Path) -> None:
    """Saves a tokenizer as of OPT and GPT-NeoX, where a token may be a part of a character."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=320, special_tokens=["<s>", "</s>"], initial_alphabet=alphabet, show_progress=False
    )
    bpe.train_from_iterator(SENTENCES, trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>").save_pretrained(folder)


def save_byte_fallback(folder: Path) -> None:
    """Saves one as of LLaMA: a space before every word, bytes for unknown characters, no first space in decoding."""
    pieces = ["<unk>", "<s>", "</s>"] + [f"<0x{byte:02X}>" for byte in range(256)] + ["▁"]
    pieces += [chr(code) for code in range(33, 127)]
    bpe = Tokenizer(models.BPE({piece: at for at, piece in enumerate(pieces)}, [], unk_token="<unk>", byte_fallback=True))
    bpe.add_special_tokens([AddedToken(name, special=True) for name in pieces[:3]])
    bpe.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    bpe.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 1)])
    PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>", unk_token="<unk>").save_pretrained(folder)


KINDS = ("byte_level", "byte_fallback", "bytes")
VOCABS = {"byte_level": 320, "byte_fallback": 354, "bytes": 50_000}


def saved_tokenizer(kind: str, folder: Path) -> tokenizer.Tokenizer:
    if kind == "bytes":
        return ByteTokenizer(VOCABS[kind])
    {"byte_level": save_byte_level, "byte_fallback": save_byte_fallback}[kind](folder)
    return FolderTokenizer(folder)


def ids_after(of: tokenizer.Tokenizer, prompt: str, text: str) -> tuple[list[int], list[int]]:
    """The ids of a prompt and of the text that continues it."""
    prompt_ids, whole = of.encode(prompt), of.encode(prompt + text)
    assert whole[: len(prompt_ids)] == prompt_ids
    return prompt_ids, whole[len(prompt_ids) :]
