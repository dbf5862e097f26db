"""The requests of a file that are still to be run, with their sizes, as the engine takes them: a text is read and tokenized
again when its turn comes."""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import TypeAlias, overload

from h2o_flexgen.core.prefix_groups import PrefixFinder, PrefixGroups, under
from h2o_flexgen.core.workload import MOST_TOKENS
from h2o_flexgen.engine.job import Request, RequestSize, prompt_of, without_number
from h2o_flexgen.jobs.index import Index
from h2o_flexgen.jobs.line import Line
from h2o_flexgen.sampling.pooling import most_read
from h2o_flexgen.text.dialogue import Style
from h2o_flexgen.text.prompts import shortened
from h2o_flexgen.text.tokenizer import Tokenizer

# The size of the request with this number; a ValueError says what the model cannot do.
SizeOf: TypeAlias = Callable[[int, Request], RequestSize]
OnRead: TypeAlias = Callable[[int], None]  # hears how many requests were read
IsLeft: TypeAlias = Callable[[int], bool]  # whether the request at a place of the index is to be run


def all_are(place: int) -> bool:
    return True


@dataclass(frozen=True)
class LineReading:
    """How lines become what the model reads."""

    tokenizer: Tokenizer
    style: Style  # how chats are written down
    size_of: SizeOf
    new_finder: Callable[[], PrefixFinder | None] = lambda: None  # what looks for prefixes that requests of a job share
    longest: int = MOST_TOKENS  # tokens of a prompt that can be read, for those that may be cut

    def request(self, number: int, line: Line) -> Request:
        prompt, params = line.read_with(self.tokenizer, self.style)
        if (form := line.options.form) is not None:
            prompt = shortened(prompt, most_read(form.truncate, self.longest), self.tokenizer)
        return Request(prompt, params, number)

    def size(self, number: int, line: Line) -> RequestSize:
        """The size of a request; a ValueError says why it cannot be run."""
        return self.sized(number, line)[1]

    def sized(self, number: int, line: Line) -> tuple[Request, RequestSize]:
        try:
            request = self.request(number, line)
            return request, self.size_of(number, request)
        except ValueError as error:
            raise ValueError(without_number(str(error), number)) from error


@dataclass(frozen=True)
class RequestSizes(Sequence[RequestSize]):
    """The sizes of many requests, as arrays."""

    prompt_lens: array[int] = field(default_factory=lambda: array("q"))
    gen_lens: array[int] = field(default_factory=lambda: array("q"))
    rows: array[int] = field(default_factory=lambda: array("q"))
    scores: bytearray = field(default_factory=bytearray)

    def add(self, size: RequestSize) -> None:
        self.prompt_lens.append(size.prompt_len)
        self.gen_lens.append(size.gen_len)
        self.rows.append(size.rows)
        self.scores.append(size.scores)

    def __len__(self) -> int:
        return len(self.prompt_lens)

    @overload
    def __getitem__(self, place: int) -> RequestSize: ...

    @overload
    def __getitem__(self, place: slice) -> list[RequestSize]: ...

    def __getitem__(self, place: int | slice) -> RequestSize | list[RequestSize]:
        if isinstance(place, slice):
            return [self[one] for one in range(*place.indices(len(self)))]
        return RequestSize(self.prompt_lens[place], self.gen_lens[place], self.rows[place], bool(self.scores[place]))

    def __iter__(self) -> Iterator[RequestSize]:
        return map(RequestSize, self.prompt_lens, self.gen_lens, self.rows, map(bool, self.scores))


@dataclass(frozen=True)
class SentJob:
    """A job on its way to another process, which reads its requests there."""

    index: Index
    sizes: RequestSizes
    places: array[int]
    prefixes: PrefixGroups | None

    def read_with(self, reading: LineReading) -> FileJob:
        return FileJob(self.index, reading, None, self.sizes, self.places, known=self.prefixes)


@dataclass(frozen=True)
class FileJob:
    """Requests of an index. What they share is found among all that are read, be they run or not: so it is the same in a job
    that goes on."""

    index: Index
    reading: LineReading
    finder: PrefixFinder | None = None
    sizes: RequestSizes = field(default_factory=RequestSizes)
    places: array[int] = field(default_factory=lambda: array("q"))  # of the requests, in the index
    refused: array[int] = field(default_factory=lambda: array("q"))  # places of requests that the model cannot run
    _among_read: array[int] = field(
        default_factory=lambda: array("q")
    )  # where they stand among all that were read and can be run
    known: PrefixGroups | None = None  # what the requests share, where that was found among more than these

    @classmethod
    def of(
        cls, index: Index, places: Iterable[int], reading: LineReading, is_left: IsLeft = all_are, on_read: OnRead | None = None
    ) -> FileJob:
        """Reads and tokenizes requests once; those that are left are the job."""
        job = cls(index, reading, reading.new_finder())
        num_read = 0
        for count, place in enumerate(places, start=1):
            line = index.line(place)
            try:
                request, size = reading.sized(index.request_number(place), line)
            except ValueError:
                if is_left(place):
                    job.refused.append(place)
            else:
                job._add(place, request, size, num_read if is_left(place) else None)
                num_read += 1
            if on_read is not None:
                on_read(count)
        return job

    def _add(self, place: int, request: Request, size: RequestSize, among_read: int | None) -> None:
        """Takes a request; `among_read` is its place among all that are read, None if it is not to be run."""
        if self.finder is not None:
            self.finder.add(under(size.adapter, prompt_of(request).ids), size.rows)
        if among_read is not None:
            self._among_read.append(among_read)
            self.places.append(place)
            self.sizes.add(size)

    def only(self, is_meant: IsLeft) -> FileJob:
        """Some of the requests, by their places in the index. They share what they shared among all: nothing is read again."""
        own = [number for number, place in enumerate(self.places) if is_meant(place)]
        places = array("q", (self.places[number] for number in own))
        sizes = RequestSizes()
        for number in own:
            sizes.add(self.sizes[number])
        known = None if self.prefixes is None else self.prefixes.only(own, sizes.rows)
        return FileJob(self.index, self.reading, None, sizes, places, known=known)

    def without(self, ended: Container[int]) -> FileJob:
        """The job without the requests that have these numbers."""
        return self.only(lambda place: self.index.request_number(place) not in ended)

    @property
    def sent(self) -> SentJob:
        return SentJob(replace(self.index, _lines=None), self.sizes, self.places, self.prefixes)

    @cached_property
    def prefixes(self) -> PrefixGroups | None:
        if self.known is not None:
            return self.known
        return None if self.finder is None else self.finder.groups().only(self._among_read, self.sizes.rows)

    @property
    def shared_tokens(self) -> int:
        """Tokens of prompts that are not computed because others had them computed."""
        return 0 if self.prefixes is None else self.prefixes.saved_tokens

    def request(self, place: int) -> Request:
        """The request at a place of this job."""
        own = self.places[place]
        return self.reading.request(self.index.request_number(own), self.index.line(own))

    def size_of(self, place: int) -> RequestSize:
        """The size of the request at a place of the index."""
        return self.sizes[bisect_left(self.places, place)]

    def reason(self, place: int) -> str:
        """Why the request at a place of the index cannot be run."""
        try:
            self.reading.size(self.index.request_number(place), self.index.line(place))
        except ValueError as error:
            return str(error)
        raise AssertionError(f"the request at place {place} can be run")
