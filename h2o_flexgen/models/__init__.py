"""The table of architectures, and how a model comes to be from the name or the folder of one. Importing this stays cheap."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from h2o_flexgen.checkpoints.gguf_config import OWN_KEYS, config_in
from h2o_flexgen.checkpoints.gguf_format import SUFFIX, Gguf, is_gguf, read_gguf, refuse_no_file
from h2o_flexgen.checkpoints.model_files import read_object
from h2o_flexgen.checkpoints.model_places import place_here, resolve_model
from h2o_flexgen.checkpoints.stored_architecture import TABLE_OF_MODELS, GgufArchitecture, TensorNames
from h2o_flexgen.core.files import parse_json
from h2o_flexgen.core.hints import known_of_many, one_line, shown
from h2o_flexgen.core.model_spec import DTYPE_BYTES
from h2o_flexgen.models.config_values import check_config, labels_of, parts_beside_text, what_is_unsupported
from h2o_flexgen.models.whole_configs import TEXT_PARTS, text_part, whole_config

if TYPE_CHECKING:
    from h2o_flexgen.models.base import Model
    from h2o_flexgen.models.config_values import Bounds, Config

LIKE_OTHERS = {"kimi_k2": "deepseek_v3"}  # names of configs that say what another architecture does
LONGEST_OBJECTION = 300  # characters of what transformers says
FLOAT, NO_JSON = "__float__", ("Infinity", "-Infinity", "NaN")

# the model_type of a config -> module and class
MODELS: Mapping[str, tuple[str, str]] = {
    "opt": ("opt", "OPT"),
    "llama": ("llama", "Llama"),
    "mistral": ("mistral", "Mistral"),
    "qwen2": ("qwen", "Qwen2"),
    "qwen3": ("qwen", "Qwen3"),
    "phi3": ("phi3", "Phi3"),
    "gemma": ("gemma", "Gemma"),
    "gemma2": ("gemma", "Gemma2"),
    "gemma3_text": ("gemma", "Gemma3"),
    "falcon": ("falcon", "Falcon"),
    "gpt2": ("gpt2", "Gpt2"),
    "gptj": ("gpt2", "GptJ"),
    "bloom": ("bloom", "Bloom"),
    "mpt": ("bloom", "Mpt"),
    "gemma4_text": ("gemma4", "Gemma4"),
    "gemma4_unified_text": ("gemma4", "Gemma4Dense"),
    "mixtral": ("mistral", "Mixtral"),
    "olmoe": ("olmo", "Olmoe"),
    "qwen2_moe": ("qwen", "Qwen2Moe"),
    "qwen3_moe": ("qwen", "Qwen3Moe"),
    "gpt_oss": ("gpt_oss", "GptOss"),
    "glm4_moe": ("glm", "GlmMoe"),
    "granite": ("granite", "Granite"),
    "granitemoe": ("granite", "GraniteMoe"),
    "phi": ("phi", "Phi"),
    "starcoder2": ("starcoder2", "Starcoder2"),
    "stablelm": ("stablelm", "StableLM"),
    "ernie4_5": ("ernie", "Ernie"),
    "ernie4_5_moe": ("ernie", "ErnieMoe"),
    "minimax_m2": ("minimax", "MiniMaxM2"),
    "hunyuan_v1_dense": ("hunyuan", "Hunyuan"),
    "hunyuan_v1_moe": ("hunyuan", "HunyuanMoe"),
    "llama4_text": ("llama4", "Llama4"),
    "smollm3": ("smollm3", "SmolLM3"),
    "olmo": ("olmo", "Olmo"),
    "olmo2": ("olmo", "Olmo2"),
    "olmo3": ("olmo", "Olmo3"),
    "ministral": ("mistral", "Ministral"),
    "ministral3": ("mistral", "Ministral3"),
    "exaone4": ("exaone", "Exaone4"),
    "cohere": ("cohere", "Cohere"),
    "cohere2": ("cohere", "Cohere2"),
    "glm4": ("glm", "Glm4"),
    "deepseek_v2": ("deepseek", "DeepSeekV2"),
    "deepseek_v3": ("deepseek", "DeepSeekV3"),
    "dots1": ("dots", "Dots1"),
    "glm4_moe_lite": ("deepseek", "GlmMoeLite"),
    "mistral4": ("mistral4", "Mistral4"),
    "kimi_linear": ("kimi", "KimiLinear"),
    "seed_oss": ("seed_oss", "SeedOss"),
    "arcee": ("arcee", "Arcee"),
    "apertus": ("arcee", "Apertus"),
    "gpt_neox": ("neox", "NeoX"),
    "lfm2": ("lfm2", "Lfm2"),
    "lfm2_moe": ("lfm2", "Lfm2Moe"),
    "qwen3_5_text": ("qwen_next", "Qwen35"),
    "qwen3_5_moe_text": ("qwen_next", "Qwen35Moe"),
    "qwen3_next": ("qwen_next", "Qwen3Next"),
    "bamba": ("mamba", "Bamba"),
    "granitemoehybrid": ("granite_hybrid", "GraniteHybrid"),
    "falcon_h1": ("falcon_h1", "FalconH1"),
    "nemotron_h": ("nemotron_h", "NemotronH"),
}


def architecture(model_type: str) -> type[Model]:
    """The class of a model_type that is known."""
    module, kind = MODELS[model_type]
    found: type[Model] = getattr(import_module(f"{__name__}.{module}"), kind)
    return found


def create_model(config: Config, dtype: str, sep_layer: bool = True, name: str = "") -> Model:
    """The architecture that the config names, its spec made for `dtype`; with sep_layer off a block is one layer."""
    kind = architecture(_known_type(getattr(config, "model_type", None)))
    if dtype not in DTYPE_BYTES:
        raise ValueError(f"dtype {dtype!r} is not supported; known are {', '.join(DTYPE_BYTES)}")
    if labels_of(config) is not None and not kind.classifies:
        raise ValueError(f"a head for classification is not read of the architecture {config.model_type}; give another model")
    return kind(config, dtype, sep_layer, name)


def tensor_names(config: Config) -> TensorNames:
    """What the files of a model with this config call its tensors."""
    kind = architecture(config.model_type)
    return TensorNames(config.model_type, kind.patterns, kind.gguf, kind.turned, kind.parts_of_heads(config))


def gguf_architectures() -> Mapping[str, GgufArchitecture]:
    """Those of which GGUF files are read, by model_type."""
    found = {model_type: architecture(model_type).gguf for model_type in MODELS}
    return {model_type: gguf for model_type, gguf in found.items() if gguf is not None}


def load_config(name_or_path: str, read: Callable[[Path], Gguf] = read_gguf) -> Config:
    """The config in a local folder or GGUF file, or by its name from the hub. `read` reads a GGUF file."""
    with _nearest_named(name_or_path):
        place = resolve_model(_full_name(name_or_path), with_weights=False)
    if is_gguf(place):
        values = config_in(read(place), gguf_architectures())
        _check(values, name_or_path)
        return cast("Config", SimpleNamespace(**values))  # it says all that an architecture reads
    return _config_of(_read_folder(place), name_or_path)


def refuse_missing(name_or_path: str, with_weights: bool) -> None:
    """Refuses a folder or GGUF file that is not there, as opening it would. A name on the hub is not looked up, and nothing
    slow is imported. Without weights, shapes that ship with the package are enough."""
    if not with_weights and hub_name(name_or_path) is not None:
        return
    with nullcontext() if with_weights else _nearest_named(name_or_path):
        place = place_here(name_or_path)
    if place is not None and is_gguf(place):
        refuse_no_file(place)


def known_config(name: str, **changes: object) -> Config | None:
    """The shapes that ship with the package, by hub name or its part behind the slash, in any case; with some changed. Their
    files say all that an architecture reads. With changes transformers says what follows from these."""
    hub = hub_name(name)
    if hub is None:
        return None
    values = parse_json(_known_files()[hub].read_text(encoding="utf-8"))
    if changes:
        return _config_of({**values, **changes}, hub)
    _check(values, hub)
    return cast("Config", SimpleNamespace(**values))


def hub_name(name: str) -> str | None:
    """The full name of a known model ("facebook/opt-30b" for "OPT-30B")."""
    wanted = name.lower()
    return next((hub for hub in _known_files() if wanted in (hub.lower(), hub.lower().rpartition("/")[2])), None)


def known_names() -> list[str]:
    return sorted(_known_files())


def _known_files() -> dict[str, Path]:
    package = Path(__file__).resolve().parents[1]
    places = (package / "configs" / "models", package.parent / "configs" / "models")  # installed, or a source checkout
    folder = next((place for place in places if place.is_dir()), places[0])
    return {file.stem.replace("--", "/"): file for file in folder.glob("*.json")}


def _config_of(values: Mapping[str, Any], name: str) -> Config:
    """transformers is imported where it alone knows what a config means. Only classes that it has itself are ever made: code
    that comes with a checkpoint is not run."""
    own = text_part(_with_floats(values), lambda model_type: architecture(model_type).bounds, name)
    values = _without_own_keys(own)
    model_type = _check(values, name)
    own_class = architecture(model_type)
    whole = whole_config(values, own_class.usual, own_class.called)
    if whole is not None:
        return cast("Config", SimpleNamespace(**whole))
    from transformers import CONFIG_MAPPING

    try:
        return cast("Config", CONFIG_MAPPING[model_type].from_dict(dict(values)))
    except Exception as error:  # whatever transformers objects to stands in a file of the user's
        raise ValueError(f"the config of {name!r} is not valid: {one_line(error)[:LONGEST_OBJECTION]}") from error


def _with_floats(values: Any) -> Any:
    """The same with numbers that JSON has no words for, which transformers writes as {"__float__": "Infinity"}."""
    if isinstance(values, Mapping):
        if values.keys() == {FLOAT} and values[FLOAT] in NO_JSON:
            return float(values[FLOAT])
        return {key: _with_floats(one) for key, one in values.items()}
    return [*map(_with_floats, values)] if isinstance(values, list) else values


def _check(values: Mapping[str, Any], name: str) -> str:
    """The model_type of a config that an architecture here can run."""
    if unsupported := what_is_unsupported(values, _bounds_of(values.get("model_type"))):
        raise ValueError(f"the model {name!r} cannot be run: {unsupported} not supported; give another one")
    if beside := parts_beside_text(values):
        kind, parts = shown(values.get("model_type")), ", ".join(beside)
        raise ValueError(
            f"the model {name!r} is of the architecture {kind}, which has {parts} beside its text part (text_config); "
            f"text parts are read of {', '.join(TEXT_PARTS)}; give a checkpoint of the text model alone"
        )
    model_type = _known_type(values.get("model_type"))
    own = architecture(model_type)
    check_config({**values, **{usual: values[key] for usual, key in own.called.items() if key in values}}, own.bounds, name)
    return model_type


def _bounds_of(model_type: object) -> Bounds:
    """Those of an architecture alone; nothing of one that is not known."""
    return architecture(model_type).bounds if isinstance(model_type, str) and model_type in MODELS else {}


def _read_folder(folder: Path) -> Mapping[str, Any]:
    file = folder / "config.json"
    if not file.is_file():
        found = sorted(file.name for file in folder.glob(f"*{SUFFIX}"))
        advice = f"give {folder / found[0]}" if found else "give the folder of a Hugging Face checkpoint"
        raise ValueError(f"folder {str(folder)!r} has no config.json; {advice}")
    values = read_object(file, "give the folder of a Hugging Face checkpoint")
    kind = values.get("model_type")
    like = {"model_type": LIKE_OTHERS[kind]} if isinstance(kind, str) and kind in LIKE_OTHERS else {}
    return {**values, **like}


def _without_own_keys(values: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config of transformers less the keys that GGUF files alone may say."""
    unread = set(OWN_KEYS).difference(_bounds_of(values.get("model_type")))
    return {name: value for name, value in values.items() if name not in unread}


def _known_type(model_type: object) -> str:
    if model_type is None:
        raise ValueError("the config names no architecture (model_type); give the folder of a Hugging Face checkpoint")
    if not isinstance(model_type, str) or model_type not in MODELS:
        hint = known_of_many(model_type, MODELS, TABLE_OF_MODELS)
        raise ValueError(f"architecture {shown(model_type)} is not supported{hint}")
    return model_type


def _full_name(name_or_path: str) -> str:
    return name_or_path if Path(name_or_path).is_dir() else hub_name(name_or_path) or name_or_path


@contextmanager
def _nearest_named(name_or_path: str) -> Iterator[None]:
    """A context in which an error that nothing has this name ends with the known names that look like it."""
    try:
        yield
    except ValueError as error:
        hint = "" if hub_name(name_or_path) else _nearest(name_or_path)
        raise ValueError(f"{error}{hint}") from error


def _nearest(name: str) -> str:
    """The end of an error message: which known names look like this one, if any does."""
    by_part = {part: hub for hub in known_names() for part in (hub.lower(), hub.lower().rpartition("/")[2])}
    near = dict.fromkeys(by_part[part] for part in get_close_matches(name.lower(), by_part, n=3))
    return f"; did you mean {' or '.join(near)}?" if near else ""
