"""The flags of data wrangling, and the request made of them. Tables are read, and the prompts are written, before torch is
imported."""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

from h2o_flexgen.apps.data_wrangling.data_sets import (
    DATA_DIR,
    DATA_SET,
    DATA_SETS,
    DOWNLOAD,
    MATCHES,
    SPLITS,
    TASKS,
    DataSet,
    Folder,
    QuestionKind,
    names_of,
)
from h2o_flexgen.apps.data_wrangling.questions import (
    BEGINNING,
    COUNT,
    FILE,
    FULL_STOP,
    STOP,
    Examples,
    PromptedQuestion,
    Questions,
    Serialising,
    asked,
    by_hand,
    drawn,
    requests_of,
)
from h2o_flexgen.checkpoints.model_places import DEMO
from h2o_flexgen.cli.batch_request import ANYWAY, OUTPUT, RESUME, BatchOptions, BatchRequest, add_engine, add_job
from h2o_flexgen.cli.flags import NOISE, Group, Parser, typed
from h2o_flexgen.core.allowed_values import Bounds
from h2o_flexgen.core.files import JSON_LINES, local_path, write_durably
from h2o_flexgen.core.workload import MOST_PROMPTS, PROMPTS, TOKENS
from h2o_flexgen.jobs.line import InputFile
from h2o_flexgen.jobs.line_fields import Options
from h2o_flexgen.jobs.output import Manifest
from h2o_flexgen.sampling.params import SEED, SamplingParams

PROGRAM = "python -m h2o_flexgen.apps.data_wrangling"
USUAL_EXAMPLES = 10
PANDAS, AS_THEY_STAND = "pandas", "file"
REQUESTS, RESULT = ".requests.jsonl", ".result.json"

DESCRIPTION = f"""\
Entity matching, imputation and error detection with a language model, as fm_data_tasks and FlexGen's data_wrangle have them,
with their data sets: {DOWNLOAD}
All prompts begin with the same examples, which are computed once (--shared-prefixes 0 measures what that saves). A run that was
interrupted, in whatever way, goes on with {RESUME}. Without --model: the small one that travels with the package."""

EPILOG = f"""\
  {PROGRAM} --task entity_match --data-dir data/datasets --data-set Beer \\
      --model facebook/opt-6.7b -o beer.jsonl
  {PROGRAM} --task entity_match --data-dir data/datasets --data-set Beer \\
      --model facebook/opt-6.7b -o beer.jsonl {RESUME}
"""


@dataclass(frozen=True)
class WranglingRequest:
    """Everything that is asked of one run."""

    task: QuestionKind
    data_set: DataSet
    split: str
    rows: tuple[PromptedQuestion, ...]
    rows_there: int
    match: str
    gen_len: int
    made_of: Mapping[str, object]  # what the prompts were made of, for people
    job: BatchRequest
    result_file: Path

    @property
    def verbose(self) -> int:
        return self.job.verbose


def parse(argv: Sequence[str], program: str = PROGRAM) -> Namespace:
    return make_parser(program).parse_or_demo(argv, {"model": DEMO}, NOISE)


def request_of(flags: Namespace) -> WranglingRequest:
    task = TASKS[flags.task]
    folder = Folder.of(task, flags.data_dir, flags.data_set)
    data_set = folder.data_set
    serialising = Serialising(_columns(flags.columns), flags.separator, flags.missing, flags.numbers == PANDAS)
    questions = Questions.of(folder, serialising)
    there = questions.split(flags.split)
    examples = _examples(flags, folder, questions)
    instruction = None if flags.no_instruction else data_set.instruction
    rows = tuple(asked(there[: flags.num_run], flags.split, examples, instruction))
    gen_len = flags.gen_len or data_set.gen_len
    made_of = _made_of(flags, data_set, serialising, examples, gen_len)
    return WranglingRequest(
        task=task,
        data_set=data_set,
        split=flags.split,
        rows=rows,
        rows_there=len(there),
        match=flags.match or task.match,
        gen_len=gen_len,
        made_of=made_of,
        job=_job(flags, requests_of(rows, gen_len), gen_len, made_of),
        result_file=_beside(flags.output_file, RESULT),
    )


def _columns(text: str | None) -> tuple[str, ...] | None:
    if text is None:
        return None
    names = tuple(dict.fromkeys(name.strip() for name in text.split(",") if name.strip()))
    if not names:
        raise ValueError("--columns is empty; give names with commas between them")
    return names


def _examples(flags: Namespace, folder: Folder, questions: Questions) -> Examples:
    if flags.examples_file is not None:
        for flag, is_given in ((COUNT, flags.examples is not None), ("--balanced", flags.balanced)):
            if is_given:
                raise ValueError(f"{flag} is about examples that are drawn, and {FILE} has others; leave one of them out")
        return by_hand(flags.examples_file, folder.data_set)
    count = USUAL_EXAMPLES if flags.examples is None else flags.examples
    if flags.balanced and not folder.data_set.task.is_yes_or_no:
        raise ValueError(f"--balanced is for answers of Yes and No, and {folder.data_set.name} has others; leave it out")
    return drawn(questions.split("train"), folder.split("train"), count, flags.seed, flags.balanced) if count else Examples()


def _made_of(
    flags: Namespace, data_set: DataSet, serialising: Serialising, examples: Examples, gen_len: int
) -> dict[str, object]:
    """What prompts are made of, under the names by which users give it."""
    is_drawn = flags.examples_file is None
    count = USUAL_EXAMPLES if flags.examples is None else flags.examples
    return {
        "data_set": data_set.name,
        "split": flags.split,
        "examples": count if is_drawn else None,
        "examples_file": None if is_drawn else _digest(f"{examples.text}{examples.by}"),
        "examples_seed": flags.seed if is_drawn else None,
        "balanced": flags.balanced,
        "instruction": not flags.no_instruction,
        "columns": serialising.columns,
        "separator": serialising.separator,
        "missing": data_set.missing if serialising.missing is None else serialising.missing,
        "numbers": flags.numbers,
        "gen_len": gen_len,
    }


def _digest(text: str) -> str:
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=8).hexdigest()


# -- the job ---------------------------------------------------------------------------------------------------------------


def _job(flags: Namespace, requests: str, gen_len: int, made_of: Mapping[str, object]) -> BatchRequest:
    """The batch job that answers the prompts. Their file is written beside its output."""
    file = _beside(flags.output_file, REQUESTS)
    opening = BatchOptions.of(Namespace(**{**vars(flags), "input_file": str(file)}))
    result, metrics = _beside(flags.output_file, RESULT), opening.files.metrics
    if metrics is not None and metrics in (file.resolve(), result.resolve()):
        raise ValueError(f"--metrics {flags.metrics} is a file of this job; give another file")
    if opening.begun is None:
        _refuse_foreign(file)
    elif not opening.resuming.anyway:
        _refuse_other(opening.begun, made_of, file, requests)
    _write(file, requests)
    defaults = Options(SamplingParams(max_tokens=gen_len, stop=STOP))
    return opening.request(InputFile.of(str(file)), defaults, made_of=made_of)


def _beside(output: str, ending: str) -> Path:
    path = local_path(output)
    return path.with_name(path.name.removesuffix(JSON_LINES) + ending)


def _refuse_foreign(file: Path) -> None:
    """Refuses to write over a file that is not of such a job."""
    if not file.exists():
        return
    with file.open("rb") as opened:
        if not opened.readline().startswith(BEGINNING):
            raise ValueError(f"{file} is there already, and has other things than prompts of such a job; give another {OUTPUT}")


def _refuse_other(begun: Manifest, made_of: Mapping[str, object], file: Path, requests: str) -> None:
    """Refuses prompts that differ from those that the job was begun with; only more rows may be asked for."""
    otherwise = f"give them as they were, or another {OUTPUT}; {ANYWAY} goes on"
    if differences := list(begun.differences(made_of)):
        raise ValueError(f"this job was begun with other options: {'; '.join(differences)}; {otherwise}")
    before = (file.read_text(encoding="utf-8") if file.is_file() else "").splitlines()
    now = requests.splitlines()
    if len(now) < len(before):
        least = f"give --num-run {len(before)} or more, or another {OUTPUT}"
        raise ValueError(f"this job asks about {len(before)} rows, and {len(now)} are fewer; {least}")
    for number, (old, new) in enumerate(zip(before, now), start=1):
        if old != new:
            raise ValueError(f"tables have changed since the job was begun: line {number} of {file} is other now; {otherwise}")


def _write(file: Path, requests: str) -> None:
    try:
        write_durably(file, requests)
    except OSError as error:
        raise ValueError(f"{file} cannot be written ({error.strerror}); give another {OUTPUT}") from error


# -- flags -----------------------------------------------------------------------------------------------------------------


def make_parser(program: str = PROGRAM) -> Parser:
    usage = f"{program} --task TASK --data-dir FOLDER [--data-set NAME] -o out.jsonl [--model NAME] [options]"
    parser = Parser(program, DESCRIPTION, usage, EPILOG.replace(PROGRAM, program))
    _add_data(parser.group("data"))
    _add_prompts(parser.group("prompts"))
    add_job(parser.group("job"))
    add_engine(parser)
    return parser


def _add_data(group: Group) -> None:
    sets = "; ".join(f"{name}: {', '.join(names_of(task))}" for name, task in TASKS.items())
    group.add("--task", choices=tuple(TASKS), required=True, help="what is asked about rows")
    unpacked = "the download, unpacked, or one data set of it, with train.csv, test.csv and their tables"
    group.add(DATA_DIR, required=True, metavar="FOLDER", help=unpacked)
    group.value(DATA_SET, "NAME", f"{sets} (default: the name of the folder)")
    group.choice("--split", [name for name in SPLITS if name != "train"], "the split to ask about", "test")
    group.value("--num-run", "ROWS", "only the first of them (default: all)", PROMPTS)


def _add_prompts(group: Group) -> None:
    drawn_rows = f"drawn from train.csv, the same before every question (default: {USUAL_EXAMPLES})"
    group.add("-k", COUNT, type=typed(Bounds(0, MOST_PROMPTS)), metavar="N", help=drawn_rows)
    group.value(FILE, "FILE", "examples by hand: a text, or in a .json file one for each value that the data set's depend on")
    group.value("--seed", "N", "draws other examples", SEED, 0)
    group.truth("--balanced", text="draw from as many rows that are answered Yes as No")
    group.truth("--no-instruction", text="prompts begin with the examples")
    columns = "what rows are described by, in this order (default: as in the benchmark, which leaves some out)"
    group.value("--columns", "A,B,...", columns)
    group.value("--separator", "TEXT", "what stands between the columns of a row", default=FULL_STOP)
    nothing = f"what is written where a table has nothing (default: nothing for {names_of(TASKS['entity_match'])[0]} and others"
    group.value("--missing", "TEXT", f"{nothing} that are matched, nan for the rest)")
    numbers = f"{PANDAS}: as the original reads them, 2003.0 in a column with gaps; {AS_THEY_STAND}: as they stand there"
    group.choice("--numbers", (PANDAS, AS_THEY_STAND), numbers, PANDAS)
    lengths = sorted({one.gen_len for one in DATA_SETS.values()})
    usual = f"of an answer, at most (default: {', '.join(map(str, lengths))}, by data set)"
    group.value("--gen-len", "TOKENS", usual, TOKENS)
    rules = "; ".join(f"{name}: {what}" for name, what in MATCHES.items())
    group.choice("--match", MATCHES, f"when an answer is right; {rules} (default: that of the benchmark for the task)")
