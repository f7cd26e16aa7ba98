"""Capture from vLLM, by forward hooks in its worker processes. Runs in an environment with vLLM.

    python scripts/adapters/vllm_adapter.py REQUEST.json

The CPU build and the GPU builds are driven alike. CUDA graphs and compilation would hide the modules from the hooks:
`enforce_eager` is set, and turning it off is refused. On the CPU, MLA needs a latent of 512 and a rope width of 64.
"""

import os
from pathlib import Path

HERE = str(Path(__file__).resolve().parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH")]))
os.environ.setdefault("VLLM_ALLOW_INSECURE_SERIALIZATION", "1")  # functions travel to the workers
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import vllm_hooks  # noqa: E402 - vLLM reads the variables above when it is imported
from request import Request, Result, main  # noqa: E402
from vllm import LLM, SamplingParams, __version__  # noqa: E402
from vllm.platforms import current_platform  # noqa: E402


def load(request: Request) -> LLM:
    """The engine, eager, without a tokenizer, long enough for the longest prompt in one prefill."""
    args = dict(request.engine_args)
    if not args.pop("enforce_eager", True):
        raise ValueError("enforce_eager=false: hooks see nothing inside CUDA graphs and compiled code; leave it true")
    if args.get("enable_prefix_caching") or args.get("data_parallel_size", 1) != 1:
        raise ValueError("enable_prefix_caching and data_parallel_size > 1: a rank then sees only part of a prompt")
    if args.pop("fix_expert_map", False):
        args["worker_extension_cls"] = "vllm_expert_map.Extension"
    elif args.get("enable_expert_parallel") and current_platform.is_cpu() and __version__.startswith("0.32."):
        raise ValueError(
            "enable_expert_parallel=true on a CPU: vLLM 0.32's expert kernel is not given the expert map and reads "
            "past this rank's experts (segmentation fault); fix_expert_map=true runs it with the map applied"
        )
    length = max(len(tokens) for tokens in request.tokens) + request.new_tokens + 8
    if request.mtp:
        args.setdefault("speculative_config", {"method": "deepseek_mtp", "num_speculative_tokens": 1})
    args.setdefault("max_model_len", length)
    args.setdefault("max_num_batched_tokens", max(length, 2048))
    return LLM(
        model=request.model,
        dtype=request.dtype,
        enforce_eager=True,
        skip_tokenizer_init=True,
        enable_prefix_caching=False,
        disable_log_stats=False,
        **args,
    )


def capture(llm: LLM, request: Request, result: Result) -> None:
    """Prefill the first prompt with every worker hooked; each writes its file into the answer's folder."""
    tokens = request.tokens[0]
    llm.collective_rpc(vllm_hooks.start, args=(len(tokens),))
    output = _run(llm, tokens, max_tokens=1, prompt_logprobs=1, logprobs=1)
    llm.collective_rpc(vllm_hooks.finish, args=(request.out,))
    chosen = zip(tokens[1:], output.prompt_logprobs[1:], strict=True)
    result.logprobs = [entry[token].logprob for token, entry in chosen]
    experts = output.outputs[0].routed_experts
    if experts is not None:  # only with --engine-args enable_return_routed_experts=true, where the build has it
        result.routed_experts = experts[: len(tokens)].tolist()


def generate(llm: LLM, request: Request, result: Result) -> None:
    """Greedy continuations, one prompt after another, with every draft of the MTP layer where the engine speculates."""
    for tokens in request.tokens:
        llm.collective_rpc(vllm_hooks.start, args=(1 << 40,))  # no prefill is that long: keeps drafts alone
        output = _run(llm, tokens, max_tokens=request.new_tokens, ignore_eos=True)
        result.generated.append(list(output.outputs[0].token_ids))
        answers = llm.collective_rpc(vllm_hooks.finish, args=("",))
        result.drafts.append([draft[0][0] for draft in answers[0]["drafts"] if draft and draft[0]])
    for metric in llm.get_metrics():
        if metric.name.startswith("vllm:spec_decode") and hasattr(metric, "value"):
            result.counters[metric.name] = metric.value


def _run(llm, tokens, **sampling):
    params = SamplingParams(temperature=0.0, detokenize=False, **sampling)
    return llm.generate([{"prompt_token_ids": list(tokens)}], params, use_tqdm=False)[0]


def answer(request: Request) -> Result:
    """Answer one request of the `capture` command."""
    llm, result = load(request), Result(engine=f"vllm {__version__}")
    if request.tensors:
        capture(llm, request, result)
        from safetensors import safe_open

        with safe_open(f"{request.out}/rank.0.safetensors", "pt") as file:
            result.joins = vllm_hooks.joins(file.keys())
    if request.new_tokens:
        generate(llm, request, result)
    return result


if __name__ == "__main__":
    main(answer)
