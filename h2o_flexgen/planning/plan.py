"""Plan: where everything should live and how large a block is. It is a request; planning/placement.py turns it into exact
places."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from functools import cached_property

from h2o_flexgen.core.allowed_values import AUTO, TRUTH, Allowed, Bounds, Choice, Instance, decimal_number, several
from h2o_flexgen.core.hints import did_you_mean, shown
from h2o_flexgen.core.model_spec import ModelSpec
from h2o_flexgen.core.option import by_own_names, check_options, option, options_of
from h2o_flexgen.core.prefix_groups import LEAST_TOKENS
from h2o_flexgen.core.probe import Probe
from h2o_flexgen.core.site import DEVICE, DISK, HOST, TIERS, Site
from h2o_flexgen.core.workload import MOST_BATCHES, MOST_PROMPTS, MOST_TOKENS, PROMPTS, TOKENS, check_num_prompts
from h2o_flexgen.formats.kernel_table import EXACT, FLOAT32, INT8, PRODUCTS, TORCH
from h2o_flexgen.formats.table import BY_BITS, PLAIN, of_rows
from h2o_flexgen.policies import POLICIES
from h2o_flexgen.policies.by_attention import H2O
from h2o_flexgen.policies.by_judge import KVzap
from h2o_flexgen.policies.by_position import Full
from h2o_flexgen.policies.head_budgets import EQUAL, OWN, HeadBudgets
from h2o_flexgen.policies.kv_options import KVOptions
from h2o_flexgen.policies.levels import Level, levels_of, may_keep_one
from h2o_flexgen.policies.policy import PROBE, KVPolicy
from h2o_flexgen.policies.recall import ALL
from h2o_flexgen.schedule import SCHEDULES
from h2o_flexgen.schedule.ops import Op
from h2o_flexgen.schedule.traffic import Traffic


@dataclass(frozen=True)
class Shares:
    """Fractions of one kind of data per tier; the rest beside device and host goes to disk."""

    device: float
    host: float

    def __post_init__(self) -> None:
        if min(self.device, self.host) < 0 or self.device + self.host > 1 + 1e-9:
            raise ValueError(f"shares device={self.device:g} host={self.host:g} must not be negative nor exceed 1 together")

    @property
    def disk(self) -> float:
        return max(0.0, 1.0 - self.device - self.host)

    def of(self, tier: str) -> float:
        return {DEVICE: self.device, HOST: self.host, DISK: self.disk}[tier]

    def folded(self) -> Shares:
        """The shares on a machine without an accelerator: the device's share lives in host memory."""
        return Shares(0.0, self.device + self.host)


ALL_DEVICE = Shares(1.0, 0.0)
LEAST_PLACED = 1e-9  # share of which anything is placed: 1 - 0.58 - 0.42 is not quite 0
ON, OFF = "on", "off"
GRAPHS = (AUTO, ON, OFF)
STATE_DTYPES = FLOAT32, BFLOAT16 = FLOAT32, "bfloat16"
DRAFTS = OFF, NGRAM = OFF, "ngram"  # which tokens are tried that may come next
PINNED, JUDGED = PREFIX_POLICIES = "pinned", "judged"  # what becomes of prefixes that rows share
SHARE_NAMES = ("weights", "KV", "activations")
PERCENT = Bounds(0, 100, is_whole=False)
MOST_GPUS = 64  # of a machine
MOST_BUFFERS = 1000  # upper bound of those of a schedule


class RowCodec(Allowed):
    """A format of rows, of all that there are at the time. On the command line it is called by its bits."""

    def read(self, value: object) -> str:
        return Choice(of_rows()).read(value)

    def value(self, name: str, given: object, note: str = "") -> str:
        return Choice(of_rows()).value(name, given, note)

    def __str__(self) -> str:
        return str(Choice(of_rows()))

    def typed(self, word: str) -> str:
        for bits, codec in BY_BITS.items():
            if word == str(bits):
                return codec
        raise ValueError(f"{shown(word)} bits are not known; known: {', '.join(map(str, BY_BITS))}")

    def written(self, value: str) -> str:
        return next(str(bits) for bits, codec in BY_BITS.items() if codec == value)


class TierShares(Allowed):
    """Two numbers: per cent on the GPU and in CPU memory. The rest is on disk."""

    def read(self, value: object) -> Shares:
        if isinstance(value, Shares):
            return value
        device, host = several(PERCENT.read)(value)  # raises a ValueError for fewer numbers, or more
        return Shares(device / 100, host / 100)

    def typed(self, word: str) -> Shares:
        try:
            return self.read([*map(PERCENT.typed, word.split(","))])
        except ValueError:
            raise ValueError(f"{shown(word)} is not allowed; give {self}, as 0,100") from None

    def written(self, value: Shares) -> str:
        return f"{100 * value.device:g},{100 * value.host:g}"

    def __str__(self) -> str:
        return "two numbers from 0 to 100, of 100 together at most"


JSON_KEYS = {"buffers": "slots"}  # of reports and manifests, which others read
CODEC, BITS, FOUR_BITS = RowCodec(), "|".join(map(str, BY_BITS)), "4"


@dataclass(frozen=True)
class Plan:
    gpu_batch_size: int = option(4, PROMPTS, "ROWS", "sequences computed at once")
    num_gpu_batches: int = option(1, Bounds(1, MOST_BATCHES), "N", "batches that share a pass over the weights")
    weights: Shares = ALL_DEVICE
    kv: Shares = ALL_DEVICE
    hidden: Shares = ALL_DEVICE
    state: Shares | None = option(
        None,
        TierShares(),
        "GPU,CPU",
        "of models with states, per cent of these on GPU and in CPU memory; the rest is on disk (default: as of KV)",
    )
    prefill_tokens: int = option(
        1024,
        Bounds(1, MOST_PROMPTS * MOST_TOKENS),
        "N",
        "tokens of prompts computed at once: more take more memory; longer prompts are computed in pieces",
    )
    buffers: int = option(  # 1 means no overlap
        2, Bounds(1, MOST_BUFFERS), "N", "layers with weights in use or on their way at once", also_called=("slots",)
    )
    attend_on: str = option(
        DEVICE,
        Choice((DEVICE, HOST)),
        "",
        "with a GPU: in decode, KV in CPU memory and on disk is attended by the CPU, and does not cross the link",
        flags=("--cpu-cache-compute", "--cpu"),
        bare=HOST,
    )
    sep_layer: bool = option(True, TRUTH, "0|1", "attention and MLP are two layers of the schedule, not one", bare=True)
    pin_weight: bool = option(True, TRUTH, "0|1", "weights for a GPU lie in page-locked CPU memory", bare=True)
    weight_codec: str = option(  # of matrices and token tables; PLAIN: as they are stored
        PLAIN,
        CODEC,
        BITS,
        "matrices, embedding and head too, take 4 bits a value (or 8); packed once, into a cache (default: as they are)",
        flags=("--compress-weight",),
        bare=FOUR_BITS,
    )
    kv_codec: str = option(
        PLAIN,
        CODEC,
        BITS,
        "keys and values, or latents (MLA), take 4 bits (or 8), head by head (default: as they are)",
        flags=("--compress-cache",),
        bare=FOUR_BITS,
    )
    state_dtype: str = option(
        FLOAT32,
        Choice(STATE_DTYPES),
        "",
        f"of models with states that are matrices, what these are kept in; {BFLOAT16}: half the memory and half the bytes that "
        "move; each decode step rounds them, and those of a prompt are rounded once, at its end",
    )
    compute: str = option(  # a model without packed weights refuses INT8
        EXACT,
        Choice(PRODUCTS),
        "",
        f"{EXACT}: activations are multiplied as they are; {INT8}: packed weights are multiplied with activations rounded to 8 "
        "bits, which is faster; on a CPU logits of a row do not depend on the rows beside it",
    )
    graphs: str = option(  # AUTO: or they are not
        AUTO,
        Choice(GRAPHS),
        "",
        "decode steps are recorded once and then replayed without Python: on a CPU with kernels in C; on a GPU where KV and "
        f"activations stay there, and where a check of this GPU found that they hold; {ON}: also unchecked, or it is an error",
        flags=("--graphs", "--cuda-graphs"),
    )
    draft: str = option(
        OFF,
        Choice(DRAFTS),
        "",
        f"{NGRAM}: tokens are guessed from what came behind the same ones before, in a row's own prompt and text, and several "
        "are checked in a pass; tokens stay the same; keys and values must stay in place; it brings most where weights move",
    )
    schedule: str = option(
        "zigzag",
        Choice(SCHEDULES),
        "NAME",
        f"order of the work: {', '.join(SCHEDULES)}; all but the first are there for comparison",
    )
    pipeline: int = option(
        1,
        Bounds(1, MOST_GPUS),
        "N",
        "N GPUs, from the first on, each compute a range of the layers, while others compute theirs for other batches; "
        "--gpu-mem is that of each",
    )
    kv_policy: str = option(
        Full.name,
        Choice(POLICIES),
        "NAME",
        f"{', '.join(POLICIES)} (default: {Full.name}, or {H2O.name} where an option of policies that evict is given)",
    )
    kv_options: KVOptions = field(default_factory=KVOptions)  # how much the policy keeps, and which tokens are protected
    head_budgets: HeadBudgets | None = option(
        None,
        Instance(HeadBudgets, "HeadBudgets: read_head_budgets reads a file, and so does LLM"),
        f"FILE|{OWN}|{EQUAL}|{AUTO}",
        f"KV heads share out the budget as this file of `calibrate` says; {OWN}: the file beside the model; {EQUAL}: equal "
        f"budgets; {AUTO}: {OWN}, or what is kept of the model, measured once if that is quick (default: {AUTO})",
    )
    probe: Probe | None = option(
        None,
        Instance(Probe, "a Probe: read_probe reads a file, and so does LLM"),
        f"FILE|{OWN}",
        f"for {KVzap.name}: the file of `calibrate --probe` that says what a token is worth; {OWN}: the file beside the model",
    )
    shared_prefixes: bool = option(True, TRUTH, "0|1", "what requests begin with alike is computed and kept once", bare=True)
    prefix_policy: str = option(  # JUDGED: rows take what they share into their own slots
        PINNED,
        Choice(PREFIX_POLICIES),
        "",
        f"of shared prefixes; {PINNED}: it is never evicted, and a budget is that of the tokens behind it; "
        f"{JUDGED}: it is evicted as if it were not shared",
    )
    least_prefix: int = option(LEAST_TOKENS, TOKENS)  # of which tokens are shared

    def __post_init__(self) -> None:
        check_options(self, Plan)
        check_num_prompts(self.block_size)
        _ = self.policy  # refuses options that the policy does not take
        self._refuse_heads_without_share()
        self._refuse_wrong_probe()
        self._refuse_what_a_pipeline_cannot()
        if self.copies_prefixes and self.shares_prefixes:
            self.refuse_to_recall(f"prefix_policy {JUDGED!r}, which is for policies that evict", f"take {PINNED!r}")
        if self.draft != OFF:
            self.refuse_to_recall(f"draft={self.draft!r}", "leave draft out")
        if self.policy.echoes and self.copies_prefixes and self.shares_prefixes:
            raise ValueError(
                f"kv_policy {self.kv_policy!r} judges a prompt by its own echo, so prefix_policy {JUDGED!r} cannot judge what "
                f"others read before; take {PINNED!r}, or shared_prefixes=False"
            )

    def _refuse_heads_without_share(self) -> None:
        if self.head_budgets is None:
            return
        if self.policy.keeps_all:
            raise ValueError(f"kv_policy {self.kv_policy!r} keeps everything, and head budgets share out less; leave them out")
        if not self._keeps_a_share:
            raise ValueError("head budgets share out a kv_budget; give it alone, without slots or hh_ratio")

    @property
    def _keeps_a_share(self) -> bool:
        return self.kv_options.is_share_of_text and self.kv_options.recent is None

    @property
    def suits_any_head_budgets(self) -> bool:
        """Whether heads may share out what is kept, however little that leaves some of them."""
        return not self.policy.keeps_all and self._keeps_a_share and may_keep_one(self.policy)

    @property
    def why_heads_are_alike(self) -> str:
        """Why heads that share out what is kept are not looked for; nothing where they are, or nothing is evicted."""
        if self.policy.keeps_all or self.suits_any_head_budgets:
            return ""
        if not self._keeps_a_share:
            return "head budgets share out a --kv-budget that is given alone"
        return f"{self.kv_policy} with these options needs some tokens in every head"

    def _refuse_wrong_probe(self) -> None:
        is_asked = self.policy.judge == PROBE
        if self.probe is None:
            if is_asked:
                raise ValueError(f"kv_policy {self.kv_policy!r} ranks tokens by a probe; give probe=FILE, or probe='own'")
            return
        if not is_asked:
            raise ValueError(f"kv_policy {self.kv_policy!r} asks no probe; leave probe out")

    def refuse_to_recall(self, what: str, instead: str = "") -> None:
        """Refuses what is not done yet where decode steps choose what they attend."""
        if self.policy.recall != ALL:
            first = f"{instead}, or " if instead else ""
            raise ValueError(f"kv_recall {self.policy.recall:g} cannot be had with {what}; {first}leave kv_recall out")

    def recalling(self, share: float, reuse: bool = False) -> Plan:
        """The plan with decode steps that attend this share."""
        return replace(self, kv_options=replace(self.kv_options, kv_recall=share, kv_recall_reuse=reuse))

    def without_reuse(self) -> Plan:
        """The plan in which steps keep nothing of what they have read."""
        return replace(self, kv_options=replace(self.kv_options, kv_recall_reuse=False))

    def tiers_of_kv(self, site: Site) -> tuple[str, ...]:
        """The tiers on which KV may lie. Where steps choose what they attend, and there is a GPU, a disk is among them only if
        the GPU attends what is read there, and if that does not stay in memory."""
        chooses, cannot = self.policy.recall != ALL, self.attend_on == HOST or self.policy.reuses_read
        return (DEVICE, HOST) if site.accelerator and chooses and cannot else TIERS

    def refuse_recall(self, spec: ModelSpec, site: Site) -> None:
        """Refuses models and machines for which that is not done yet."""
        if DISK not in self.tiers_of_kv(site) and self.kv.disk > LEAST_PLACED:
            what = f"attend_on={HOST!r}" if self.attend_on == HOST else "kv_recall_reuse"
            self.refuse_to_recall(f"a GPU, KV on disk and {what}", f"leave {what} out, keep KV in memory")
        lacks = {
            "ALiBi": any(own.position_values for own in spec.of_heads),
            "attention beside a scan": any(one.has_kv and one.states for one in spec.unlike_layers),
            "a window in every layer": all(spec.windows),
        }
        for what, is_there in lacks.items():
            if is_there:
                self.refuse_to_recall(what)

    def _refuse_what_a_pipeline_cannot(self) -> None:
        if self.pipeline == 1:
            return
        self.refuse_to_recall(f"a pipeline of {self.pipeline} devices", "give pipeline=1")
        asked = f"a pipeline of {self.pipeline} devices"
        if self.schedule != Plan.schedule:
            raise ValueError(f"{asked} has an order of its own, and schedule={self.schedule!r} is another; leave it out")
        if self.attend_on == HOST:
            raise ValueError(f"in {asked} each attends where it computes; leave attend_on={HOST!r} out")
        if self.graphs == ON:
            raise ValueError(f"graphs={ON!r} is for a single GPU, and {asked} was asked for; leave one of them out")

    @staticmethod
    def option_names() -> list[str]:
        """The options of `create`: the fields of a plan, with those of `kv_options` in its place."""
        own = [one.name for one in fields(Plan) if one.name != "kv_options"]
        return [*own, *options_of(KVOptions), *(name for one in options_of(Plan).values() for name in one.also_called)]

    @classmethod
    def create(cls, **options: object) -> Plan:
        """Creates a plan from options, those of the KV policy too. The error for an unknown one names the nearest known."""
        for name in options:
            if name not in cls.option_names():
                raise ValueError(f"unknown plan option {name!r}{did_you_mean(name, cls.option_names())}")
        options = by_own_names(options, cls)
        of_kv = {name: options.pop(name) for name in options_of(KVOptions) if name in options}
        return cls(kv_options=KVOptions(**of_kv), **options)  # type: ignore[arg-type]

    @cached_property
    def policy(self) -> KVPolicy:
        return POLICIES[self.kv_policy](self.kv_options)

    def as_json(self) -> dict[str, object]:
        """All options; head budgets and a probe, which are many numbers, by name and checksum."""
        return {JSON_KEYS.get(one.name, one.name): _as_json(getattr(self, one.name)) for one in fields(self)}

    def levels(self, spec: ModelSpec) -> tuple[Level, ...]:
        """The KV heads of a model by what they keep, those that keep most first."""
        return levels_of(self.policy, self.head_budgets, spec)

    def page_locks(self, op: Op) -> bool:
        """Whether what an op carries between host and device lies in page-locked memory, as all but weights always does."""
        return self.pin_weight or op is not Op.LOAD_W

    @property
    def shares_prefixes(self) -> bool:
        """Whether prefixes are shared: among batches that do a step together, or one would wait for what another has yet to
        do; and on one device, which keeps them for all layers."""
        return self.shared_prefixes and self.pipeline == 1 and SCHEDULES[self.schedule].keeps_step

    @property
    def why_none_are_shared(self) -> str:
        """The reason why no prefixes are shared, where none are. Layers that cannot share them have switched them off."""
        if not self.shared_prefixes:
            return "they are off, or the model's layers have windows"
        return f"schedule={self.schedule!r} cannot" if self.pipeline == 1 else f"a pipeline of {self.pipeline} devices cannot"

    @property
    def copies_prefixes(self) -> bool:
        """Whether rows take shared prefixes into their own slots."""
        return self.prefix_policy == JUDGED

    @property
    def answers_depend_on_prefixes(self) -> bool:
        """Whether what a row attends depends on whether it shares a prefix: it is kept or attended whole where a policy would
        evict or choose of it, or packed before the prompt after it is read."""
        is_kept_whole = not self.copies_prefixes and not self.policy.attends_all
        return self.shares_prefixes and (is_kept_whole or self.kv_codec != PLAIN)

    @property
    def least_own(self) -> int:
        """The last tokens of a prompt, which a row never shares. Where it takes copies that are judged, all queries that may
        count in that are its own."""
        return (self.policy.last_queries if self.copies_prefixes else None) or 1

    @property
    def prefix_note_bytes(self) -> int:
        """Bytes kept for a token of a shared prefix and a KV head beside key and value: for rows that take a copy of them."""
        return self.policy.score_bytes if self.copies_prefixes else 0

    @property
    def block_size(self) -> int:
        return self.gpu_batch_size * self.num_gpu_batches

    def with_percent(self, percent: Sequence[float]) -> Plan:
        """The plan with FlexGen's six numbers: per cent of weights, KV, activations on GPU and in CPU memory; the rest is
        disk."""
        if isinstance(percent, str):
            raise ValueError(f"percent is {percent!r}, but here it takes six numbers, and in LLM 'auto', too")
        if len(percent) != 6:
            raise ValueError(f"percent takes six numbers, got {len(percent)}: {list(percent)}")
        shares = []
        for name, gpu, cpu in zip(SHARE_NAMES, percent[0::2], percent[1::2], strict=True):
            for share in (gpu, cpu):
                PERCENT.value(f"percent for {name}", share)
            if gpu + cpu > 100:
                raise ValueError(f"percent for {name} is {gpu:g} (GPU) and {cpu:g} (CPU): together they may not exceed 100")
            shares.append(Shares(gpu / 100, cpu / 100))
        return replace(self, weights=shares[0], kv=shares[1], hidden=shares[2])

    @property
    def of_states(self) -> Shares:
        """The shares of states of rows."""
        return self.kv if self.state is None else self.state

    @property
    def stays_in_place(self) -> bool:
        """Whether KV, states and activations stay on the device. Weights may come through buffers, which are few."""
        return self.kv == self.of_states == self.hidden == ALL_DEVICE

    def may_capture(self, graph_bytes: int | None) -> bool:
        """Whether decode steps may be captured as graphs of a GPU, which work on addresses that stay. `graph_bytes`: what a
        graph takes, or None where no check has found that they hold."""
        is_wanted = self.graphs == ON or (self.graphs == AUTO and graph_bytes is not None)
        return is_wanted and self.stays_in_place and self.pipeline == 1

    @property
    def may_record(self) -> bool:
        """Whether decode steps on a CPU may be recorded: for each buffer that data comes through, which are few."""
        return self.graphs != OFF and self.pipeline == 1

    def refuse_graphs(self, site: Site) -> None:
        """Raises if graphs are required and are not possible at a site."""
        if self.graphs != ON:
            return
        if site.accelerator and not self.stays_in_place:
            required = f"graphs={ON!r} is for plans that keep all KV and activations on the GPU"
            raise ValueError(f"{required}, and this one moves some; take graphs={AUTO!r}")
        if not site.accelerator and site.processor.build == TORCH:
            raise ValueError(f"graphs={ON!r} needs the kernels in C, and there are none here; take graphs={AUTO!r}")

    @property
    def has_own_buffers(self) -> bool:
        """Whether the schedule fixes its number of buffers, so that a plan cannot choose it."""
        return SCHEDULES[self.schedule](Traffic(steps=1, layers=1, batches=1, buffers=1)).buffers > 1

    def without_overlap(self) -> Plan:
        """The plan with one buffer: fetch, compute and store one after the other."""
        if self.has_own_buffers:
            raise ValueError(f"schedule={self.schedule!r} cannot do without overlap: it has buffers of its own; choose another")
        return replace(self, buffers=1)

    @property
    def first_plan(self) -> Plan:
        """The plan that a model is opened under: this one. Requirements, of which a plan is yet to be found, have another."""
        return self

    def at(self, site: Site) -> Plan:
        """The plan as it can be carried out at a site."""
        return self if site.accelerator else self.folded()

    def folded(self) -> Plan:
        weights, kv, hidden = self.weights.folded(), self.kv.folded(), self.hidden.folded()
        state = None if self.state is None else self.state.folded()
        return replace(self, weights=weights, kv=kv, hidden=hidden, state=state, attend_on=DEVICE)

    @property
    def percent(self) -> tuple[float, ...]:
        return tuple(
            round(100 * value, 4) for share in (self.weights, self.kv, self.hidden) for value in (share.device, share.host)
        )


def _as_json(value: object) -> object:
    if isinstance(value, HeadBudgets | Probe):
        return value.as_json()
    return asdict(value) if isinstance(value, Shares | KVOptions) else value


def six_numbers(words: Sequence[str]) -> list[float]:
    """FlexGen's six numbers as they were typed, for `with_percent`; whole ones stay whole."""
    numbers = [decimal_number(word) for word in words]
    if len(numbers) != 2 * len(SHARE_NAMES):
        raise ValueError(f"{len(numbers)} numbers instead of {2 * len(SHARE_NAMES)}")
    return [int(number) if number.is_integer() else number for number in numbers]
