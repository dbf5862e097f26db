"""Translates names that users of vLLM and transformers know, for messages about unknown arguments."""

from __future__ import annotations

from collections.abc import Mapping

from h2o_flexgen.sampling.params import INSTEAD, SAMPLING

_LEAVE_OUT = "leave it out"
_GPUS = "`h2o-flexgen run` and `h2o-flexgen batch` start a process with each of several GPUs: --gpus N"
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
    "enable_prefix_caching": "generate_stream, `h2o-flexgen batch` and `h2o-flexgen serve` compute once what prompts begin "
    "with alike, unless shared_prefixes=False; generate computes each prompt by itself",
    "enforce_eager": f"no graphs are captured unless graphs= asks for them; {_LEAVE_OUT}",
    "gpu_memory_utilization": 'write gpu_mem="14GB", a size and not a share',
    "hf_token": "log in with `hf auth login`",
    "kv_cache_dtype": 'write kv_codec="group4" or kv_codec="group8"',
    "kv_cache_memory_bytes": _SHARES,
    "load_format": "safetensors, .bin and GGUF files are all read; random weights are dummy_weights=True",
    "load_in_4bit": 'write weight_codec="group4"',
    "load_in_8bit": 'write weight_codec="group8", and compute="int8" if activations are to be rounded to 8 bits, too',
    "low_cpu_mem_usage": "write cpu_mem=",
    "max_memory": "write gpu_mem= and cpu_mem=",
    "max_model_len": f"room is made for what each call needs; {_LEAVE_OUT}",
    "max_num_batched_tokens": "prefill_tokens= says how many tokens of prompts are computed at once",
    "max_num_seqs": "gpu_batch_size= rows are computed at once, and num_gpu_batches= of these share a pass over the weights",
    "offload_folder": "write offload_dir=",
    "pipeline_parallel_size": "write pipeline=, the number of GPUs that each compute a range of the layers",
    "quantization": _PACKED,
    "quantization_config": _PACKED,
    "revision": "download that revision and give its folder as model",
    "seed": "it belongs to a call: generate(..., seed=0) or SamplingParams(seed=0)",
    "skip_tokenizer_init": f"token ids are taken with any tokenizer, or none; {_LEAVE_OUT}",
    "swap_space": _SHARES,
    "tensor_parallel_size": f"no layer is divided among GPUs; write pipeline= to divide the layers; {_GPUS}",
    "tokenizer_mode": f"there is one kind of tokenizer, the fast one; {_LEAVE_OUT}",
    "torch_dtype": "write dtype=",
    "trust_remote_code": f"code that comes with a model is never run; {_LEAVE_OUT}",
}

_FIRST = "write the prompts as the first argument"
# arguments of generate and chat in other libraries, and what to do here
ARGUMENTS: Mapping[str, str] = {
    **{name: f"in SamplingParams: {advice}" for name, advice in INSTEAD.items()},
    **{name: f"write SamplingParams({name}=...)" for name in SAMPLING},
    "add_generation_prompt": f"the answer is always begun; {_LEAVE_OUT}",
    "attention_mask": "give all that the tokenizer returned as the first argument, or prompts without padding",
    "chat_template": "set it in the model's folder, or render the text with llm.get_tokenizer() and generate from that",
    "generation_config": "write sampling_params=SamplingParams(...)",
    "input_ids": _FIRST,
    "inputs": _FIRST,
    "lora_request": f"adapters are not supported; {_LEAVE_OUT}, or merge them into the model",
    "messages": "write llm.chat(messages)",
    "pad_token_id": f"nothing is padded; {_LEAVE_OUT}",
    "params": "write sampling_params=",
    "priority": f"prompts are computed in blocks; {_LEAVE_OUT}",
    "prompt_token_ids": _FIRST + ": generate([[1, 2, 3]])",
    "streamer": "write on_token=, which is called with every token",
    "tools": "render the text with llm.get_tokenizer() and generate from that",
    "use_cache": f"the KV cache is always used; {_LEAVE_OUT}",
}
