"""The serving system: prefix cache on disk, hand-over, balancers, scheduler, fleet and its economics.

Read in this order: keys, block_file, kv_store (prefix cache); chain (replication); pages, requests, scheduler;
handoff, disagg (prefill and decode apart); balance, balance_experts; economics, fleet, published, day_report.
"""

from parallel.serving.balance import balance, decode_cost, prefill_cost
from parallel.serving.balance_experts import balance_experts
from parallel.serving.disagg import PrefillDecode
from parallel.serving.handoff import CachePages, HandOver, Metadata
from parallel.serving.keys import Namespace, block_keys
from parallel.serving.kv_store import KVStore, StoreWarning
from parallel.serving.pages import PagePool
from parallel.serving.requests import Chunk, Engine, Request, Status
from parallel.serving.scheduler import Scheduler, SchedulerConfig
from parallel.serving.spec_stats import SpecStats, expected_length

__all__ = [
    "CachePages",
    "Chunk",
    "Engine",
    "HandOver",
    "KVStore",
    "Metadata",
    "Namespace",
    "PagePool",
    "PrefillDecode",
    "Request",
    "Scheduler",
    "SchedulerConfig",
    "SpecStats",
    "Status",
    "StoreWarning",
    "balance",
    "balance_experts",
    "block_keys",
    "decode_cost",
    "expected_length",
    "prefill_cost",
]
