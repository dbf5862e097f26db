"""Finds the quantised matrices of a checkpoint: the tensors that each is written in, checked against each other, become one
`StoredMatrix`. A matrix is read in place if its bytes lie in the file as products need them; the others are imported.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from h2o_flexgen.checkpoints.importing import PER_WORD, WORD, Importing, order_of, values_of
from h2o_flexgen.checkpoints.quantisation import AWQ, COMPRESSED, FP8, GPTQ, MXFP4, WHOLE, Quantisation
from h2o_flexgen.checkpoints.stored_tensors import StoredMatrix, StoredTensor
from h2o_flexgen.core.model_spec import MOST_WIDTH
from h2o_flexgen.formats.fp8 import FP8_BLOCKS, Fp8
from h2o_flexgen.formats.int4 import INT4, Int4
from h2o_flexgen.formats.mxfp4 import MXFP4_SECTIONS

WEIGHT = "weight"
E4M3, BYTES, POWERS = "F8_E4M3", ("U8", "I8"), ("U8", "F8_E8M0")
SCALES_OF_FP8 = ("weight_scale_inv", "weight_scale", "scale", "qscale_weight")  # whichever is there
SCALE_TYPES = {"float32": "float32", "bfloat16": "bfloat16", "float16": "float16", **dict.fromkeys(POWERS, "e8m0")}
GROUPS = tuple(sorted({format.group for format in INT4}, reverse=True))
SCALES_OF_INT4 = tuple(sorted({format.scale for format in INT4}))

Tensors = Mapping[str, StoredTensor]


@dataclass(frozen=True)
class FoundTensors:
    """The tensors of a checkpoint that are left, and its matrices, by their names in the model."""

    tensors: Tensors
    matrices: Mapping[str, StoredMatrix] = field(default_factory=dict)


def find_matrices(quantisation: Quantisation | None, tensors: Tensors) -> FoundTensors:
    if quantisation is None:
        return FoundTensors(tensors)
    matrices, used = {}, set()
    for name in tensors:
        for end, find in READERS[quantisation.method].items():
            if name.endswith(end):
                parts = _TensorParts(name.removesuffix(end), tensors, quantisation)
                if matrix := find(parts):
                    matrices[matrix.name] = matrix
                    used.update(parts.used)
    return FoundTensors({name: tensor for name, tensor in tensors.items() if name not in used}, matrices)


@dataclass(frozen=True)
class _TensorParts:
    """The tensors with the same prefix in their names."""

    prefix: str
    tensors: Tensors
    quantisation: Quantisation
    used: set[str] = field(default_factory=set)

    def get(self, end: str) -> StoredTensor | None:
        """The tensor with this end of its name, which then belongs to the matrix."""
        found = self.tensors.get(self.prefix + end)
        if found is not None:
            self.used.add(found.name)
        return found

    def required(self, end: str, dtypes: tuple[str, ...], dimensions: int = 2) -> StoredTensor:
        found = self.get(end)
        if found is None:
            raise ValueError(f"tensor {self.prefix}{end} is missing; without it {self.prefix}* cannot be read")
        return self.checked(found, dtypes, dimensions)

    def checked(self, found: StoredTensor, dtypes: tuple[str, ...], dimensions: int = 2) -> StoredTensor:
        if found.dtype not in dtypes:
            raise _wrong(found, f"has the dtype {found.dtype} where {' or '.join(dtypes)} is read")
        if len(found.shape) != dimensions or not all(found.shape):
            raise _wrong(found, f"has the shape {found.shape} where {dimensions} sizes are to stand")
        return found


def _wrong(tensor: StoredTensor, what: str) -> ValueError:
    return ValueError(f"tensor {tensor.name} in {tensor.file} {what}; give another checkpoint")


# -- whole numbers of 4 bits -------------------------------------------------------------------------------------------------


def _awq(parts: _TensorParts) -> StoredMatrix:
    words, scales = parts.required("qweight", (WORD,)), parts.required("scales", SCALES_OF_INT4)
    inputs, outputs = words.shape[0], scales.shape[1]
    _check_words(words, (inputs, outputs), along=1)
    return _imported(parts, AWQ, (outputs, inputs), words, scales, scales.shape[0])


def _gptq(parts: _TensorParts) -> StoredMatrix:
    words, scales = parts.required("qweight", (WORD,)), parts.required("scales", SCALES_OF_INT4)
    groups = parts.get("g_idx")
    inputs = words.shape[0] * PER_WORD if groups is None else parts.checked(groups, (WORD,), 1).shape[0]
    outputs = scales.shape[1]
    _check_words(words, (inputs, outputs), along=0)
    return _imported(parts, GPTQ, (outputs, inputs), words, scales, scales.shape[0], groups)


def _imported(
    parts: _TensorParts,
    method: str,
    shape: tuple[int, int],
    words: StoredTensor,
    scales: StoredTensor,
    count: int,
    groups: StoredTensor | None = None,
) -> StoredMatrix:
    """A matrix of AWQ or GPTQ: zero points lie like scales, eight outputs to a word."""
    zeros = parts.required("qzeros", (WORD,))
    if shape[0] % PER_WORD:
        raise _wrong(scales, f"has {shape[0]} outputs, but zero points come in whole words of {PER_WORD}")
    if zeros.shape != (count, shape[0] // PER_WORD):
        raise _wrong(zeros, f"has the shape {zeros.shape} beside {count} x {shape[0]} scales")
    return _integers(parts, method, shape, words, scales, zeros, groups)


def _compressed(parts: _TensorParts) -> StoredMatrix:
    words, scales = parts.required("weight_packed", (WORD,)), parts.required("weight_scale", SCALES_OF_INT4)
    outputs, inputs = scales.shape[0], words.shape[1] * PER_WORD
    parts.get("weight_shape")  # says what the shapes of the others say
    _check_words(words, (outputs, inputs), along=1)
    zeros, groups = parts.get("weight_zero_point"), parts.get("weight_g_idx")
    if zeros is not None:
        rows = outputs if parts.checked(zeros, (WORD, "I8")).dtype == "I8" else -(-outputs // PER_WORD)
        _check_shape(zeros, (rows, scales.shape[1]))
    if groups is not None:
        _check_shape(parts.checked(groups, (WORD,), 1), (inputs,))
    return _integers(parts, COMPRESSED, (outputs, inputs), words, scales, zeros, groups)


def _integers(
    parts: _TensorParts,
    method: str,
    shape: tuple[int, int],
    words: StoredTensor,
    scales: StoredTensor,
    zeros: StoredTensor | None,
    groups: StoredTensor | None,
) -> StoredMatrix:
    count = scales.shape[1] if method == COMPRESSED else scales.shape[0]
    group = _group_of(parts.quantisation, scales, shape[1], count)
    kept = next((size for size in GROUPS if group % size == 0), None)
    if kept is None:
        raise _wrong(scales, f"has a scale for each {group} inputs; groups of {', '.join(map(str, GROUPS))} are read")
    if groups is not None and not _is_ordered(groups, group):
        groups = None
    format = Int4(kept, scales.dtype, zeros is not None, groups is not None)
    name = parts.prefix + WEIGHT
    if method == COMPRESSED and zeros is None and groups is None and kept == group:
        return StoredMatrix(name, format.name, shape, (words, scales))
    less = parts.quantisation.zeros_one_less
    make = Importing(method, format, shape, words, scales, zeros, groups, group, less)
    sources = tuple(one for one in (words, scales, zeros, groups) if one is not None)
    return StoredMatrix(name, format.name, shape, sources, make)


def _group_of(quantisation: Quantisation, scales: StoredTensor, inputs: int, count: int) -> int:
    """The inputs that share a scale: of the sizes in the config the one that gives so many scales."""
    sizes = tuple(inputs if size == WHOLE else size for size in quantisation.groups)
    sizes = sizes or (inputs // count,)  # a config that leaves it open
    for size in sizes:
        if size * count == inputs:
            return size
    wanted = " or ".join(map(str, sizes))
    raise _wrong(scales, f"has {count} scales for {inputs} inputs: groups of {wanted} do not divide them so")


def _is_ordered(groups: StoredTensor, group: int) -> bool:
    if groups.shape[0] > MOST_WIDTH:  # no model has such a matrix, and the numbers are read at once
        raise _wrong(groups, f"has {groups.shape[0]} inputs, and {MOST_WIDTH} are the most that are read")
    numbers = values_of(groups)  # a damaged copy is an error of another kind
    try:
        return order_of(numbers, group) is not None
    except ValueError as error:
        raise _wrong(groups, str(error)) from error


def _check_words(words: StoredTensor, shape: tuple[int, int], along: int) -> None:
    """Refuses words that do not hold so many codes of 4 bits, eight to a word along one dimension."""
    expected = tuple(size // PER_WORD if dimension == along else size for dimension, size in enumerate(shape))
    if shape[along] % PER_WORD or words.shape != expected:
        bits = 32 * words.shape[along] / shape[along] if words.shape[1 - along] == shape[1 - along] else 0
        if bits in (2, 3, 8):
            raise _wrong(words, f"has codes of {bits:g} bits; those of 4 bits are read")
        raise _wrong(words, f"has the shape {words.shape}, which does not hold codes of 4 bits for {shape[0]} x {shape[1]}")


def _check_shape(tensor: StoredTensor, shape: tuple[int, ...]) -> None:
    if tensor.shape != shape:
        raise _wrong(tensor, f"has the shape {tensor.shape} where the scales ask for {shape}")


# -- floats of 8 and of 4 bits -----------------------------------------------------------------------------------------------


def _fp8(parts: _TensorParts) -> StoredMatrix | None:
    """None: the weight is not quantised, or in a format that the caller rejects."""
    weight = parts.tensors[parts.prefix + WEIGHT]
    if weight.dtype in BYTES and len(weight.shape) == 2:
        return _fp4(parts, weight, *SCALES_OF_FP8)
    scales = next(filter(None, map(parts.get, SCALES_OF_FP8)), None) if weight.dtype == E4M3 else None
    if scales is None or len(weight.shape) != 2 or not all(weight.shape):
        return None
    parts.used.add(weight.name)
    scale = SCALE_TYPES.get(scales.dtype)
    if scale is None:
        raise _wrong(scales, f"has the dtype {scales.dtype}, which is none of scales")
    outputs, inputs = weight.shape
    format = _fp8_format(parts.quantisation, scale, (outputs, inputs), scales.shape)
    if format is None:
        known = ", ".join(f"{rows or 'all'} x {columns or 'all'}" for rows, columns in FP8_BLOCKS)
        problem = f"has the shape {scales.shape} beside a weight of {outputs} x {inputs}; scales are read for blocks of {known}"
        raise _wrong(scales, problem)
    return StoredMatrix(parts.prefix + WEIGHT, format.name, (outputs, inputs), (weight, scales))


def _fp8_format(quantisation: Quantisation, scale: str, shape: tuple[int, int], found: tuple[int, ...]) -> Fp8 | None:
    """Blocks that the config names may be cut off at the edges of a matrix; otherwise its sizes must be multiples of theirs, or
    others would fit as well."""
    for block in (*quantisation.blocks, *FP8_BLOCKS):
        format = Fp8(*block, scale)
        is_whole = all(size % (part or size) == 0 for size, part in zip(shape, block))
        rows, columns = format.scales_shape(shape)
        flat = {(rows,)} if columns == 1 else set()
        fits = found in {(rows, columns), *flat, *([()] if rows == columns == 1 else [])}
        if fits and block in FP8_BLOCKS and (is_whole or block in quantisation.blocks):
            return format
    return None


def _packed_fp4(parts: _TensorParts) -> StoredMatrix | None:
    """The packed floats of compressed-tensors, or its whole numbers."""
    packed = parts.tensors[parts.prefix + "weight_packed"]
    return _compressed(parts) if packed.dtype == WORD else _fp4(parts, packed, "weight_scale")


def _fp4(parts: _TensorParts, codes: StoredTensor, *ends: str) -> StoredMatrix:
    scales = next(filter(None, map(parts.get, ends)), None) or parts.required(ends[0], POWERS)
    parts.used.add(codes.name)
    parts.checked(codes, BYTES)
    shape = codes.shape[0], 2 * codes.shape[1]
    return _of_powers(parts, parts.prefix + WEIGHT, shape, codes, parts.checked(scales, POWERS))


def _blocks(parts: _TensorParts) -> StoredMatrix | None:
    """Blocks of 32 values as bytes (outputs, blocks, 16); those of experts have one more dimension, for all of a layer."""
    codes = parts.tensors[f"{parts.prefix}_blocks"]
    dimensions = len(codes.shape)
    if dimensions not in (3, 4) or codes.shape[-1] != 16:
        return None
    parts.used.add(codes.name)
    scales = parts.required("_scales", POWERS, dimensions - 1)
    shape = *codes.shape[:-2], codes.shape[-2] * 32
    return _of_powers(parts, parts.prefix, shape, parts.checked(codes, BYTES, dimensions), scales)


def _of_powers(
    parts: _TensorParts, name: str, shape: tuple[int, ...], codes: StoredTensor, scales: StoredTensor
) -> StoredMatrix:
    format = MXFP4_SECTIONS
    if shape[-1] % format.group or scales.shape != (*shape[:-1], shape[-1] // format.group):
        raise _wrong(scales, f"has the shape {scales.shape} beside {' x '.join(map(str, shape))} values; each 32 have a scale")
    return StoredMatrix(name, format.name, shape, (codes, scales))


READERS: Mapping[str, Mapping[str, Callable[[_TensorParts], StoredMatrix | None]]] = {
    AWQ: {"qweight": _awq},
    GPTQ: {"qweight": _gptq},
    COMPRESSED: {"weight_packed": _packed_fp4, WEIGHT: _fp8},
    FP8: {WEIGHT: _fp8},
    MXFP4: {"_blocks": _blocks, "weight_packed": _packed_fp4},
}
