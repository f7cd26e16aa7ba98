"""Runs one prefill and prints its peak: python -m scripts.benches.memory_once SIZE RANKS REDUNDANT DIALECT"""

import json
import sys

from scripts.benches.children import peak_memory
from scripts.benches.size_a import QUICK, STANDARD, make_model, one_pass

_TOKENS = {"quick": 64, "standard": 4608}

if __name__ == "__main__":
    size, ranks, redundant, dialect = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
    config = {"quick": QUICK, "standard": STANDARD}[size].config
    model = make_model(config)
    one_pass(model, ranks, _TOKENS[size] // ranks, redundant, None if dialect == "none" else dialect)()
    print(json.dumps({"peak": peak_memory()}))
