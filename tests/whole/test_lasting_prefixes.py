"""Prefixes in a folder outlive the process: the next one reads them, says what it would have said, and computes less for it."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, fields, replace
from functools import partial
from pathlib import Path
from threading import Event
from typing import Any
from weakref import ref

import pytest
from torch import Tensor

from h2o_flexgen import batch
from h2o_flexgen.core.buffer_layout import CHUNK_BYTES, disk_buffer_bytes
from h2o_flexgen.core.prefix_groups import bytes_of
from h2o_flexgen.core.site import HOST
from h2o_flexgen.engine.reports import Tick
from h2o_flexgen.engine.stores import prefix_files
from h2o_flexgen.engine.stores.prefix_files import SUFFIX, PrefixFileCounts, PrefixFiles
from h2o_flexgen.engine.stores.prefix_store import PrefixStore
from h2o_flexgen.formats.kernel_sizes import shared
from h2o_flexgen.formats.table import PLAIN
from h2o_flexgen.llm import LLM
from h2o_flexgen.planning.plan import JUDGED, PINNED
from h2o_flexgen.sampling.completion import Completion
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.server.counts import Now, ServerCounts
from h2o_flexgen.session.prefix_folder import MARK, PrefixFolder
from tests.helpers.commands import called
from tests.helpers.contract import POLICIES, WEIGHTS, Checkpoints
from tests.helpers.pairwise import Name, on_devices
from tests.helpers.patience import PATIENCE_SECONDS
from tests.whole.test_arriving_prefixes import FOUR, ArrivingCase, Counted, drawn
from tests.whole.test_arriving_prefixes import hold_contract as hold_arriving
from tests.whole.test_shared_prefixes import LITTLE_GROWTH, OWN, SharedCase
from tests.whole.test_stream import MIXES, nothing_runs_on, same, streamed

__all__ = ["nothing_runs_on"]

HEAD = drawn(40, 1)
CASE = ArrivingCase("llama-gqa", gpu_batch_size=2, num_gpu_batches=2)


def files_in(folder: Path) -> list[Path]:
    return sorted(folder.glob(f"*{SUFFIX}"))


def counts_of(llm: LLM) -> PrefixFileCounts:
    counts = llm.loaded.prefix_counts
    assert counts is not None
    return counts


def settled(llm: LLM) -> PrefixFileCounts:
    """What was counted when all was written."""
    files = llm.loaded._prefix_files
    assert files is not None
    files.settle()
    return files.counts


def lasting(llm: LLM) -> PrefixStore:
    """The prefixes that are kept between blocks."""
    engine = llm.loaded._engine
    assert engine is not None and engine._lasting is not None
    return engine._lasting


# -- what is said ----------------------------------------------------------------------------------------------------------

KEPT = (
    *((policy, PINNED, PLAIN) for policy in (POLICIES[0], POLICIES[1], POLICIES[6])),
    *((policy, JUDGED, PLAIN) for policy in (POLICIES[2], POLICIES[9], POLICIES[12])),
)
CHOICES: dict[Name, Any] = {
    "kind": ("llama-gqa", "opt", "gpt-oss-far", "deepseek-v2"),
    "percent": (MIXES[3], MIXES[0], MIXES[2]),
    ("policy", "prefix_policy", "kv_codec"): KEPT,
    "schedule": ("zigzag", "flexgen_barrier"),
    ("weight_codec", "compute"): (WEIGHTS[0], WEIGHTS[1]),
}


def is_of_files(pair: Mapping[Name, Any]) -> bool:
    """Whether two choices meet in a file: of what policies keep and note, whatever the model, where it lay and when."""
    (kept,) = [values for names, values in pair.items() if "prefix_policy" in names] or [None]
    return kept in (None, KEPT[0], KEPT[3]) or "device" in pair


@pytest.mark.parametrize("values", on_devices(CHOICES, is_of_files, share=0.3))
def test_each_row_says_what_it_says_alone_behind_what_an_earlier_process_has_kept(
    values: dict[str, Any], checkpoints: Checkpoints, offload: Path, tmp_path: Path, pretended: None
) -> None:
    kept = KeptCase.of(ArrivingCase(gpu_batch_size=3, num_gpu_batches=2, **values), tmp_path)
    for _ in range(2):
        guests = hold_arriving(kept, checkpoints, offload, room=320, at_once=2)
    counts = counts_of(kept.opened[-1])
    assert counts.found >= 2 and counts.damaged == 0
    assert next(iter(guests.shared.values())) > 0, "the first of all is spared something"


@dataclass(frozen=True)
class KeptCase(ArrivingCase):
    """A case with a folder of prefixes."""

    folder: Path = Path()
    opened: list[LLM] = field(default_factory=list, compare=False, repr=False)

    @classmethod
    def of(cls, case: ArrivingCase, folder: Path) -> KeptCase:
        return cls(**{one.name: getattr(case, one.name) for one in fields(case)}, folder=folder)

    def open(self, checkpoints: Checkpoints, offload: Path, **options: Any) -> LLM:
        self.opened.append(super().open(checkpoints, offload, prefix_dir=self.folder, **options))
        return self.opened[-1]


JOBS = (
    SharedCase("llama-gqa", MIXES[3], gpu_batch_size=3, own=OWN[:8], growth=LITTLE_GROWTH),
    SharedCase("opt", gpu_batch_size=2, policy=POLICIES[1], own=OWN[:8], growth=LITTLE_GROWTH),
    SharedCase("opt", kv_codec="group4", own=OWN[:8], growth=LITTLE_GROWTH),
    SharedCase("qwen3", policy=POLICIES[2], prefix_policy=JUDGED, own=OWN[:8], growth=LITTLE_GROWTH),
)


@pytest.mark.parametrize("case", JOBS, ids=str)
def test_a_job_reads_what_an_earlier_one_has_computed(
    case: SharedCase, checkpoints: Checkpoints, offload: Path, tmp_path: Path
) -> None:
    with case.open(checkpoints, offload) as llm:
        wanted = streamed(llm, case.requests)
    for written in (3, 0):
        ticks = list[Tick]()
        with case.open(checkpoints, offload, prefix_dir=tmp_path) as llm:
            assert same(streamed(llm, case.requests, on_tick=ticks.append), wanted)
            counts = counts_of(llm)
        assert (counts.written, counts.damaged, len(files_in(tmp_path))) == (written, 0, 3)
    spared = sum(shared.tokens for place in range(8) if (shared := case.groups.of(place)) is not None)
    assert ticks[-1].prompt_tokens == sum(map(len, case.prompts)) - spared, "none of them is computed"
    assert counts.found >= 3 and counts.found_tokens >= sum(case.groups.lengths) and counts.read_bytes > 0


LOOKED_AT = SamplingParams(max_tokens=4, logprobs=3, prompt_logprobs=2)


def asked(llm: LLM, *prompts: Sequence[int], params: SamplingParams = FOUR) -> tuple[int, list[Completion]]:
    """What prompts that come together are spared, and what they get."""
    _, spared, come = Counted(llm, llm.arrivals(80, 4, prefix_room=160)).asked(*prompts, params=params)
    return spared, [one.completion for one in come]


def test_what_is_read_has_the_bits_of_what_was_computed(checkpoints: Checkpoints, offload: Path, tmp_path: Path) -> None:
    """Log-probabilities too, also those of the prompt: hidden states are kept beside keys and values."""
    with CASE.open(checkpoints, offload, prefix_dir=tmp_path) as llm:
        assert asked(llm, [*HEAD, 1], [*HEAD, 2])[0] == 40
        spared, wanted = asked(llm, [*HEAD, 3, 4], params=LOOKED_AT)
        assert spared == 40
    with CASE.open(checkpoints, offload, prefix_dir=tmp_path) as llm:
        assert asked(llm, [*HEAD, 3, 4], params=LOOKED_AT) == (40, wanted)
        assert settled(llm).found == 1 and wanted[0].prompt_logprobs is not None


def test_what_a_job_wrote_without_hidden_states_costs_a_server_nothing(
    checkpoints: Checkpoints, offload: Path, tmp_path: Path
) -> None:
    """Nothing makes room for it. What the server writes in its place is found, by the server itself too."""
    other = drawn(40, 2)
    with CASE.open(checkpoints, offload, prefix_dir=tmp_path) as llm:
        assert [*llm.generate_stream([[*HEAD, 1], [*HEAD, 2]], seed=0)] and settled(llm).written == 1
    with CASE.open(checkpoints, offload, prefix_dir=tmp_path) as llm:
        counted = Counted(llm, llm.arrivals(60, 4, prefix_room=48))
        assert counted.spared([*other, 1], [*other, 2]) == 40 and settled(llm).written == 1
        assert counted.spared([*HEAD, 1]) == 0, "rows of a server may ask for states that are not there"
        assert counted.spared([*other, 3]) == 40 and settled(llm).found == 0, "it has kept its place"
        assert counted.spared([*HEAD, 2]) == 0 and settled(llm).written == 2, "computed, and written with them"
        assert counted.spared([*other, 4]) == 40 and settled(llm).found == 1
        assert counted.spared([*HEAD, 3]) == 40 and settled(llm).found == 2
    assert len(files_in(tmp_path)) == 2


def test_parts_of_what_is_kept_and_copies_of_it_are_shared(checkpoints: Checkpoints, offload: Path, tmp_path: Path) -> None:
    more = drawn(20, 5)
    with CASE.open(checkpoints, offload, prefix_dir=tmp_path) as llm:
        assert asked(llm, [*HEAD, 1], [*HEAD, 2])[0] == 40
    with CASE.open(checkpoints, offload, prefix_dir=tmp_path) as llm:
        assert asked(llm, [*HEAD[:22], 9, 9, 9])[0] == 20, "its first tokens, in whole pieces"
    with CASE.open(checkpoints, offload, prefix_dir=tmp_path) as llm:
        spared, completions = asked(llm, [*HEAD, *more, 1], [*HEAD, *more, 2])
        assert spared == 40 + 60, "what is new stands behind a copy of what was read"
        alone = llm.generate([[*HEAD, *more, 1], [*HEAD, *more, 2]], FOUR)
        assert [one.token_ids for one in completions] == [one.token_ids for one in alone]
    assert len(files_in(tmp_path)) == 2


def test_another_plan_finds_nothing_of_it(checkpoints: Checkpoints, offload: Path, tmp_path: Path) -> None:
    heads = dict.fromkeys(("weight_codec", "kv_codec"), "group4")
    others = {"weight_codec": "group4"}, heads, {"dtype": "bfloat16"}, {"prefill_tokens": 16}
    for written, options in enumerate(({}, *others), start=1):
        with CASE.open(checkpoints, offload, prefix_dir=tmp_path, **options) as llm:
            asked(llm, [*HEAD, 1], [*HEAD, 2])
            assert (settled(llm).found, len(files_in(tmp_path))) == (0, written)


def test_what_computes_is_a_part_of_the_name(
    checkpoints: Checkpoints, offload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CASE.open(checkpoints, offload, prefix_dir=tmp_path) as llm:
        folder, site, device = llm.loaded._prefix_folder, llm.loaded.site, llm.device
        assert folder is not None
        of_this = partial(folder.kind, llm.spec, llm.plan)
        kinds = [of_this(site, device), of_this(replace(site, threads=site.threads + 1), device)]
        for changed in (
            ("h2o_flexgen.__version__", "0.0.0"),
            ("torch.__version__", "0.0.0"),
            (f"{PrefixFolder.__module__}.shared", lambda: shared()._replace(kernels_version=0)),
            (f"{PrefixFolder.__module__}.describe_machine", lambda device: {"device": "another"}),
        ):
            with monkeypatch.context() as patched:
                patched.setattr(*changed)
                kinds.append(of_this(site, device))
        assert len({*kinds}) == len(kinds) and of_this(site, device) == kinds[0]


def test_it_is_written_behind_the_work(
    checkpoints: Checkpoints, offload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tokens do not wait for the disk; and what loses its place before it is written is not written."""
    may_go_on, written = Event(), prefix_files.write_prefix

    def held_up(*given: Any) -> None:
        assert may_go_on.wait(PATIENCE_SECONDS)
        written(*given)

    monkeypatch.setattr("h2o_flexgen.engine.stores.prefix_files.write_prefix", held_up)
    other = drawn(40, 2)
    with CASE.open(checkpoints, offload, prefix_dir=tmp_path) as llm:
        counted = Counted(llm, llm.arrivals(60, 4, prefix_room=48))
        assert counted.spared([*HEAD, 1], [*HEAD, 2]) == 40
        states = [ref(kept.hidden) for kept in lasting(llm) if kept.hidden is not None]
        assert len(states) == 1 and states[0]() is not None
        assert counted.spared([*other, 1], [*other, 2]) == 40, "it took the place of the first, which was not written yet"
        is_held = states[0]() is not None
        assert counted.spared([*other, 3]) == 40 and not files_in(tmp_path)
        may_go_on.set()
        assert not is_held, "what waits to be written holds no memory of its own"
        assert settled(llm).written == 1
    (file,) = files_in(tmp_path)
    with file.open("rb") as opened:
        assert prefix_files.read_head(opened, file).ids == other


# -- whatever becomes of the files -----------------------------------------------------------------------------------------


def cut(file: Path, at: int) -> None:
    os.truncate(file, at)


def flipped(file: Path, at: int) -> None:
    content = bytearray(file.read_bytes())
    content[at] ^= 1
    file.write_bytes(content)


DAMAGES = {
    "nothing in it": lambda file: cut(file, 0),
    "half of it": lambda file: cut(file, file.stat().st_size // 2),
    "the last page": lambda file: cut(file, file.stat().st_size - 4096),
    "its magic": lambda file: flipped(file, 3),
    "its length": lambda file: flipped(file, 34),
    "its head": lambda file: flipped(file, 60),
    "a key": lambda file: flipped(file, 4096 + 17),
    "its last part": lambda file: flipped(file, file.stat().st_size - 4096),
    "another text": lambda file: file.write_text("no prefix at all"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_what_is_damaged_is_computed_again(damage: str, checkpoints: Checkpoints, offload: Path, tmp_path: Path) -> None:
    with CASE.open(checkpoints, offload, prefix_dir=tmp_path) as llm:
        _, wanted = asked(llm, [*HEAD, 1], [*HEAD, 2])
    (file,) = files_in(tmp_path)
    DAMAGES[damage](file)
    with CASE.open(checkpoints, offload, prefix_dir=tmp_path) as llm:
        assert asked(llm, [*HEAD, 1], [*HEAD, 2]) == (40, wanted), "the first of them computes it again"
        counts = settled(llm)
    assert (counts.damaged, counts.found, counts.written) == (1, 0, 1)
    with CASE.open(checkpoints, offload, prefix_dir=tmp_path) as llm:
        assert asked(llm, [*HEAD, 1], [*HEAD, 2])[0] == 80 and settled(llm).damaged == 0


def test_what_is_damaged_while_it_is_known_is_computed_again(checkpoints: Checkpoints, offload: Path, tmp_path: Path) -> None:
    with CASE.open(checkpoints, offload, prefix_dir=tmp_path) as llm:
        asked(llm, [*HEAD, 1], [*HEAD, 2])
    (file,) = files_in(tmp_path)
    with CASE.open(checkpoints, offload, prefix_dir=tmp_path) as llm:
        llm.load()
        files = llm.loaded._prefix_files
        assert files is not None and len([*files.like(b"", 0)]) == 1
        with file.open("r+b") as opened:
            opened.seek(4096 + 5)
            opened.write(b"?!")
        assert asked(llm, [*HEAD, 1], [*HEAD, 2])[0] == 40 and settled(llm).damaged == 1


def test_a_full_disk_costs_no_more_than_the_files(
    checkpoints: Checkpoints, offload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with CASE.open(checkpoints, offload, prefix_dir=tmp_path) as llm:
        _, wanted = asked(llm, [*HEAD, 1], [*HEAD, 2])
        settled(llm)
        files_in(tmp_path)[0].unlink()
    before = {*tmp_path.iterdir()}

    def full(descriptor: int, offset: int, data: memoryview) -> None:
        os.pwrite(descriptor, data[:9], offset)
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(prefix_files, "_write_fully", full)
    with CASE.open(checkpoints, offload, prefix_dir=tmp_path) as llm:
        assert asked(llm, [*HEAD, 1], [*HEAD, 2]) == (40, wanted)
        assert settled(llm).trouble == "No space left on device" and settled(llm).written == 0
        assert {*tmp_path.iterdir()} - before <= {offload.parent}, "nothing is left there"


KILLED = """
import os, signal, sys
from pathlib import Path
from h2o_flexgen.engine.stores import prefix_files
from h2o_flexgen.llm import LLM
from h2o_flexgen.sampling.params import SamplingParams

written = prefix_files._write_fully
def killed(descriptor, offset, data):
    written(descriptor, offset, data[: len(data) // 2])
    os.kill(os.getpid(), signal.SIGKILL)
prefix_files._write_fully = killed
head = [7] * 40
with LLM(sys.argv[1], tokenizer="bytes", dtype="float32", device="cpu", least_prefix=4, prefix_dir=sys.argv[2]) as llm:
    for _ in llm.generate_stream([[*head, 1], [*head, 2]], seed=0):
        pass
"""


def test_a_process_that_is_killed_while_it_writes_leaves_nothing_that_is_read(
    checkpoints: Checkpoints, offload: Path, tmp_path: Path
) -> None:
    folder = checkpoints.folder(CASE.kind, CASE.stored)
    kept = tmp_path / "kept"
    ended = subprocess.run([sys.executable, "-c", KILLED, folder, kept], stderr=subprocess.PIPE, text=True, check=False)
    assert ended.returncode == -signal.SIGKILL, ended.stderr
    assert not files_in(kept) and len([*kept.iterdir()]) == 2, "its mark, and half of a file beside its place"
    head = [7] * 40
    with CASE.open(checkpoints, offload, prefix_dir=kept) as llm:
        assert asked(llm, [*head, 1], [*head, 2])[0] == 40
        settled(llm)
        assert [file.name for file in kept.iterdir() if file.suffix != SUFFIX] == [MARK] and len(files_in(kept)) == 1


def test_processes_at_once_find_what_the_others_have_kept(checkpoints: Checkpoints, offload: Path, tmp_path: Path) -> None:
    """Locks and names belong to open files, so two models in one process are to each other what two processes are."""
    other = drawn(40, 2)
    with (
        CASE.open(checkpoints, offload, prefix_dir=tmp_path) as one,
        CASE.open(checkpoints, offload, prefix_dir=tmp_path) as two,
    ):
        assert asked(one, [*HEAD, 1], [*HEAD, 2])[0] == 40
        assert settled(one).written == 1
        assert asked(two, [*HEAD, 1], [*HEAD, 2])[0] == 80, "it came after the second was opened"
        assert asked(two, [*other, 1], [*other, 2])[0] == 40 and settled(two).written == 1
        assert asked(one, [*other, 1])[0] == 40 and counts_of(one).found == 1
    assert len(files_in(tmp_path)) == 2


def test_the_longest_unused_makes_room(checkpoints: Checkpoints, offload: Path, tmp_path: Path) -> None:
    heads = [drawn(40, seed) for seed in range(3)]

    def spared(limit: int, *which: int) -> list[int]:
        with CASE.open(checkpoints, offload, prefix_dir=tmp_path, prefix_dir_size=limit) as llm:
            counted = Counted(llm, llm.arrivals(60, 4, prefix_room=48))
            found = []
            for one in which:
                found.append(counted.spared([*heads[one], 1], [*heads[one], 2]))
                settled(llm)
            return found

    assert spared(10**9, 0) == [40]
    size = files_in(tmp_path)[0].stat().st_size
    assert spared(2 * size, 1, 0) == [40, 80], "there is room for two"
    assert spared(2 * size, 2) == [40] and len(files_in(tmp_path)) == 2
    assert spared(2 * size, 0, 2) == [80, 80], "the second was the longest unused"
    with CASE.open(checkpoints, offload, prefix_dir=tmp_path, prefix_dir_size=size - 1) as llm:
        asked(llm, [*heads[1], 1], [*heads[1], 2])
        assert str(settled(llm).trouble).startswith("one takes ") and len(files_in(tmp_path)) == 2


# -- what is refused, and what is said of it -------------------------------------------------------------------------------


def test_the_folder_of_another_model_is_refused(checkpoints: Checkpoints, offload: Path, tmp_path: Path) -> None:
    with CASE.open(checkpoints, offload, prefix_dir=tmp_path):
        pass
    with pytest.raises(
        ValueError, match=r"^prefix folder .* has prefixes of '.*', and this model is '.*'; give another prefix_dir$"
    ):
        ArrivingCase("opt").open(checkpoints, offload, prefix_dir=tmp_path)
    (tmp_path / MARK).write_text("{")
    with ArrivingCase("opt").open(checkpoints, offload, prefix_dir=tmp_path):
        pass
    with pytest.raises(ValueError, match="has prefixes of"):
        CASE.open(checkpoints, offload, prefix_dir=tmp_path)


REFUSED = (
    ({"prefix_dir": "there/x"}, r"^prefix folder there/x cannot be written \(.*\); give another prefix_dir$"),
    ({"prefix_dir": "y", "shared_prefixes": False}, r"^prefix_dir is 'y', but no prefixes are shared \(they are off, or"),
    (
        {"prefix_dir": "y", "schedule": "row_by_row"},
        r"^prefix_dir is 'y', .* \(schedule='row_by_row' cannot\); leave prefix_dir",
    ),
    ({"prefix_dir_size": "1GB"}, r"^prefix_dir_size is for a folder of prefixes; give prefix_dir, too, or leave"),
    ({"prefix_dir": "y", "prefix_dir_size": "much"}, r"^size 'much' is not understood"),
)


@pytest.mark.parametrize(("options", "said"), REFUSED, ids=str)
def test_a_folder_that_is_of_no_use_is_refused(
    options: dict[str, Any], said: str, checkpoints: Checkpoints, offload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "there").write_text("a file")
    with pytest.raises(ValueError, match=said):
        ArrivingCase("opt", num_gpu_batches=1).open(checkpoints, offload, **options)


def test_the_thread_that_writes_is_counted(checkpoints: Checkpoints, offload: Path, tmp_path: Path) -> None:
    def held(room: int, **options: Any) -> int:
        with CASE.open(checkpoints, offload, **options) as llm:
            return llm.arrivals(60, 4, prefix_room=room).planned.footprint.total(HOST)

    assert held(64, prefix_dir=tmp_path) - held(64) == disk_buffer_bytes(CHUNK_BYTES)
    assert held(0, prefix_dir=tmp_path) == held(0)


def test_what_is_known_of_files_has_a_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were used last are known."""
    texts = [bytes_of([number] * 100) for number in range(4)]

    def known(files: PrefixFiles) -> list[bool]:
        return [files.of(text) is not None for text in texts]

    def sound(start: int, out: Tensor) -> None:
        out.zero_()

    monkeypatch.setattr(prefix_files, "KNOWN_BYTES", 2 * (400 + prefix_files.FILE_BYTES))
    with closing(PrefixFiles(tmp_path, 10**6, "kind")) as files:
        for number, text in enumerate(texts):
            files.write_behind(text, [prefix_files.PartInMemory("kv", 10, sound)])
            files.settle()
            os.utime(files._place(text), (number, number))
            assert known(files) == [number - 2 < place <= number for place in range(4)]
        os.utime(files._place(texts[0]), (9, 9))
    with closing(PrefixFiles(tmp_path, 10**6, "kind")) as files:
        assert [one.text for one in files._known.values()] == [texts[3], texts[0]], "before anything asks"
        assert known(files) == [True, False, False, True]


def test_an_error_that_nothing_foresaw_is_said_and_stops_nothing(tmp_path: Path) -> None:
    def broken(start: int, out: object) -> None:
        raise RuntimeError("a bug\nand where it is")

    def sound(start: int, out: Tensor) -> None:
        out.zero_()

    with closing(PrefixFiles(tmp_path, 10**6, "kind")) as files:
        for text, read in ((bytes_of([0] * 100), broken), (bytes_of([1] * 100), sound)):
            files.write_behind(text, [prefix_files.PartInMemory("kv", 10, read)])
        files.settle()
        assert (files.counts.trouble, files.counts.written) == ("RuntimeError: a bug", 1)
    assert len(files_in(tmp_path)) == len([*tmp_path.iterdir()]) == 1


def test_memory_is_freed_whatever_becomes_of_what_is_unwritten(
    checkpoints: Checkpoints, offload: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stopped(files: PrefixFiles) -> None:
        raise KeyboardInterrupt

    with CASE.open(checkpoints, offload, prefix_dir=tmp_path) as llm:
        assert asked(llm, [*HEAD, 1], [*HEAD, 2])[0] == 40
        kept = lasting(llm)
        with monkeypatch.context() as patched, pytest.raises(KeyboardInterrupt):
            patched.setattr(PrefixFiles, "settle", stopped)
            kept.close()
        assert kept._region is None and not [*kept]


def test_a_command_says_what_it_found_and_wrote(
    checkpoints: Checkpoints, offload: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    asked_for, model = tmp_path / "in.jsonl", checkpoints.folder(CASE.kind, CASE.stored)
    asked_for.write_text("".join(json.dumps({"prompt": [*HEAD, number], "max_tokens": 2}) + "\n" for number in range(4)))
    flags = ("--model", model, "--dtype", "float32", "--tokenizer", "bytes", "--device", "cpu", "--offload-dir", offload)
    for number, (found, written) in enumerate(((0, 1), (1, 0))):
        out = tmp_path / f"out-{number}.jsonl"
        result = called(batch.main, capfd, "-i", asked_for, "-o", out, *flags, "--prefix-dir", tmp_path / "kept")
        assert result.status == 0, result.err
        counts = result.json["prefix_files"]
        assert (counts["found"], counts["found_tokens"], counts["written"]) == (found, 40 * found, written)
        (line,) = [line for line in result.out if line.startswith("prefixes  in their folder: ")]
        assert f"{found} found, of {40 * found} tokens in all" in line and f", {written} written (" in line
    told = called(batch.main, capfd, "-i", asked_for, "-o", tmp_path / "x", *flags, "--prefix-dir-size", "1GB").error
    assert told == (
        "error: --prefix-dir-size is for a folder of prefixes; give --prefix-dir, too, or leave --prefix-dir-size out"
    )


def test_a_server_counts_what_it_found_and_wrote() -> None:
    counts = PrefixFileCounts(found=2, found_tokens=80, read_bytes=70, written=3, written_bytes=90, damaged=1)
    said = ServerCounts(lambda: counts)
    assert said.totals()["prefix_files"] == {**asdict(counts)} and "prefix_files" not in ServerCounts().totals()
    text = said.text(Now(0, 0, 0, 0, 0, 0, 0, 0))
    for line in ("found_total 2", "found_tokens_total 80", "read_bytes_total 70", "written_total 3", "damaged_total 1"):
        assert f"\nh2o_flexgen_prefix_files_{line}\n" in text
