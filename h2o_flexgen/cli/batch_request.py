"""The batch command's flags, and the request made of them. The input file is checked here, line by line; nothing here imports
torch."""

from __future__ import annotations

import os
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from importlib.util import find_spec
from pathlib import Path

from h2o_flexgen.checkpoints.model_places import DEMO
from h2o_flexgen.cli.common_requests import (
    GPUS,
    PACK,
    WHERE_FOUND,
    asked_of,
    model_of,
    named_machine,
    plan_of,
    refuse_search_options,
    sampling_of,
    site_of,
)
from h2o_flexgen.cli.errors import TRACEBACK
from h2o_flexgen.cli.flags import (
    FIRST_OF_PLANS,
    MODEL,
    NOISE,
    PLAN,
    SITE,
    Group,
    Parser,
    add_placement,
    add_prefix_folder,
    add_sizes,
)
from h2o_flexgen.cli.output_files import check_writable
from h2o_flexgen.core.allowed_values import AUTO, Bounds
from h2o_flexgen.core.files import local_path
from h2o_flexgen.core.hints import not_installed
from h2o_flexgen.core.workload import PROMPTS, TOKENS
from h2o_flexgen.engine.progress import Progress
from h2o_flexgen.jobs.index import CheckedFile, check_file
from h2o_flexgen.jobs.line import InputFile
from h2o_flexgen.jobs.line_fields import ModelNames, Options
from h2o_flexgen.jobs.output import Manifest, Settings, manifest_file, waiting_file
from h2o_flexgen.planning.machine import Machine
from h2o_flexgen.planning.plan import Plan
from h2o_flexgen.planning.plan_requirements import PlanRequirements
from h2o_flexgen.profiling.busy_cores import Others
from h2o_flexgen.sampling.params import SamplingParams
from h2o_flexgen.sampling.structured_outputs import FORMAT, NAME
from h2o_flexgen.session.open_request import ModelRequest, SiteRequest
from h2o_flexgen.text.dialogue import STYLES

PROGRAM = "python -m h2o_flexgen.batch"
INPUT, OUTPUT = "--input-file", "--output-file"
RESUME, ANYWAY, RETRY = "--resume", "--resume-anyway", "--retry-errors"
RAY, WORKERS, HAND_OUT, LOCAL = "--ray", "--workers", "--hand-out", "local"
MOST_WORKERS = 1000

DESCRIPTION = f"""\
Run a file of requests and write a record for each as it finishes, in the form of OpenAI's batches. A line of the input is a
request of such a batch, or {{"prompt": ...}} or {{"messages": [...]}} with the same options beside it; in a file that is called
.txt it is a text. A job that was interrupted, in whatever way, goes on with {RESUME}.
Without --model: the small one that travels with the package."""

_AS_THEY_ARE = f"each request of {INPUT} has a prompt of its own, which is taken as long as it is"
INSTEAD = {
    "--prompt-len": f"{_AS_THEY_ARE}; --gen-len bounds what is generated",
    "--num-prompts": f"all requests of {INPUT} are run",
    **dict.fromkeys(("--prompt", "--prompt-file"), f"prompts stand in {INPUT}, a request per line"),
    "--rows": "--gpu-batch-size and --num-gpu-batches say how many requests are computed at once",
}

FIRST = INPUT, OUTPUT, RESUME, "--model", "--gen-len", "--temperature", *FIRST_OF_PLANS, "--gpus", "--dry-run"
EPILOG = f"""\
  {PROGRAM} -i in.jsonl -o out.jsonl --model facebook/opt-1.3b
  {PROGRAM} -i in.jsonl -o out.jsonl --model facebook/opt-1.3b {RESUME}
"""


@dataclass(frozen=True)
class JobFiles:
    output: Path
    manifest: Path
    metrics: Path | None


@dataclass(frozen=True)
class Resuming:
    """How a job goes on that was begun before."""

    asked: bool = False
    anyway: bool = False  # whatever differs
    retry_errors: bool = False


@dataclass(frozen=True)
class RayRequest:
    """A job on workers of Ray."""

    address: str  # of a cluster, or LOCAL
    workers: int | None  # None: one for each machine
    hand_out: int | None  # requests that a worker is handed at once; None: a good share
    may_use_gpus: bool


@dataclass(frozen=True)
class BatchRequest:
    """Everything that is asked of one job."""

    model: ModelRequest
    site: SiteRequest
    plan: Plan | PlanRequirements  # the plan itself, or what is asked of one that is to be found
    machine: Machine | None  # the named one; None stands for this one
    checked: CheckedFile
    defaults: Options  # what lines leave open
    style: str
    seed: int | None
    files: JobFiles
    begun: Manifest | None  # the job that goes on; None for a new one
    resuming: Resuming
    ordered: bool
    ray: RayRequest | None  # None: all of it runs in this process
    dry_run: bool
    verbose: int
    arguments: Mapping[str, object]  # as they were given, for the manifest
    made_of: Settings = field(default_factory=dict)  # what the input was made of, for the manifest
    others: Others = field(default_factory=Others, compare=False, repr=False)  # other processes that have been busy

    @property
    def needed_style(self) -> str:
        """How chats become text. Where there are none, a style that every model has will do."""
        return self.style if self.checked.chats else AUTO

    # -- what the answers depend on ------------------------------------------------------------------------------------

    @property
    def settings(self) -> Settings:
        """The options that lines leave open, the order of records, and what the input was made of."""
        params, named = self.defaults.params, [each.name for each in fields(SamplingParams)]
        sampling = {name: getattr(params, name) for name in named if name not in ("seed", "prompt_logprobs", FORMAT)}
        sampling[NAME] = None if params.held_to is None else params.held_to.asked
        beside = {"style": self.style, "return_token_ids": self.defaults.token_ids, "ordered": self.ordered}
        return {**sampling, **beside, **self.made_of}

    def refuse_other(self, settings: Settings) -> None:
        """Refuses to go on with a job that was begun under other settings, unless that was asked for."""
        if self.begun is None or self.resuming.anyway:
            return
        if differences := list(self.begun.differences(settings, self.model.name)):
            job = f"the job in {OUTPUT} {self.files.output.name} was begun with other options"
            raise ValueError(f"{job}: {'; '.join(differences)}; give them as they were, or another {OUTPUT}; {ANYWAY} goes on")

    def refuse_other_seed(self) -> None:
        begun = self.begun
        if begun is not None and self.seed not in (None, begun.seed) and not self.resuming.anyway:
            asked = f"--seed is {self.seed}, but the job in {OUTPUT} {self.files.output.name} was begun with {begun.seed}"
            raise ValueError(f"{asked}; leave it out, or give another {OUTPUT}; {ANYWAY} goes on")


def parse(argv: Sequence[str], program: str = PROGRAM) -> Namespace:
    return make_parser(program).parse_or_demo(argv, {"model": DEMO}, NOISE)


def request_of(flags: Namespace) -> BatchRequest:
    defaults = Options(sampling_of(flags), token_ids=flags.return_token_ids)
    opening = BatchOptions.of(flags)
    return opening.request(InputFile.of(flags.input_file), defaults, flags.style, flags.skip_invalid)


@dataclass(frozen=True)
class BatchOptions:
    """A request but for its input, which a command may still have to write."""

    flags: Namespace
    plan: Plan | PlanRequirements
    machine: Machine | None
    ray: RayRequest | None
    files: JobFiles
    begun: Manifest | None
    resuming: Resuming

    @classmethod
    def of(cls, flags: Namespace) -> BatchOptions:
        """Visible mistakes are refused before torch is imported, and before anything is written."""
        plan = plan_of(flags)
        if flags.percent != AUTO:
            refuse_search_options(flags, f"say --percent {AUTO}")
        machine = named_machine(flags)
        asked = asked_of(flags, plan) if flags.percent == AUTO else plan
        ray = _ray(flags, asked)
        resuming = Resuming(flags.resume or flags.resume_anyway or flags.retry_errors, flags.resume_anyway, flags.retry_errors)
        files = _files(flags)
        return cls(flags, asked, machine, ray, files, _begun(files, resuming), resuming)

    def request(
        self,
        file: InputFile,
        defaults: Options,
        style: str = AUTO,
        skip_invalid: bool = False,
        made_of: Settings | None = None,
    ) -> BatchRequest:
        """The request, with its input checked line by line."""
        flags, model = self.flags, model_of(self.flags)
        return BatchRequest(
            model=model.without_weights() if flags.dry_run else model,
            site=site_of(flags),
            plan=self.plan,
            machine=self.machine,
            checked=_checked(file, defaults, self.begun, self.resuming, skip_invalid, _names_of(model)),
            defaults=defaults,
            style=style,
            seed=flags.seed,
            files=self.files,
            begun=self.begun,
            resuming=self.resuming,
            ordered=flags.ordered,
            ray=self.ray,
            dry_run=flags.dry_run,
            verbose=flags.verbose,
            arguments={name: value for name, value in vars(flags).items() if value is not None},
            made_of=made_of or {},
        )


# -- workers ---------------------------------------------------------------------------------------------------------------


def _ray(flags: Namespace, asked: Plan | PlanRequirements) -> RayRequest | None:
    """The workers that are asked for. What speaks of one machine, or lets each worker decide about answers, is refused."""
    if flags.ray is None:
        for flag, value in ((WORKERS, flags.workers), (HAND_OUT, flags.hand_out)):
            if value is not None:
                raise ValueError(f"{flag} {value} is for a job on workers; add {RAY} {LOCAL}, or the address of a cluster")
        return None
    if flags.gpus > 1:
        raise ValueError(f"{GPUS} {flags.gpus} is for this machine, and {RAY} has workers of its own; leave one of them out")
    if find_spec("ray") is None:
        raise ValueError(not_installed("Ray", "ray"))
    if "://" in flags.ray:
        raise ValueError(
            f"{RAY} {flags.ray} speaks to a cluster from outside; run the job on one of its machines, with {RAY} auto"
        )
    if flags.dry_run:
        raise ValueError(f"--dry-run shows the plan for this machine, and each worker finds one for its own; leave out {RAY}")
    if flags.machine is not None:
        raise ValueError(f"--machine {flags.machine} is one machine, and workers measure their own; leave it out")
    if isinstance(asked, PlanRequirements) and asked.may_change_answers:
        allowed = "--allow-4bit, --allow-int8 and --allow-recall"
        raise ValueError(f"{allowed} would have each worker of {RAY} choose for itself; say {PACK} or --kv-recall instead")
    if (asked.plan if isinstance(asked, PlanRequirements) else asked).answers_depend_on_prefixes:
        why = "answers depend on what requests share where KV is evicted or packed, and a worker sees its own requests alone"
        raise ValueError(f"{why}: with {RAY} say --shared-prefixes 0")
    return RayRequest(flags.ray, flags.workers, flags.hand_out, flags.device != "cpu")


# -- files -----------------------------------------------------------------------------------------------------------------


def _files(flags: Namespace) -> JobFiles:
    """The files that are written. None of them is the input, nor another of them, whatever links lead there."""
    named = {OUTPUT: flags.output_file, "--metrics": flags.metrics}
    for flag, name in named.items():
        check_writable(name, flag)
    output, given = _real(flags.output_file), local_path(flags.output_file)
    if given.exists() and not given.is_file():  # a link to an open pipe leads to no path
        raise ValueError(f"{OUTPUT} {flags.output_file} is a device or a pipe, from which no job can go on; give a plain file")
    if not os.access(output if output.exists() else output.parent, os.W_OK, effective_ids=True):
        raise ValueError(f"{OUTPUT} {flags.output_file} cannot be written; give a file that can, in a folder that can")
    if _is_stdout(output):
        raise ValueError(f"{OUTPUT} {flags.output_file} is where stdout goes, which has a line of its own; send that elsewhere")
    files = JobFiles(output, manifest_file(output), flags.metrics and _real(flags.metrics))
    taken = {_real(flags.input_file): f"{INPUT} {flags.input_file}"}
    written = {files.output: OUTPUT, files.manifest: "the manifest", waiting_file(output): "the file of waiting records"}
    for path, what in (*written.items(), (files.metrics, "--metrics")):
        if path is None:
            continue
        same = next((other for one, other in taken.items() if _are_one(one, path)), None)
        if same is not None:
            raise ValueError(f"{what} would be {path}, which is {same}; give another file")
        taken[path] = what
    return files


def _real(name: str) -> Path:
    return local_path(name).resolve()


def _is_stdout(path: Path) -> bool:
    try:
        return os.path.samestat(path.stat(), os.fstat(sys.stdout.fileno()))
    except (OSError, ValueError, AttributeError):  # no such file, or a stdout that is closed or no file
        return False


def _are_one(one: Path, other: Path) -> bool:
    return one == other or (one.exists() and other.exists() and one.samefile(other))


def _begun(files: JobFiles, resuming: Resuming) -> Manifest | None:
    """The job that was begun before, if there is one and it is to go on."""
    waiting = waiting_file(files.output)
    is_there = any(file.exists() and file.stat().st_size for file in (files.output, waiting))
    if not resuming.asked:
        if is_there:
            raise ValueError(f"{files.output} is there already; {RESUME} goes on with it, or give another {OUTPUT}")
        return None
    begun = Manifest.read(files.manifest)
    if begun is None and is_there and not resuming.anyway:
        missing = f"{files.output} has records, but its manifest {files.manifest.name} is not there"
        raise ValueError(f"{missing}, so it is not known what they were made with; {ANYWAY} goes on all the same")
    return begun


def _names_of(model: ModelRequest) -> ModelNames | None:
    """The names that lines may have for the model; None: any, where it has no adapters."""
    return ModelNames(model.name, [*model.adapters_by_name]) if model.lora_modules else None


def _checked(
    file: InputFile,
    defaults: Options,
    begun: Manifest | None,
    resuming: Resuming,
    skip_invalid: bool,
    names: ModelNames | None,
) -> CheckedFile:
    with Progress(0, f"checking {file.name}", late=True) as progress:
        known = None if begun is None else begun.checked
        checked = check_file(file, defaults, known, lambda lines: progress.update(f"{lines} lines", lines), names)
    if not checked.begins_as_known and not resuming.anyway:
        changed = f"{file.name} is not the input that the job in {OUTPUT} was begun with"
        raise ValueError(f"{changed}; give that one, or another {OUTPUT}; {ANYWAY} goes on all the same")
    if checked.num_refused and not skip_invalid:
        raise ValueError(checked.error())
    return checked


# -- flags -----------------------------------------------------------------------------------------------------------------


def make_parser(program: str = PROGRAM) -> Parser:
    usage = f"{program} -i in.jsonl -o out.jsonl [--model NAME] [--percent W W KV KV A A] [options]"
    parser = Parser(program, DESCRIPTION, usage, EPILOG.replace(PROGRAM, program), INSTEAD, FIRST)
    group = parser.group("job")
    group.add("-i", INPUT, metavar="FILE", required=True, help="the requests: JSON in each line (.jsonl), or a text (.txt)")
    add_job(group)
    group.truth("--skip-invalid", text="record bad lines as errors and run the others (default: nothing runs)")
    add_engine(parser)
    _add_defaults(parser)
    return parser


def add_job(group: Group) -> None:
    """Adds where records go, and how a job goes on."""
    records = "a record per request; beside FILE.jsonl, FILE.manifest.json says what the job is"
    group.add("-o", OUTPUT, metavar="FILE", required=True, help=records)
    group.truth("--ordered", text="records in the order of the input (default: as requests finish)")
    group.truth(RESUME, text="go on with the job in the output: only requests without a record are run; a new job begins")
    group.truth(RETRY, text=f"{RESUME}, and run requests again if their record is an error")
    group.truth(ANYWAY, text=f"{RESUME} with another model, input or other options than the job was begun with")
    group.value("--metrics", "FILE", "append how far the job is, every few seconds: a line of JSON each")
    group.verbose(f"0: no plan; {TRACEBACK}: where errors come from")


def add_engine(parser: Parser) -> None:
    """Adds the model, the processes that run it, the plan, and how much of the KV is kept."""
    parser.add_model()
    parser.add_tokenizer()
    workers = parser.group("workers")
    workers.option(SITE["gpus"])
    _add_workers(workers)
    _add_plan(parser.group("plan"))
    parser.add_search(f"search, {WHERE_FOUND}", "what a search prices plans for")
    parser.add_kv()


def _add_workers(group: Group) -> None:
    where = f"run on workers of Ray (extra [ray]): {LOCAL}, on this machine, or the address of a cluster that runs"
    group.value(RAY, "ADDRESS", where)
    group.value(
        WORKERS, "N", "each with a model and a plan of its own (default: one for each machine)", Bounds(1, MOST_WORKERS)
    )
    handed = (
        "requests that a worker gets at once; if a worker dies, its requests are run again (default: shares of what is left)"
    )
    group.value(HAND_OUT, "N", handed, PROMPTS)


def _add_plan(group: Group) -> None:
    add_placement(group, may_be_found=True)
    group.option(PLAN["compute"])
    add_sizes(group, WHERE_FOUND)
    group.option(PLAN["shared_prefixes"])
    group.option(PLAN["prefix_policy"])
    add_prefix_folder(group)
    group.option(MODEL["lora_modules"])
    group.truth("--dry-run", text="check the input and print the plan and its bytes per tier; no weights are loaded")


def _add_defaults(parser: Parser) -> None:
    group = parser.group("what lines leave open")
    group.value("--gen-len", "TOKENS", "generated for a request, at most: its max_tokens", TOKENS, SamplingParams.max_tokens)
    styles = "how chats become text: the model's chat template, a script of User: and Assistant:, or plain text"
    group.choice("--style", (AUTO, *STYLES), f"{styles}; auto: the template, or a script where there is none", AUTO)
    group.truth("--return-token-ids", text="records have token ids beside texts")
    parser.add_sampling()
