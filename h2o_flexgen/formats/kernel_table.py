"""The table of all kernels, and the one rule that chooses from it.

Execution and prediction ask the same rule, so both always mean the same kernel. A kernel is a row here and a function of that
name in kernels/functions.py; its price is named here and measured by a profile.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from math import inf

from h2o_flexgen.formats.byte_layout import FLOAT8
from h2o_flexgen.formats.kernel_sizes import DTYPES, shared
from h2o_flexgen.formats.table import BY_BITS, FORMATS, GROUPED, MATRIX_FORMATS, OF_MATRICES, PLAIN, STORED, TILED, Stored

ENCODE, DECODE, DECODE_ROWS = "encode", "decode", "decode rows"
PRODUCT, INT8_PRODUCT = "product", "int8 product"  # the second one rounds its factor to 8 bits
# What becomes of the rows of experts where memory alone counts them: on a GPU nothing waits for these counts then.
GATHER_COUNTED, COUNTED_PRODUCTS, ADD_COUNTED = "gather counted rows", "products of counted rows", "add counted rows"
PRODUCTS_OF_SAME = "products of the same rows"  # with two or three packed matrices at once
STEADY_PRODUCT = "steady product"  # of plain matrices: with kernels in C its sums have one order for any rows
EXACT, INT8 = "exact", "int8"
FLOAT32, HALVES = "float32", ("bfloat16", "float16")
PRODUCT_OPS = PRODUCT, INT8_PRODUCT
PRODUCTS = {EXACT: PRODUCT, INT8: INT8_PRODUCT}  # by what people ask for
DECODE_ATTENTION, PROMPT_ATTENTION, SHARED_ATTENTION = "decode attention", "prompt attention", "shared attention"
ROTATE, APPEND, EVICT, NOTE = "rotate", "append", "evict", "note"
TAKE_SLOTS, GATHER_SLOTS, BRING_SLOTS = "take slots", "gather slots", "bring slots"
READ_TOKENS = "read tokens"  # tokens that lie apart in a file
CHOOSE_SLOTS, CHOSEN_ATTENTION = "choose slots", "chosen attention"  # where a decode step attends a share of all slots
TAKE_ROWS, PUT_ROWS = "take rows", "put rows"
RMS_NORM, LAYER_NORM, LENGTHS, HALVES_APART = "rms norm", "layer norm", "lengths", "halves apart"
GATED_SILU, GATED_GELU_TANH, GATED_GELU = "gated silu", "gated gelu by a tanh", "gated gelu"
GATED_QUICK_GELU, GATED_RELU, CLAMPED_SILU = "gated quick gelu", "gated relu", "clamped silu"
GATED_RELU_SQUARED, XIELU = "gated relu squared", "xielu"
GATED_SIGMOID, GATED_IDENTITY = "gated sigmoid", "gated identity"
ROUTE, GATHER_CHOSEN = "route", "gather chosen"
ADD_SCALED, ADD_WEIGHTED = "add scaled", "add weighted"
PICK_TOKENS, LIKELIEST = "pick tokens", "likeliest"
GATED_DELTA, SELECTIVE_SCAN, SHORT_CONVOLUTION = "gated delta rule", "selective scan", "short convolution"
STEP_SIZES, GATED_NORM = "step sizes", "gated norm"
SUM, MAX = "sum", "max"  # how the attention that a key gets from several queries becomes one number: MAX is the highest share

CPU, CUDA = "cpu", "cuda"
TORCH = "torch"  # no library of kernels is loaded
AMPERE = "bfloat16"  # Triton uses the tensor cores of GPUs with instructions for this type
TRITON = "triton"  # kernels for GPUs, which it compiles when they first run
BASELINE, PAIRS, AMX = "baseline", "avx512bf16", "avx512amx"  # instructions for pairs of bfloat16, and for tiles of them
VNNI, OF_PAIRS = "avx512vnni", (AMX, PAIRS)
WIDE = (*OF_PAIRS, VNNI, "avx512")  # registers of 512 bits
LIBRARIES = (*WIDE, "avxvnni", "avx2", BASELINE)  # libraries of C kernels, by the instructions they were built for, best first
FUSED = LIBRARIES[:-1]  # libraries that multiply and add with one rounding
ROWS_OF_CODES = 6  # up to here products with codes were measured to be faster than with pairs of bfloat16 made of them
ROWS_OF_DOTS = 16  # up to here dot products of stored formats were measured to be faster than panels made of them
ROWS_BEFORE_PAIRS = 8  # and up to here than panels of pairs of bfloat16
ROWS_OF_TILES = 8  # up to here a GPU is done with products on packed bytes before values could be written and read (arithmetic)
ROWS_OF_COUNTED = 4  # of an expert on average, up to which a kernel for GPUs reads a plain one once (arithmetic)
ROWS_BEFORE_DOTS = 4  # of 4 bits, in ordinary units: on an H200 tensor cores were slower with 1 row, and quicker with 8
ROWS_OF_TILE_DOTS = 32  # up to here they read the bytes: quicker there than decoding with 16 and 32 rows, slower with 64
TILE_DOTS = "tile_dots"
ROWS_OF_PLAIN_DOTS = 4  # up to here dot products of plain matrices were measured to be faster than torch's and than panels
ROWS_OF_TORCH = 1  # up to here torch reads float32 and bfloat16 faster than panels do: its products of one row are special
WIDE_SIDE = 4096  # of a matrix so large that all else that a format stores is small beside its values
MEASURED_BY_BITS = {5.0: "q4_K", 7.0: "q6_K", inf: "q8_0"}  # formats of checkpoints that a profile measures: up to so many bits
FP8_MEASURED = "fp8-128x128-float32"
WIDTH_OF_TILES = 256  # values of a head up to which kernels for GPUs find room for tiles of slots
ROWS_OF_PAIRS = 32  # up to here products with pairs of bfloat16 were measured to be faster than torch's


@dataclass(frozen=True)
class Kernel:
    """One way to do an operation. A field that is left at its default does not restrict it."""

    op: str
    format: str  # format of the bytes that it reads or writes
    function: str  # its name in kernels/functions.py
    device: str | None = None  # kind of device
    libraries: tuple[str, ...] = ()  # one of these must be loaded
    dtypes: tuple[str, ...] = ()  # types of the values in the computation
    most_rows: float = inf
    most_width: float = inf  # values of one slot or row
    instructions: str = ""  # the processor must have those with which torch multiplies this dtype
    priced_as: str = ""  # where kernels of one format have different prices
    within: str = ""  # the type that a product is made in, where it is not that of its rows

    def takes(self, dtype: str, rows: float, width: int) -> bool:
        return dtype in (self.dtypes or (dtype,)) and 0 < rows <= self.most_rows and width <= self.most_width

    @property
    def price(self) -> str:
        """The name of its rate in a profile, among those of its operation. Plain values are priced by their dtype instead."""
        return self.priced_as or measured_as(self.format)


@dataclass(frozen=True)
class Processor:
    """A kind of device, and the build of the library of kernels that is loaded there."""

    device: str = CPU
    build: str = TORCH
    instructions: tuple[str, ...] = ()  # the types of 16 bits that torch multiplies with instructions made for them

    @property
    def kernels(self) -> str:
        """The name of what computes, for reports."""
        return f"C ({self.build})" if self.build in LIBRARIES else self.build

    def runs(self, kernel: Kernel) -> bool:
        fits = kernel.device in (None, self.device) and kernel.instructions in ("", *self.instructions)
        return fits and (not kernel.libraries or self.build in kernel.libraries)


def choose(op: str, format: str, dtype: str, runs: Callable[[Kernel], bool], rows: float = 1, width: int = 1) -> Kernel | None:
    """The first kernel of the table that fits. None for a product or an attention means that the bytes are decoded first."""
    for kernel in kernels_of(op, format):
        if kernel.takes(dtype, rows, width) and runs(kernel):
            return kernel
    return None


@cache
def kernels_of(op: str, format: str) -> tuple[Kernel, ...]:
    """The rows of the table for an operation on a format: few of the many, and a search asks for them thousands of times."""
    return tuple(kernel for kernel in kernels() if kernel.op == op and kernel.format == format)


def measured_formats() -> tuple[str, ...]:
    """The formats of matrices that a profile measures."""
    return *MATRIX_FORMATS, *MEASURED_BY_BITS.values(), FP8_MEASURED


def rounds(format: str) -> bool:
    """Whether products with this format can do without exactness: their factor is rounded to 8 bits."""
    return any(kernel.within == INT8 for kernel in kernels_of(INT8_PRODUCT, format))


def prices(*ops: str) -> tuple[str, ...]:
    """The names of the rates that packed formats can have in a profile."""
    return tuple(dict.fromkeys(kernel.price for kernel in kernels() if kernel.op in ops and kernel.format != PLAIN))


@cache
def measured_as(format: str) -> str:
    """The format that a profile measures for this one. Checkpoints have many, and what decoding and products of one take
    depends on little but its bits, so that one of each family stands for all."""
    stored = FORMATS[format]
    if not isinstance(stored, Stored):
        return format
    bits = 8 * stored.nbytes((WIDE_SIDE, WIDE_SIDE), 0) / WIDE_SIDE**2
    if stored.layout.codes == FLOAT8:
        return FP8_MEASURED
    return next(name for most, name in MEASURED_BY_BITS.items() if bits <= most)


def _of_groups(format: str) -> Iterator[Kernel]:
    yield Kernel(APPEND, format, "append_coded", CUDA, (TRITON,), DTYPES)
    if format == BY_BITS[4]:  # that of indices
        yield Kernel(CHOOSE_SLOTS, format, "choose_slots", CPU, LIBRARIES, DTYPES, most_width=shared().step_head_values)
        yield Kernel(CHOOSE_SLOTS, format, "choose_slots", CUDA, (TRITON,), DTYPES, most_width=WIDTH_OF_TILES)
        yield Kernel(CHOOSE_SLOTS, format, "choose_slots_twin")
    yield Kernel(CHOSEN_ATTENTION, format, "chosen_attention", CPU, LIBRARIES, DTYPES, most_width=shared().step_head_values)
    for op, function in ((ENCODE, "group_encode"), (DECODE, "group_decode")):
        yield Kernel(op, format, function, CPU, LIBRARIES, DTYPES)
        yield Kernel(op, format, function, CUDA, (TRITON,), DTYPES)
        yield Kernel(op, format, f"{function}_twin")
    yield Kernel(DECODE_ATTENTION, format, "decode_attention", CPU, LIBRARIES, most_width=shared().step_head_values)
    yield Kernel(DECODE_ATTENTION, format, "decode_attention", CUDA, (TRITON,), DTYPES, most_width=WIDTH_OF_TILES)
    yield Kernel(SHARED_ATTENTION, format, "shared_attention", CPU, LIBRARIES, DTYPES)
    yield Kernel(SHARED_ATTENTION, format, "shared_attention", CUDA, (TRITON,), DTYPES, most_width=WIDTH_OF_TILES)


def _of_tiles(format: str) -> Iterator[Kernel]:
    for op, function in ((ENCODE, "tile_encode"), (DECODE, "tile_decode"), (DECODE_ROWS, "tile_decode_rows")):
        yield Kernel(op, format, function, CPU, LIBRARIES, DTYPES)
        yield Kernel(op, format, function, CUDA, (TRITON,), DTYPES)
        yield Kernel(op, format, f"{function}_twin")
    yield Kernel(PRODUCT, format, "tile_product", CPU, OF_PAIRS, ("bfloat16",), most_rows=ROWS_OF_CODES, within=FLOAT32)
    yield Kernel(PRODUCT, format, "pair_product", CPU, OF_PAIRS, ("bfloat16",), priced_as=f"pairs {format}")
    yield Kernel(PRODUCT, format, "tile_product", CPU, LIBRARIES, DTYPES, within=FLOAT32)
    few = Kernel(PRODUCT, format, "tile_product", CUDA, (TRITON,), DTYPES, most_rows=ROWS_OF_TILES, within=FLOAT32)
    of_same = replace(few, op=PRODUCTS_OF_SAME, function="tile_products")
    if format == OF_MATRICES[BY_BITS[4]]:
        yield replace(few, dtypes=HALVES, most_rows=ROWS_BEFORE_DOTS, instructions=AMPERE)
        yield Kernel(PRODUCT, format, TILE_DOTS, CUDA, (TRITON,), HALVES, most_rows=ROWS_OF_TILE_DOTS, instructions=AMPERE)
        yield replace(of_same, dtypes=HALVES, most_rows=ROWS_BEFORE_DOTS)
        of_same = replace(of_same, dtypes=("float32",))
    yield from (few, of_same)
    yield replace(few, op=COUNTED_PRODUCTS, function="counted_tile_products", most_rows=inf)
    yield Kernel(INT8_PRODUCT, format, "int8_product", CPU, LIBRARIES, DTYPES, priced_as=f"int8 {format}", within=INT8)
    yield Kernel(INT8_PRODUCT, format, "int8_product", CUDA, (TRITON,), DTYPES, priced_as=f"int8 {format}", within=INT8)
    yield Kernel(INT8_PRODUCT, format, "int8_product_twin", priced_as=f"int8 {format}", within=INT8)


def _rounded_products(format: Stored) -> Iterator[Kernel]:
    """Products of a format of checkpoints where rows may be rounded to 8 bits: they are if its codes are whole numbers."""
    if format.layout.codes == FLOAT8:
        exact = (kernel for kernel in _of_stored(format.name) if kernel.op == PRODUCT)
        in_one_order = (kernel for kernel in exact if kernel.device != CPU or kernel.most_rows == inf)  # for any rows
        yield from (replace(kernel, op=INT8_PRODUCT) for kernel in in_one_order)
    else:
        price = f"int8 {measured_as(format.name)}"
        yield Kernel(INT8_PRODUCT, format.name, "stored_int8_product", CPU, LIBRARIES, DTYPES, priced_as=price, within=INT8)
        yield Kernel(INT8_PRODUCT, format.name, "stored_int8_product_twin", priced_as=price, within=INT8)


def _of_stored(format: str) -> Iterator[Kernel]:
    """A format of checkpoints, which nothing here writes."""
    yield Kernel(DECODE, format, "stored_decode", CPU, LIBRARIES, DTYPES)
    yield Kernel(DECODE, format, "stored_decode", CUDA, (TRITON,), DTYPES)
    yield Kernel(DECODE, format, "stored_decode_twin")
    few = Kernel(PRODUCT, format, "stored_dots", CPU, LIBRARIES, DTYPES, most_rows=ROWS_OF_DOTS, within=FLOAT32)
    yield replace(few, libraries=OF_PAIRS, dtypes=("bfloat16",), most_rows=ROWS_BEFORE_PAIRS)
    yield Kernel(PRODUCT, format, "stored_pairs", CPU, OF_PAIRS, ("bfloat16",), priced_as=f"pairs {measured_as(format)}")
    yield few
    yield Kernel(PRODUCT, format, "stored_product", CPU, LIBRARIES, DTYPES, within=FLOAT32)
    yield Kernel(PRODUCT, format, "stored_product", CUDA, (TRITON,), DTYPES, most_rows=ROWS_OF_TILES, within=FLOAT32)
    yield Kernel(COUNTED_PRODUCTS, format, "counted_stored_products", CUDA, (TRITON,), DTYPES, within=FLOAT32)


def _of_plain_products() -> Iterator[Kernel]:
    yield Kernel(PRODUCT, PLAIN, "pair_product", CPU, OF_PAIRS, ("bfloat16",), most_rows=ROWS_OF_PAIRS)
    yield Kernel(PRODUCT, PLAIN, "plain_dots", CPU, FUSED, DTYPES, most_rows=ROWS_OF_PLAIN_DOTS, within=FLOAT32)
    for dtype in HALVES:
        yield Kernel(PRODUCT, PLAIN, "plain_product", CPU, dtypes=(dtype,), instructions=dtype)
    for dtype in ("float32", "bfloat16"):
        yield Kernel(PRODUCT, PLAIN, "plain_product", CPU, dtypes=(dtype,), most_rows=ROWS_OF_TORCH, within=FLOAT32)
    yield Kernel(PRODUCT, PLAIN, "wide_product", CPU, FUSED, DTYPES, within=FLOAT32)
    yield Kernel(PRODUCT, PLAIN, "wide_product", CPU, (BASELINE,), HALVES, within=FLOAT32)
    yield Kernel(PRODUCT, PLAIN, "wide_product_twin", CPU, dtypes=HALVES, within=FLOAT32)
    yield Kernel(PRODUCT, PLAIN, "plain_product")
    few = Kernel(COUNTED_PRODUCTS, PLAIN, "counted_plain_products", CUDA, (TRITON,), DTYPES, within=FLOAT32)
    yield replace(few, most_rows=ROWS_OF_COUNTED)
    yield Kernel(STEADY_PRODUCT, PLAIN, "pair_product", CPU, OF_PAIRS, ("bfloat16",))
    yield Kernel(STEADY_PRODUCT, PLAIN, "wide_product", CPU, LIBRARIES, DTYPES, within=FLOAT32)
    yield Kernel(STEADY_PRODUCT, PLAIN, "plain_product")


def _of_slots() -> Iterator[Kernel]:
    for op, function in ((ROTATE, "rotate"), (APPEND, "append"), (EVICT, "evict"), (TAKE_SLOTS, "take_slots")):
        yield Kernel(op, PLAIN, function, CUDA, (TRITON,))
        yield Kernel(op, PLAIN, function, CPU, LIBRARIES, () if op in (EVICT, TAKE_SLOTS) else DTYPES)
        yield Kernel(op, PLAIN, f"{function}_twin")
    yield Kernel(NOTE, PLAIN, "note", CPU, LIBRARIES)
    yield Kernel(NOTE, PLAIN, "note_twin")
    yield Kernel(GATHER_COUNTED, PLAIN, "gather_counted", CUDA, (TRITON,))
    yield Kernel(ADD_COUNTED, PLAIN, "add_counted", CUDA, (TRITON,), DTYPES)
    yield Kernel(GATHER_SLOTS, PLAIN, "gather_slots", CUDA, (TRITON,))
    yield Kernel(GATHER_SLOTS, PLAIN, "gather_slots_twin")
    yield Kernel(BRING_SLOTS, PLAIN, "bring_slots", CUDA, (TRITON,))
    yield Kernel(BRING_SLOTS, PLAIN, "bring_slots_twin")
    yield Kernel(READ_TOKENS, PLAIN, "read_tokens", CPU, LIBRARIES)
    yield Kernel(READ_TOKENS, PLAIN, "read_tokens_twin")


def _of_values() -> Iterator[Kernel]:
    yield Kernel(RMS_NORM, PLAIN, "rms_norm", CUDA, (TRITON,), DTYPES)
    gelus = (GATED_GELU_TANH, "gated_gelu_tanh"), (GATED_GELU, "gated_gelu"), (GATED_QUICK_GELU, "gated_quick_gelu")
    gating = (GATED_SILU, "gated_silu"), (CLAMPED_SILU, "clamped_silu"), (GATED_RELU, "gated_relu"), *gelus
    ungated = (GATED_RELU_SQUARED, "gated_relu_squared"), (XIELU, "xielu")
    gates = (GATED_SIGMOID, "gated_sigmoid"), (GATED_IDENTITY, "gated_identity")
    of_rows = (RMS_NORM, "rms_norm"), (LAYER_NORM, "layer_norm"), (LENGTHS, "lengths"), (HALVES_APART, "halves_apart")
    of_experts = (ROUTE, "route"), (GATHER_CHOSEN, "gather_chosen")
    sums = (ADD_SCALED, "add_scaled"), (ADD_WEIGHTED, "add_weighted")
    picking = (PICK_TOKENS, "pick_tokens"), (LIKELIEST, "likeliest")
    for op, function in (*gating, *ungated, *gates, *of_rows, *of_experts, *sums, *picking):
        yield Kernel(op, PLAIN, function, CPU, LIBRARIES, DTYPES)
        yield Kernel(op, PLAIN, f"{function}_twin")
    for op, function in ((TAKE_ROWS, "take_rows"), (PUT_ROWS, "put_rows")):
        yield Kernel(op, PLAIN, function, CPU, LIBRARIES)
        yield Kernel(op, PLAIN, f"{function}_twin")


def _of_states() -> Iterator[Kernel]:
    keys, inputs = shared().state_keys, shared().convolved
    passing = (GATED_DELTA, "gated_delta", keys), (SELECTIVE_SCAN, "selective_scan", keys)
    beside = (SHORT_CONVOLUTION, "short_convolution", inputs), (STEP_SIZES, "step_sizes", inf), (GATED_NORM, "gated_norm", inf)
    for op, function, most in (*passing, *beside):
        if op != STEP_SIZES:
            yield Kernel(op, PLAIN, function, CUDA, (TRITON,), DTYPES, most_width=most)
        yield Kernel(op, PLAIN, function, CPU, LIBRARIES, DTYPES, most_width=most)
        yield Kernel(op, PLAIN, f"{function}_twin")


@cache
def kernels() -> tuple[Kernel, ...]:
    """The table. The first kernel that fits is chosen, so each twin in torch stands behind its kernel."""
    return (
        *_of_plain_products(),
        Kernel(ENCODE, PLAIN, "plain_encode"),
        Kernel(DECODE, PLAIN, "plain_decode"),
        Kernel(CHOSEN_ATTENTION, PLAIN, "chosen_attention", CPU, LIBRARIES, DTYPES, most_width=shared().step_head_values),
        Kernel(DECODE_ATTENTION, PLAIN, "decode_attention", CPU, LIBRARIES, DTYPES, most_width=shared().step_head_values),
        Kernel(DECODE_ATTENTION, PLAIN, "decode_attention", CUDA, (TRITON,), DTYPES, most_width=WIDTH_OF_TILES),
        Kernel(DECODE_ATTENTION, PLAIN, "decode_attention_twin"),
        Kernel(PROMPT_ATTENTION, PLAIN, "prompt_attention", CUDA, (TRITON,), HALVES, most_width=256, instructions=AMPERE),
        Kernel(PROMPT_ATTENTION, PLAIN, "prompt_attention", CPU, LIBRARIES, DTYPES),
        Kernel(PROMPT_ATTENTION, PLAIN, "prompt_attention_twin"),
        Kernel(SHARED_ATTENTION, PLAIN, "shared_attention", CPU, LIBRARIES, DTYPES),
        Kernel(SHARED_ATTENTION, PLAIN, "shared_attention", CUDA, (TRITON,), DTYPES, most_width=WIDTH_OF_TILES),
        Kernel(SHARED_ATTENTION, PLAIN, "shared_attention_twin"),
        *_of_slots(),
        *_of_values(),
        *_of_states(),
        *(kernel for format in GROUPED for kernel in _of_groups(format.name)),
        *(kernel for format in TILED for kernel in _of_tiles(format.name)),
        *(kernel for format in STORED for kernel in _of_stored(format.name)),
        *(kernel for format in STORED for kernel in _rounded_products(format)),
    )
