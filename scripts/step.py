"""Step through a run: stop at any stage or tensor, look at it, hold it to a golden, go back, ask where a row is from.

Commands come from the terminal (with history and completion), from --script, or from standard input when that is no
terminal; `help` lists them. Without --ranks the model runs alone; with it, every rank's stages run in the order of the
schedule. In a terminal the exit code is 0; of a script it is 2 where a command failed, 1 where a tensor differed from
the golden, else 0.

Example: refmodel step --ranks 8 --prompt "def main(" --golden out/main.safetensors
         (step) continue layers.3.attn_core.router.topk_idx
         (step) show layers.3.attn_core.router.topk_weights[4]
         (step) who request 0 token 4
         (step) continue diff
"""

import argparse
import sys

from scripts.run import add_model_arguments, add_prompt_arguments, open_model, read_prompts


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of `refmodel step`."""
    parser.add_argument("--checkpoint", metavar="DIR", help="Hugging Face directory (default: the packaged example)")
    add_model_arguments(parser)
    add_prompt_arguments(parser)
    parser.add_argument("--ranks", type=int, help="emulated ranks (default: the model alone)")
    parser.add_argument("--ranks-per-node", type=int, default=8, help="ranks that share a node (default: 8)")
    parser.add_argument("--dispatch", default="low_latency", help="dialect of dispatch and combine")
    parser.add_argument("--schedule", default="sequential", help="order of stages and micro-batches")
    parser.add_argument("--redundant-experts", type=int, default=0, metavar="N", help="extra physical experts")
    parser.add_argument("--order", default="rank", help="which rank moves: 'rank' (as far as it can), or a seed")
    parser.add_argument("--new-tokens", type=int, default=0, metavar="N", help="tokens behind the prefill (default: 0)")
    parser.add_argument("--drafts", type=int, default=0, metavar="K", help="MTP drafts per step (default: 0)")
    parser.add_argument("--golden", metavar="FILE", help="what `diff` and `continue diff` hold the run to")
    parser.add_argument("--script", metavar="FILE", help="read commands from a file")
    parser.add_argument("--json", action="store_true", help="print one JSON object for each command")


def run(args: argparse.Namespace) -> int:
    """Read commands until there are no more."""
    from scripts.step_session import Session

    stepper = _stepper(args)
    if args.script:
        with open(args.script, encoding="utf-8") as lines:
            return Session(stepper, lines, json=args.json, golden=args.golden).run()
    return Session(stepper, sys.stdin, json=args.json, golden=args.golden).run()


def _stepper(args):
    model, path = open_model(args, args.checkpoint)
    prompts, sampling = read_prompts(args, model, path)
    if args.new_tokens < 0 or args.drafts < 0:
        raise ValueError(f"--new-tokens {args.new_tokens}, --drafts {args.drafts}: must be 0 or more")
    settings = {"speculative": args.drafts > 0, "num_drafts": max(args.drafts, 1), **sampling}
    if args.ranks is None:
        from refmodel.stepper import Stepper

        return Stepper(model, prompts, args.new_tokens, **settings)
    from parallel.deployment import Deployment
    from parallel.stepper import RankStepper
    from parallel.topology import Topology

    topology = Topology(args.ranks, min(args.ranks_per_node, max(args.ranks, 1)))
    order = int(args.order) if args.order.isdigit() else args.order
    deployment = Deployment(model, topology, args.redundant_experts, args.dispatch, args.schedule, order=order)
    return RankStepper(deployment, prompts, args.new_tokens, **settings)
