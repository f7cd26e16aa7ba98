"""A tiny deployment in exact integer arithmetic, and generators of random schedules, for tests of parallel.schedule.

Every value is a 61-bit hash of everything that was read to make it, so that any stage that runs too early, reads the
wrong row, or adds in another order changes the result.
"""

import random

from parallel.schedule.ops import LayerPlan, Op

PRIME = (1 << 61) - 1
TOP_K = 2


def mix(*values):
    """Order-sensitive hash of integers."""
    result = 1469598103934665603
    for value in values:
        result = (result * 1099511628211 + int(value) + 7) % PRIME
    return result


class World:
    """R ranks, each with requests of some lengths; every token belongs to a micro-batch of its rank."""

    def __init__(self, lengths, assignment, layers, micro_batches=2, num_experts=6):
        self.layers, self.ranks, self.num_experts = layers, range(len(lengths)), num_experts
        self.tokens = {(rank, m): [] for rank in self.ranks for m in range(micro_batches)}
        for rank, requests in enumerate(lengths):
            for request, length in enumerate(requests):
                for position in range(length):
                    half = assignment[rank][request][position]
                    self.tokens[rank, half].append((request, position))
        self.state, self.keys, self.scratch, self.mail = {}, {}, {}, {}
        self.result = {}

    def spans(self):
        """(rank, earlier, later) where a request has tokens in both micro-batches."""
        found = set()
        for rank in self.ranks:
            first, second = ({request for request, _ in self.tokens[rank, m]} for m in (0, 1))
            if first & second:
                found.add((rank, 0, 1))
        return sorted(found)

    def previous(self, op):
        return op.layer - 1 if op.layer > self.layers.layers[0] else "in"

    def token_keys(self, op):
        return [(op.rank, *token) for token in self.tokens[op.rank, op.micro_batch]]

    def ready(self, op):
        if not op.stage.endswith(("_recv", "_forward")):
            return True
        return not self.missing(op)

    def missing(self, op):
        exchange = op.stage.split("_")[0]
        return [src for src in self.ranks if (exchange, op.micro_batch, op.layer, src, op.rank) not in self.mail]

    def waits_for(self, op):
        return "packets of ranks " + ", ".join(map(str, self.missing(op)))

    def run(self, op):
        getattr(self, "do_" + op.stage)(op)

    def do_embed(self, op):
        for key in self.token_keys(op):
            self.state["in", key] = mix(11, *key)

    def do_attn_proj(self, op):
        for key in self.token_keys(op):
            self.keys[op.layer, key] = mix(op.layer, self.state[self.previous(op), key])

    def do_attn_core(self, op):
        for rank, request, position in self.token_keys(op):
            seen = [self.keys[op.layer, (rank, request, before)] for before in range(position + 1)]
            self.scratch["attn", op.layer, (rank, request, position)] = mix(op.layer, *seen)

    def routed(self, value):
        first = mix(value, 1) % self.num_experts
        return [first, (first + 1 + mix(value, 2) % (self.num_experts - 1)) % self.num_experts]

    def do_dispatch_send(self, op):
        packets = {dst: [] for dst in self.ranks}
        for key in self.token_keys(op):
            value = self.scratch["attn", op.layer, key]
            for slot, expert in enumerate(self.routed(value)):
                packets[expert % len(self.ranks)].append((key, slot, expert, value))
        for dst, rows in packets.items():
            self.mail["dispatch", op.micro_batch, op.layer, op.rank, dst] = rows

    def do_dispatch_forward(self, op):
        pass

    do_combine_forward = do_dispatch_forward

    def do_dispatch_recv(self, op):
        where = [("dispatch", op.micro_batch, op.layer, src, op.rank) for src in self.ranks]
        self.scratch["rows", op.micro_batch, op.layer, op.rank] = [row for key in where for row in self.mail.pop(key)]

    def do_experts(self, op):
        rows = self.scratch.pop(("rows", op.micro_batch, op.layer, op.rank))
        out = [(key, slot, mix(op.layer, expert, value)) for key, slot, expert, value in rows]
        self.scratch["out", op.micro_batch, op.layer, op.rank] = out

    def do_combine_send(self, op):
        rows = self.scratch.pop(("out", op.micro_batch, op.layer, op.rank))
        for dst in self.ranks:
            mine = [row for row in rows if row[0][0] == dst]
            self.mail["combine", op.micro_batch, op.layer, op.rank, dst] = mine

    def do_combine_recv(self, op):
        where = [("combine", op.micro_batch, op.layer, src, op.rank) for src in self.ranks]
        rows = {(key, slot): value for name in where for key, slot, value in self.mail.pop(name)}
        for key in self.token_keys(op):
            self.scratch["routed", op.layer, key] = mix(*(rows[key, slot] for slot in range(TOP_K)))

    def do_shared(self, op):
        for key in self.token_keys(op):
            self.scratch["shared", op.layer, key] = mix(17, self.scratch["attn", op.layer, key])

    def do_merge(self, op):
        for key in self.token_keys(op):
            parts = [self.scratch[name, op.layer, key] for name in ("attn", "routed", "shared")]
            self.state[op.layer, key] = mix(*parts)

    def do_mlp(self, op):
        for key in self.token_keys(op):
            self.state[op.layer, key] = mix(19, self.scratch["attn", op.layer, key])

    def do_final(self, op):
        for key in self.token_keys(op):
            self.result[key] = mix(23, self.state[op.layer, key])


def random_extension(rng, rank, layers, micro_batches=2, sends=None, stream=True, spans=()):
    """A random program of one rank: any order that respects what each stage reads.

    sends: the order of exchanges to keep to. stream: one exchange at a time. spans: (earlier, later) micro-batches.
    """
    left = [Op("F", rank, m, layer, stage) for m in range(micro_batches) for layer, stage in layers.program()]
    sends = list(sends) if sends is not None else None
    done, ops, in_flight = set(), [], None
    rush = rng.random()  # how eagerly exchanges advance: makes both short and long windows
    while left:
        movable = []
        for op in left:
            needs = [(op.micro_batch, *read) for read in layers.reads(op.layer, op.stage)]
            if op.stage == "attn_core":
                needs += [(earlier, op.layer, "attn_proj") for earlier, later in spans if later == op.micro_batch]
            if any(need not in done for need in needs):
                continue
            if op.stage.endswith("_send") and stream and in_flight is not None:
                continue
            if op.stage.endswith("_send") and sends is not None and (op.micro_batch, op.layer, op.stage) != sends[0]:
                continue
            movable.append(op)
        eager = [op for op in movable if "_" in op.stage and not op.stage.startswith("attn")]
        op = rng.choice(eager if eager and rng.random() < rush else movable)
        left.remove(op)
        ops.append(op)
        done.add((op.micro_batch, op.layer, op.stage))
        if op.stage.endswith("_send"):
            in_flight = op
            if sends is not None:
                sends.pop(0)
        elif op.stage.endswith("_recv"):
            in_flight = None
    return ops


def sends_of(ops):
    return [(op.micro_batch, op.layer, op.stage) for op in ops if op.stage.endswith("_send")]


def random_schedules(rng, ranks, layers, spans=(), **options):
    """A random legal schedule: all ranks keep to the exchange order of a random program."""
    pairs = sorted({(earlier, later) for _, earlier, later in spans})
    sends = sends_of(random_extension(rng, 0, layers, spans=pairs, **options))
    return [random_extension(rng, rank, layers, sends=sends, spans=pairs, **options) for rank in range(ranks)]


def random_case(seed):
    """(world factory, layers, lengths): ranks, requests, layer counts and a split of every request over halves."""
    rng = random.Random(seed)
    ranks = rng.randint(1, 4)
    layers = LayerPlan.of(rng.randint(1, 4), rng.randint(0, 2))
    lengths = [[rng.randint(1, 4) for _ in range(rng.randint(0, 3))] for _ in range(ranks)]
    style = rng.choice(("first", "second", "cut", "requests"))
    assignment = []
    for requests in lengths:
        rows = []
        for length in requests:
            cut = {"first": length, "second": 0, "cut": rng.randint(0, length)}.get(style, rng.choice((0, length)))
            rows.append([0] * cut + [1] * (length - cut))
        assignment.append(rows)
    return (lambda: World(lengths, assignment, layers)), layers, ranks, rng
