"""Capture from SGLang through its `forward_hooks` option. Written from its sources, never run: treat it as a start.

    python scripts/adapters/sglang_adapter.py REQUEST.json

One rank only: under tensor parallelism these modules' outputs are not yet reduced. CUDA graphs are turned off.
"""

import json
import os
from pathlib import Path

HERE = str(Path(__file__).resolve().parent)
os.environ["PYTHONPATH"] = os.pathsep.join(filter(None, [HERE, os.environ.get("PYTHONPATH")]))

import sglang  # noqa: E402 - its processes inherit the variable above
from request import Request, Result, main  # noqa: E402
from sglang_hooks import hook_entries  # noqa: E402


def answer(request: Request) -> Result:
    """Answer one request of the `capture` command."""
    args = dict(request.engine_args)
    for name in ("tp_size", "ep_size", "dp_size", "pp_size"):
        if args.get(name, 1) != 1:
            raise ValueError(f"{name}={args[name]}: this adapter captures one rank only")
    if not args.pop("disable_cuda_graph", True):
        raise ValueError("disable_cuda_graph=false: hooks see nothing inside CUDA graphs; leave it true")
    if request.mtp:
        raise ValueError("this adapter does not capture SGLang's MTP layer")
    tokens = request.tokens[0]
    config = json.loads((Path(request.model) / "config.json").read_text())
    engine = sglang.Engine(
        model_path=request.model,
        dtype=request.dtype,
        skip_tokenizer_init=True,
        disable_cuda_graph=True,
        disable_radix_cache=True,
        chunked_prefill_size=-1,
        forward_hooks=hook_entries(config, len(tokens), f"{request.out}/rank.0.safetensors"),
        **args,
    )
    result = Result(engine=f"sglang {sglang.__version__}", notes=["the SGLang adapter has not been tested"])
    sampling = {"temperature": 0.0, "ignore_eos": True, "max_new_tokens": max(1, request.new_tokens)}
    for prompt in request.tokens:
        output = engine.generate(input_ids=prompt, sampling_params=sampling, return_logprob=True, logprob_start_len=0)
        if not result.generated:
            result.logprobs = [entry[0] for entry in output["meta_info"]["input_token_logprobs"][1:]]
        result.generated.append(list(output["output_ids"])[: request.new_tokens])
    engine.shutdown()
    return result


if __name__ == "__main__":
    main(answer)
