"""Names that users of vLLM, transformers and llama-cpp-python know: what is accepted here, what is translated, and what to do
instead of the rest."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from h2o_flexgen.core.hints import shown
from h2o_flexgen.sampling.params import INSTEAD, SAMPLING

_LEAVE_OUT = "leave it out"
_AT_ONCE = "prefill_tokens= says how many tokens of prompts are computed at once"
_GPUS = "`h2o-flexgen run` and `h2o-flexgen batch` start a process with each of several GPUs: --gpus N"
_MERGED = "write adapter=FOLDER, or a list, which is merged into the model; or lora={NAME: PATH} for adapters of requests"
_PACKED = 'write weight_codec="group4" or weight_codec="group8", and compute="int8" for products of 8 bits'
_SHARES = "percent=(...) says how much of weights, KV and activations lies where, and cpu_mem= how much memory may be used"

_LENGTH = "room is made for what each call needs; give a number of tokens that the model has positions for, or leave it out"
_NOTHING_LOGGED = "nothing is logged, llm.stats has the figures"
_TRUE_OR_FALSE = (True, False)
_HOLDS = ("auto", "guidance", None)


class ForeignOption(NamedTuple):
    """A constructor argument of other libraries."""

    instead: str  # what to do here, if its value asks for something
    changes_nothing: tuple[object, ...] = ()  # values that ask for nothing that is not so here anyway
    own: str = ""  # the option that it is here, which gets the value
    is_length: bool = False  # of the longest text: the model must have as many positions

    def accepts(self, value: object) -> bool:
        return any(type(value) is type(one) and value == one for one in self.changes_nothing)


# constructor arguments of other libraries
FOREIGN: Mapping[str, ForeignOption] = {
    "attn_implementation": ForeignOption(f"there is one way to attend; {_LEAVE_OUT}"),
    "block_size": ForeignOption(f"the KV cache has no blocks of tokens; {_LEAVE_OUT}"),
    "cache_dir": ForeignOption("the environment's HF_HOME says where downloads lie", (None,)),
    "chat_format": ForeignOption("chats have the form of the model's own template; llm.chat takes another one", (None,)),
    "chat_template": ForeignOption("it belongs to a call of llm.chat, which takes one", (None,)),
    "cpu_offload_gb": ForeignOption(_SHARES, (0,)),
    "device_map": ForeignOption(f"write device=; {_SHARES}"),
    "disable_log_stats": ForeignOption(f"{_NOTHING_LOGGED}; {_LEAVE_OUT}", _TRUE_OR_FALSE),
    "download_dir": ForeignOption("the environment's HF_HOME says where downloads lie", (None,)),
    "enable_chunked_prefill": ForeignOption(_AT_ONCE, _TRUE_OR_FALSE),
    "enable_lora": ForeignOption(f"adapters of requests need no switch; {_LEAVE_OUT}", (*_TRUE_OR_FALSE, None)),
    "enable_prefix_caching": ForeignOption(
        "generate_stream, `h2o-flexgen batch` and `h2o-flexgen serve` compute once what prompts begin with alike, unless "
        "shared_prefixes=False; generate computes each prompt by itself",
        (True, None),
    ),
    "enforce_eager": ForeignOption(f"graphs= says whether steps are captured; {_LEAVE_OUT}", _TRUE_OR_FALSE),
    "gpu_memory_utilization": ForeignOption('write gpu_mem="14GB", a size and not a share'),
    "guided_decoding_backend": ForeignOption(f"llguidance holds texts to all forms; {_LEAVE_OUT}", _HOLDS),
    "hf_token": ForeignOption("log in with `hf auth login`", (None,)),
    "kv_cache_dtype": ForeignOption('write kv_codec="group4" or kv_codec="group8"', ("auto",)),
    "kv_cache_memory_bytes": ForeignOption(_SHARES),
    "load_format": ForeignOption(
        "safetensors, .bin and GGUF files are all read; random weights are dummy_weights=True", ("auto",)
    ),
    "load_in_4bit": ForeignOption('write weight_codec="group4"'),
    "load_in_8bit": ForeignOption(
        'write weight_codec="group8", and compute="int8" if activations are to be rounded to 8 bits, too'
    ),
    "lora_modules": ForeignOption("write lora={NAME: PATH}"),
    "lora_path": ForeignOption(_MERGED, (None,)),
    "low_cpu_mem_usage": ForeignOption("write cpu_mem=", _TRUE_OR_FALSE),
    "max_lora_rank": ForeignOption(f"adapters have any rank; {_LEAVE_OUT}"),
    "max_loras": ForeignOption(f"all adapters that are given are held; {_LEAVE_OUT}"),
    "max_memory": ForeignOption("write gpu_mem= and cpu_mem="),
    "max_model_len": ForeignOption(_LENGTH, (None,), is_length=True),
    "max_num_batched_tokens": ForeignOption(_AT_ONCE),
    "max_num_seqs": ForeignOption(
        "gpu_batch_size= rows are computed at once, and num_gpu_batches= of these share a pass over the weights"
    ),
    "model_path": ForeignOption("write model=", own="model"),
    "n_batch": ForeignOption(_AT_ONCE),
    "n_ctx": ForeignOption(_LENGTH, (0, None), is_length=True),
    "n_gpu_layers": ForeignOption(_SHARES, (0,)),
    "n_threads": ForeignOption("write threads=", own="threads"),
    "offload_folder": ForeignOption("write offload_dir="),
    "pipeline_parallel_size": ForeignOption(
        "write pipeline=, the number of GPUs that each compute a range of the layers", (1,)
    ),
    "quantization": ForeignOption(_PACKED, (None,)),
    "quantization_config": ForeignOption(_PACKED, (None,)),
    "revision": ForeignOption("download that revision and give its folder as model", (None,)),
    "seed": ForeignOption("it belongs to a call: generate(..., seed=0) or SamplingParams(seed=0)", (0, None)),
    "skip_tokenizer_init": ForeignOption(f"token ids are taken with any tokenizer, or none; {_LEAVE_OUT}", (False,)),
    "speculative_config": ForeignOption('draft="ngram" guesses tokens from texts; there is no other draft', (None,)),
    "structured_outputs_config": ForeignOption(f"llguidance holds texts to all forms; {_LEAVE_OUT}", (None,)),
    "swap_space": ForeignOption(_SHARES, (0,)),
    "tensor_parallel_size": ForeignOption(
        f"no layer is divided among GPUs; write pipeline= to divide the layers; {_GPUS}", (1,)
    ),
    "tokenizer_mode": ForeignOption(f"there is one kind of tokenizer, the fast one; {_LEAVE_OUT}", ("auto",)),
    "torch_dtype": ForeignOption("write dtype="),
    "trust_remote_code": ForeignOption(f"code that comes with a model is never run; {_LEAVE_OUT}", (False,)),
    "verbose": ForeignOption(f"{_NOTHING_LOGGED}; {_LEAVE_OUT}", _TRUE_OR_FALSE),
}
OPTIONS: Mapping[str, str] = {name: one.instead for name, one in FOREIGN.items()}  # what to do here instead

_FIRST = "write the prompts as the first argument"
# arguments of generate and chat in other libraries, and what to do here
ARGUMENTS: Mapping[str, str] = {
    **{name: f"in SamplingParams: {advice}" for name, advice in INSTEAD.items()},
    **{name: f"write SamplingParams({name}=...)" for name in SAMPLING},
    "add_generation_prompt": f"the answer is always begun; {_LEAVE_OUT}",
    "attention_mask": "give all that the tokenizer returned as the first argument, or prompts without padding",
    "generation_config": "write sampling_params=SamplingParams(...)",
    "input_ids": _FIRST,
    "inputs": _FIRST,
    "messages": "write llm.chat(messages)",
    "pad_token_id": f"nothing is padded; {_LEAVE_OUT}",
    "params": "write sampling_params=",
    "priority": f"prompts are computed in blocks; {_LEAVE_OUT}",
    "prompt_token_ids": _FIRST + ": generate([[1, 2, 3]])",
    "streamer": "write on_token=, which is called with every token",
    "tools": "write llm.chat(messages, tools=...)",
    "use_cache": f"the KV cache is always used; {_LEAVE_OUT}",
}

OF_CONSTRUCTORS = tuple(one.own for one in FOREIGN.values() if one.own)  # arguments beside the options of plans
SHORT_DTYPES: Mapping[str, str] = {"half": "float16", "float": "float32"}  # as vLLM also calls them


def dtype_called(given: object) -> str:
    """The name of a type that may be given as one of torch's, or as vLLM's name for it."""
    name = str(given).removeprefix("torch.")
    return SHORT_DTYPES.get(name, name)


@dataclass(frozen=True)
class OwnOptions:
    """What a constructor was given, without the names of other libraries."""

    options: Mapping[str, object]
    lengths: Mapping[str, int]  # of texts that the model must have positions for, by their names

    @classmethod
    def of(cls, given: Mapping[str, object]) -> OwnOptions:
        """Leaves out what changes nothing here, and translates what has another name. What asks for something else stays, to
        be refused with all unknown names."""
        options, lengths = dict[str, object](), dict[str, int]()
        for name, value in given.items():
            foreign = FOREIGN.get(name)
            if foreign is None or not (foreign.own or foreign.is_length or foreign.accepts(value)):
                options[name] = value
            elif foreign.own:
                if foreign.own in given:
                    raise ValueError(f"both {name} and {foreign.own} are given, which mean the same; leave one out")
                options[foreign.own] = value
            elif not foreign.accepts(value):
                lengths[name] = _length(name, value)
        return cls(options, lengths)

    def refuse_longer(self, positions: int, model: str) -> None:
        for name, length in self.lengths.items():
            if length > positions:
                raise ValueError(
                    f"{name} is {length}, but {model} has {positions} positions; give that or less, or leave it out"
                )


def _length(name: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise ValueError(f"{name} is {shown(value)}, which is no number of tokens from 1 on; leave it out, or give one")
    return value
