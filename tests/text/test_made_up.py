"""Prompts that are made up: of the length asked for, words where the tokenizer has them, and no two alike."""

from __future__ import annotations

import pytest

from h2o_flexgen.text.given_texts import check_room, made_up_prompts
from h2o_flexgen.text.tokenizer import ByteTokenizer, Tokenizer
from tests.helpers.real_tokenizers import VOCABS


@pytest.mark.parametrize("prompt_len", [1, 2, 5, 64, 5000])
def test_made_up_prompts_have_the_length_and_differ(tokenizer_kind: str, tokenizer: Tokenizer, prompt_len: int) -> None:
    num, vocab = 8 if prompt_len < 3 else 40, VOCABS[tokenizer_kind]
    prompts = made_up_prompts(num, prompt_len, tokenizer, vocab)
    assert [len(prompt) for prompt in prompts] == [prompt_len] * num
    assert len(set(map(tuple, prompts))) == num
    assert all(0 <= token < vocab for prompt in prompts for token in prompt)
    if prompt_len > 1 and tokenizer_kind != "bytes":  # the tokenizer's start token
        assert {prompt[0] for prompt in prompts} == {tokenizer.encode("")[0]}


def test_made_up_prompts_are_words_and_a_seed_repeats_them(tokenizer_kind: str, tokenizer: Tokenizer) -> None:
    first, again, other = (made_up_prompts(3, 300, tokenizer, VOCABS[tokenizer_kind], seed) for seed in (1, 1, 2))
    assert first == again
    assert first != other
    assert " the " in tokenizer.decode(first[0])


def test_made_up_prompts_stay_within_a_smaller_vocabulary() -> None:
    prompts = made_up_prompts(10, 20, ByteTokenizer(300), vocab=17)
    assert all(token < 17 for prompt in prompts for token in prompt)


def test_more_prompts_than_there_are_texts_still_come() -> None:
    assert len(made_up_prompts(50, 1, ByteTokenizer(300), vocab=5)) == 50


def test_no_prompts_or_empty_ones_are_refused() -> None:
    for num, length in ((0, 5), (5, 0)):
        with pytest.raises(ValueError, match="give 1 or more"):
            made_up_prompts(num, length, ByteTokenizer(300), 300)


def test_more_prompts_than_memory_holds_are_refused_before_one_is_made() -> None:
    check_room(1_000_000, 64, 10**9)
    check_room(10**7, 10**7, None)
    with pytest.raises(ValueError, match=r"10000000 made-up prompts of 10000000 tokens take 800.00 TB of memory, and 1.00 GB"):
        check_room(10**7, 10**7, 10**9)
