"""Compares two files once and prints its seconds and its peak: python -m scripts.benches.compare_once A B"""

import json
import sys
import time

from refmodel.golden.compare import compare
from scripts.benches.children import peak_memory

if __name__ == "__main__":
    began, start = time.process_time(), time.perf_counter()
    compare(sys.argv[1], sys.argv[2]).to_text()
    wall, cpu = time.perf_counter() - start, time.process_time() - began
    print(json.dumps({"cpu": cpu, "wall": wall, "peak": peak_memory()}))
