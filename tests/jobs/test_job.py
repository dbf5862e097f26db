"""The job that an engine is given: sizes of all requests, and each of them when its turn comes."""

from __future__ import annotations

import pickle
from array import array
from dataclasses import replace
from pathlib import Path

from h2o_flexgen.core.prefix_groups import PrefixFinder, PrefixGroups, SharedPrefix
from h2o_flexgen.engine.job import RequestSize
from h2o_flexgen.jobs.file_job import FileJob, LineReading
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.text.dialogue import Script
from h2o_flexgen.text.prompts import Prompt
from tests.jobs.made import BYTES, POSITIONS, checked, size_of

READING = LineReading(BYTES, Script(BYTES), size_of)


def test_requests_have_sizes_and_are_read_again(tmp_path: Path) -> None:
    found = checked(
        tmp_path,
        {"prompt": "abc", "max_tokens": 5},
        {"prompt": "too long for this model" * 3},
        {"prompt": [7, 8], "n": 2, "temperature": 1, "seed": 3},
        {"messages": [{"role": "user", "content": "Hi"}], "stop": "."},
    )
    heard: list[int] = []
    job = FileJob.of(found.index, iter(range(4)), READING, on_read=heard.append)
    assert heard == [1, 2, 3, 4]
    assert list(job.sizes) == [job.sizes[place] for place in range(3)] == job.sizes[:]
    assert job.sizes[:2] == [RequestSize(3, 5), RequestSize(2, 32, 2)]
    assert job.places.tolist() == [0, 2, 3] and job.refused.tolist() == [1]
    request = job.request(1)
    assert (request.prompt, request.index) == (Prompt(None, (7, 8)), 2), "the number of its line, counted from 0"
    assert request.params == SamplingParams(n=2, temperature=1, seed=3)
    chat = job.request(2)
    assert isinstance(chat.prompt, Prompt) and chat.prompt.text == "User: Hi\nAssistant:"
    assert chat.params is not None and chat.params.stop_strings == (".", "\nUser:"), "as LLM.chat stops"
    assert job.size_of(2) == RequestSize(2, 32, 2)
    assert job.reason(1) == "the prompt has 69 tokens, which is too long"


def test_a_job_of_what_is_left_keeps_the_numbers(tmp_path: Path) -> None:
    index = checked(tmp_path, *({"prompt": "abc", "max_tokens": None} for _ in range(4))).index
    job = FileJob.of(index, iter([1, 3]), READING)
    assert [job.request(place).index for place in range(2)] == [1, 3]
    assert job.sizes[0].gen_len == 32 and POSITIONS > 35


def test_what_requests_share_does_not_depend_on_which_are_done(tmp_path: Path) -> None:
    header = [*range(1, 41)]
    lines = [{"prompt": [*header, 50 + n, 60 + n], "n": 2 - n % 2, "temperature": 1, "max_tokens": 2} for n in range(4)]
    index = checked(tmp_path, *lines, {"prompt": [90] * 45, "max_tokens": 2}, {"prompt": [91], "max_tokens": 2}).index
    reading = replace(READING, new_finder=lambda: PrefixFinder(least=32))
    whole = FileJob.of(index, range(6), reading).prefixes
    assert whole is not None and [whole.of(request) for request in range(6)] == [SharedPrefix(0, 40)] * 4 + [None] * 2
    left = FileJob.of(index, range(6), reading, [2, 5].__contains__)
    assert left.places.tolist() == [2, 5]
    assert left.prefixes is not None and [left.prefixes.of(request) for request in range(2)] == [SharedPrefix(0, 40), None]
    assert left.prefixes.rows == (2,), "nothing else is left to share it"
    assert left.only([5].__contains__).prefixes == PrefixGroups((), (), array("i", [-1]))


def test_a_part_of_a_job_shares_what_all_of_it_shares_and_is_read_again_elsewhere(tmp_path: Path) -> None:
    lines = [{"prompt": [*range(1, 41), 50 + n], "max_tokens": 2 + n} for n in range(4)]
    index = checked(tmp_path, *lines, {"prompt": [91], "max_tokens": 2}).index
    job = FileJob.of(index, range(5), replace(READING, new_finder=lambda: PrefixFinder(least=32)))
    part = job.only([1, 4].__contains__)
    assert part.places.tolist() == [1, 4] and [part.sizes[n].gen_len for n in range(2)] == [3, 2]
    sent = pickle.loads(pickle.dumps(part.sent)).read_with(READING)
    for one in (part, sent):
        assert one.prefixes is not None and [one.prefixes.of(n) for n in range(2)] == [SharedPrefix(0, 40), None]
        assert [one.request(n).index for n in range(2)] == [1, 4]
        assert one.only([4].__contains__).request(0) == one.request(1)
    sent.index.close()
