"""Translates names that users of vLLM and transformers know, for messages about unknown arguments."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import fields

from h2o_flexgen.core.hints import did_you_mean
from h2o_flexgen.sampling.params import INSTEAD, SamplingParams

_LEAVE_OUT = "leave it out"
_ONE_DEVICE = f"an LLM computes on one device; {_LEAVE_OUT}, or start `h2o_flexgen run` or `batch` with --gpus N"
_PACKED = 'write weight_codec="group4" or weight_codec="group8", and compute="int8" for products of 8 bits'
_SHARES = "percent=(...) says how much of weights, KV and activations lies where, and cpu_mem= how much memory may be used"

# constructor arguments of other libraries, and what to do here
OPTIONS: Mapping[str, str] = {
    "attn_implementation": f"there is one way to attend; {_LEAVE_OUT}",
    "block_size": f"the KV cache has no blocks of tokens; {_LEAVE_OUT}",
    "cache_dir": "the environment's HF_HOME says where downloads lie",
    "cpu_offload_gb": _SHARES,
    "device_map": f"write device=; {_SHARES}",
    "disable_log_stats": f"nothing is logged, llm.stats has the figures; {_LEAVE_OUT}",
    "download_dir": "the environment's HF_HOME says where downloads lie",
    "enable_chunked_prefill": "prefill_tokens= says how many tokens of prompts are computed at once",
    "enable_prefix_caching": f"every prompt is computed by itself; {_LEAVE_OUT}",
    "enforce_eager": f"no graphs are captured unless graphs= asks for them; {_LEAVE_OUT}",
    "gpu_memory_utilization": 'write gpu_mem="14GB", a size and not a share',
    "hf_token": "log in with `hf auth login`",
    "kv_cache_dtype": 'write kv_codec="group4" or kv_codec="group8"',
    "kv_cache_memory_bytes": _SHARES,
    "load_format": "safetensors and .bin files are both read; random weights are dummy_weights=True",
    "load_in_4bit": 'write weight_codec="group4"',
    "load_in_8bit": 'write weight_codec="group8", and compute="int8" if activations are to be rounded to 8 bits, too',
    "low_cpu_mem_usage": "write cpu_mem=",
    "max_memory": "write gpu_mem= and cpu_mem=",
    "max_model_len": f"room is made for what each call needs; {_LEAVE_OUT}",
    "max_num_batched_tokens": "prefill_tokens= says how many tokens of prompts are computed at once",
    "max_num_seqs": "gpu_batch_size= rows are computed at once, and num_gpu_batches= of these share a pass over the weights",
    "offload_folder": "write offload_dir=",
    "pipeline_parallel_size": _ONE_DEVICE,
    "quantization": _PACKED,
    "quantization_config": _PACKED,
    "revision": "download that revision and give its folder as model",
    "seed": "it belongs to a call: generate(..., seed=0) or SamplingParams(seed=0)",
    "skip_tokenizer_init": f"token ids are taken with any tokenizer, or none; {_LEAVE_OUT}",
    "swap_space": _SHARES,
    "tensor_parallel_size": _ONE_DEVICE,
    "tokenizer_mode": f"there is one kind of tokenizer, the fast one; {_LEAVE_OUT}",
    "torch_dtype": "write dtype=",
    "trust_remote_code": f"code that comes with a model is never run; {_LEAVE_OUT}",
}

_FIRST = "write the prompts as the first argument"
_SAMPLED = "write SamplingParams({}=...)"
# arguments of generate and chat in other libraries, and what to do here
ARGUMENTS: Mapping[str, str] = {
    **{name: f"in SamplingParams: {advice}" for name, advice in INSTEAD.items()},
    **{one.name: _SAMPLED.format(one.name) for one in fields(SamplingParams)},
    "add_generation_prompt": f"the answer is always begun; {_LEAVE_OUT}",
    "attention_mask": "give all that the tokenizer returned as the first argument, or prompts without padding",
    "chat_template": "set it in the model's folder, or render the text with llm.get_tokenizer() and generate from that",
    "eos_token_id": _SAMPLED.format("stop_token_ids"),
    "generation_config": "write sampling_params=SamplingParams(...)",
    "input_ids": _FIRST,
    "inputs": _FIRST,
    "lora_request": f"adapters are not supported; {_LEAVE_OUT}, or merge them into the model",
    "max_length": _SAMPLED.format("max_tokens"),
    "messages": "write llm.chat(messages)",
    "pad_token_id": f"nothing is padded; {_LEAVE_OUT}",
    "params": "write sampling_params=",
    "priority": f"prompts are computed in blocks; {_LEAVE_OUT}",
    "prompt_token_ids": _FIRST + ": generate([[1, 2, 3]])",
    "stop_strings": _SAMPLED.format("stop"),
    "streamer": "write on_token=, which is called with every token",
    "tools": "render the text with llm.get_tokenizer() and generate from that",
    "use_cache": f"the KV cache is always used; {_LEAVE_OUT}",
}


def refuse_unknown(what: str, given: Iterable[str], known: Iterable[str], elsewhere: Mapping[str, str]) -> None:
    """Reports all unknown names in one line, each with its replacement or the nearest known name."""
    names = list(known)
    wrong = [name for name in given if name not in names]
    if wrong:
        advice = (f": {elsewhere[name]}" if name in elsewhere else did_you_mean(name, names) for name in wrong)
        raise ValueError(f"unknown {what} {', and '.join(f'{name!r}{words}' for name, words in zip(wrong, advice))}")
