"""The fields of a request for embeddings, as OpenAI names them, and a few beyond those."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from h2o_flexgen.core.allowed_values import Choice
from h2o_flexgen.core.hints import refuse_unknown
from h2o_flexgen.jobs.line_fields import UNUSED, EmbeddingForm, Options
from h2o_flexgen.sampling.pooling import INSTEAD, PoolingParams, read_truncate

FLOAT, BASE64 = "float", "base64"
ENCODING, TRUNCATE, OF_PARAMS = "encoding_format", "truncate", ("pooling", "normalize")
_WITHOUT_EFFECT = ("model", "user")
_KNOWN = (*_WITHOUT_EFFECT, ENCODING, *OF_PARAMS, TRUNCATE)
_ENCODINGS = Choice((FLOAT, BASE64))


def read_embedding_options(given: Mapping[str, object], beside: Collection[str]) -> Options:
    """The options of a request for embeddings. A field that is null is left open."""
    found = {name: value for name, value in given.items() if value is not None}
    refuse_unknown("field", found, (*_KNOWN, *beside), INSTEAD)
    for name in found.keys() & _WITHOUT_EFFECT:
        UNUSED[name].value(name, found[name])
    params = PoolingParams(**{name: found[name] for name in OF_PARAMS if name in found})  # type: ignore[arg-type]
    encoding = _ENCODINGS.value(ENCODING, found.get(ENCODING, FLOAT))
    return Options(params, form=EmbeddingForm(read_truncate(found.get(TRUNCATE)), encoding == BASE64))
