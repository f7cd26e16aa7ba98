"""The prefix cache on disk: what a reader sees is whole, right, and never another's."""

import dataclasses
import errno
import os
import random
import signal
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from kv_store_writer import (
    SPACE,
    check_everything,
    die_at_operation,
    in_child,
    payload,
    payloads,
    prompts,
    quick_directory,
    write_forever,
)

from parallel.serving.block_file import CorruptBlock, decode_block, encode_block
from parallel.serving.kv_store import KVStore, StoreWarning
from parallel.serving.store_index import scan

HERE = Path(__file__).parent
PROMPT = list(range(100, 110))  # two full blocks of 4 and two tokens more
BLOCK_FILE = 3000 + 16 + 84 + 32  # payload, tokens, header, checksum


@pytest.fixture
def quick_path():
    with quick_directory() as name:
        yield Path(name)


def test_write_then_read_in_another_process_life(tmp_path):
    assert KVStore(tmp_path, SPACE).write(PROMPT, payloads(PROMPT)) == 2
    store = KVStore(tmp_path, SPACE)
    assert store.lookup(PROMPT) == 8
    assert store.read(PROMPT) == (8, payloads(PROMPT))
    assert store.read([*PROMPT[:6], 0, 0, 0]) == (4, [payload(PROMPT[:4])])
    assert store.read([0, *PROMPT]).num_tokens == 0
    assert store.write(PROMPT, payloads(PROMPT)) == 0
    assert store.stats.already_there == 2


def test_the_same_two_blocks_again_hit_one(tmp_path):  # vllm-project/vllm#25267: full hits need one computed token
    store = KVStore(tmp_path, SPACE)
    store.write(PROMPT[:8], payloads(PROMPT[:8]))
    assert store.lookup(PROMPT[:8]) == 4
    assert store.read(PROMPT[:8]).num_tokens == 4
    assert store.read(PROMPT[:9]).num_tokens == 8


def test_a_block_that_looks_ahead_needs_the_right_successor(
    tmp_path,
):  # vllm-project/vllm#50438, vllm-project/vllm-ascend#9247
    space = dataclasses.replace(SPACE, lookahead=1)
    store = KVStore(tmp_path, space)
    store.write(PROMPT[:9], payloads(PROMPT[:9], space))
    assert store.lookup(PROMPT[:9]) == 8
    assert store.lookup([*PROMPT[:8], 0]) == 4
    assert store.lookup(PROMPT[:8]) == 4


def test_blocks_are_added_to_a_prefix_that_is_there(tmp_path):
    store = KVStore(tmp_path, SPACE)
    blocks = payloads(PROMPT)
    assert store.write(PROMPT, blocks[1:], first_block=1) == 0  # its parent is missing
    assert store.stats.refused == 1
    assert store.write(PROMPT, blocks[:1]) == 1
    assert store.write(PROMPT, blocks[1:], first_block=1) == 1
    with pytest.raises(ValueError, match="there are 2 full blocks"):
        store.write(PROMPT, blocks, first_block=1)


def test_namespaces_never_share(tmp_path):
    tenants = [dataclasses.replace(SPACE, tenant=name) for name in ("a", "b")]
    spaces = [SPACE, *tenants, dataclasses.replace(SPACE, adapter="a"), dataclasses.replace(SPACE, numerics="fp8")]
    for i, space in enumerate(spaces):
        store = KVStore(tmp_path, space)
        assert store.lookup(PROMPT) == 0
        store.write(PROMPT, [bytes([i])] * 2)
    for i, space in enumerate(spaces):
        assert KVStore(tmp_path, space).read(PROMPT).payloads == [bytes([i])] * 2


def test_io_is_counted_and_reading_runs_ahead(tmp_path):
    store = KVStore(tmp_path, SPACE, read_ahead=2)
    tokens = list(range(21))
    store.write(tokens, payloads(tokens))
    assert (store.stats.write_ops, store.stats.write_bytes) == (5, 5 * BLOCK_FILE)
    assert store.stats.syncs >= 10  # each file and each rename
    store.read(tokens)
    assert (store.stats.read_ops, store.stats.read_bytes) == (5, 5 * BLOCK_FILE)
    if hasattr(os, "posix_fadvise"):
        assert store.stats.ahead_ops == 4  # all but the first were announced before their turn
    eager = KVStore(tmp_path, SPACE, read_ahead=0)
    eager.read(tokens)
    assert (eager.stats.read_ops, eager.stats.ahead_ops) == (5, 0)


def test_data_are_durable_before_the_name_appears(tmp_path, monkeypatch):
    store = KVStore(tmp_path, SPACE)
    log = []
    for name in ("write", "fsync", "rename"):
        call = getattr(os, name)
        monkeypatch.setattr(os, name, lambda *args, name=name, call=call: (log.append(name), call(*args))[1])
    store.write(PROMPT[:4], payloads(PROMPT[:4]))
    assert log == ["write", "fsync", "fsync", "rename", "fsync"]  # file; new shelf; name


@pytest.mark.parametrize("position", [0, 9, 50, 84, 90, 100, 1500, BLOCK_FILE - 40, BLOCK_FILE - 1])
def test_a_flipped_bit_is_a_miss_and_the_next_write_mends_it(tmp_path, position):
    store = KVStore(tmp_path, SPACE)
    store.write(PROMPT, payloads(PROMPT))
    second = next(e for e in scan(tmp_path / "blocks") if e.parent != SPACE.root().hex())
    data = bytearray(second.path.read_bytes())
    data[position] ^= 1 << (position % 8)
    second.path.write_bytes(data)
    with pytest.warns(StoreWarning, match="treated as a miss"):
        assert store.read(PROMPT) == (4, payloads(PROMPT)[:1])
    assert store.stats.corrupt == 1
    assert store.write(PROMPT, payloads(PROMPT)) == 1
    assert store.read(PROMPT) == (8, payloads(PROMPT))


@pytest.mark.parametrize("length", [0, 10, 83, 100, BLOCK_FILE - 1])
def test_a_truncated_file_is_a_miss(tmp_path, length):
    store = KVStore(tmp_path, SPACE)
    store.write(PROMPT, payloads(PROMPT))
    first = next(e for e in scan(tmp_path / "blocks") if e.parent == SPACE.root().hex())
    os.truncate(first.path, length)
    with pytest.warns(StoreWarning, match="treated as a miss"):
        assert store.read(PROMPT).num_tokens == 0


def test_tokens_are_compared_and_not_only_the_hash():
    data = encode_block(b"k" * 32, b"p" * 32, [1, 2], b"data")
    assert decode_block(data, b"k" * 32, b"p" * 32, [1, 2]) == b"data"
    for key, parent, tokens in ((b"x", b"p", [1, 2]), (b"k", b"x", [1, 2]), (b"k", b"p", [1, 3]), (b"k", b"p", [1])):
        with pytest.raises(CorruptBlock):
            decode_block(data, key * 32, parent * 32, tokens)


def test_the_bound_holds_and_leaves_go_first(tmp_path):
    store = KVStore(tmp_path, SPACE, max_bytes=4 * BLOCK_FILE)
    root, left, right = [1] * 4, [2] * 4, [3] * 4
    for tokens in (root + left, root + right, [5] * 4):
        store.write(tokens, payloads(tokens))
        time.sleep(0.01)
    assert store.used_bytes() == 4 * BLOCK_FILE
    store.read([*root, *left, 0])  # the right branch is now the older leaf but one
    store.write([6] * 4, payloads([6] * 4))
    assert store.used_bytes() <= 4 * BLOCK_FILE
    assert store.stats.evicted == 2
    assert store.lookup([*root, *right, 0]) == 4  # its leaf went, the shared root stayed
    assert store.lookup([*root, *left, 0]) == 8
    assert store.lookup([*[6] * 4, 0]) == 4


def test_a_chain_longer_than_the_store_keeps_its_beginning(tmp_path):
    store = KVStore(tmp_path, SPACE, max_bytes=3 * BLOCK_FILE)
    tokens = list(range(41))
    assert store.write(tokens, payloads(tokens)) == 3
    assert store.lookup(tokens) == 12
    assert store.stats.refused == 1
    assert store.used_bytes() == 3 * BLOCK_FILE


def test_random_use_of_a_small_store_keeps_every_parent(quick_path):
    store = KVStore(quick_path, SPACE, max_bytes=12 * BLOCK_FILE)
    known = prompts(3, 60)
    for tokens in known:
        store.write(tokens, payloads(tokens))
        prefix = store.read(tokens)
        assert prefix.payloads == payloads(tokens)[: len(prefix.payloads)]
        assert store.used_bytes() <= 12 * BLOCK_FILE
        check_everything(quick_path, known)
    assert store.stats.evicted > 20


def full_disk(monkeypatch, after: int):
    """os.write stores `after` more bytes and then reports a full disk."""
    write, left = os.write, [after]

    def limited(fd, data):
        if left[0] <= 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        done = write(fd, data[: left[0]])
        left[0] -= done
        return done

    monkeypatch.setattr(os, "write", limited)


@pytest.mark.parametrize("after", [0, 1, BLOCK_FILE - 1, BLOCK_FILE, BLOCK_FILE + 7])
def test_a_full_disk_is_a_warning_and_misses(tmp_path, monkeypatch, after):
    store = KVStore(tmp_path, SPACE)
    full_disk(monkeypatch, after)
    with pytest.warns(StoreWarning, match="No space left"):
        assert store.write(PROMPT, payloads(PROMPT)) == after // BLOCK_FILE
    assert store.read(PROMPT).num_tokens == after // BLOCK_FILE * 4
    assert store.stats.failed_writes == 1
    assert list((tmp_path / "beside").iterdir()) == []
    monkeypatch.undo()
    store.write(PROMPT, payloads(PROMPT))
    assert store.read(PROMPT).num_tokens == 8


def test_a_file_size_limit_of_the_system_is_a_warning_too(tmp_path):
    code = (
        f"import resource, sys, warnings; sys.path[:0] = {[str(HERE.parents[1]), str(HERE)]}\n"
        "from kv_store_writer import SPACE, payloads\n"
        "from parallel.serving.kv_store import KVStore, StoreWarning\n"
        f"store = KVStore({str(tmp_path)!r}, SPACE)\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (1000, 1000))\n"
        "with warnings.catch_warnings(record=True) as seen:\n"
        "    warnings.simplefilter('always')\n"
        "    print(store.write(list(range(9)), payloads(list(range(9)))), seen[0].category is StoreWarning)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["0", "True"]


def test_a_live_writer_keeps_its_file_and_an_abandoned_one_goes(tmp_path):
    KVStore(tmp_path, SPACE)
    abandoned = tmp_path / "beside" / "dead"
    abandoned.write_bytes(b"half")
    KVStore(tmp_path, SPACE)
    assert not abandoned.exists()


@pytest.mark.parametrize("max_bytes", [None, 12 * BLOCK_FILE])
def test_several_processes_agree(quick_path, max_bytes):
    KVStore(quick_path, SPACE, max_bytes)
    known = prompts(1) + prompts(2)

    def work(seed):
        store = KVStore(quick_path, SPACE, max_bytes)
        for tokens in prompts(seed):
            store.write(tokens, payloads(tokens))
            prefix = store.read(tokens)
            if prefix.payloads != payloads(tokens)[: len(prefix.payloads)]:
                os._exit(3)
        os._exit(7)

    children = [in_child(lambda seed=seed: work(seed)) for seed in (1, 2, 1)]
    assert [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) for child in children] == [7, 7, 7]
    count = check_everything(quick_path, known)
    store = KVStore(quick_path, SPACE, max_bytes)
    if max_bytes is None:
        assert all(store.read(tokens).payloads == payloads(tokens) for tokens in known)
        assert count == len({tuple(t[: i * 4]) for t in known for i in range(1, len(t) // 4 + 1)})
    else:
        assert store.used_bytes() <= max_bytes


def kill_at_random(tmp_path, times: int, seed: int):
    """Start a writer, kill it at a random moment, look at everything; again and again on the same directory."""
    rng = random.Random(seed)
    known = prompts(1) + prompts(2)
    for turn in range(times):
        path = tmp_path / str(turn % 4)
        max_bytes = 15 * BLOCK_FILE if turn % 2 else None
        child = in_child(lambda path=path, turn=turn, most=max_bytes: write_forever(path, 1 + turn % 2, most))
        time.sleep(rng.uniform(0.0, 0.04))
        os.kill(child, signal.SIGKILL)
        assert os.WTERMSIG(os.waitpid(child, 0)[1]) == signal.SIGKILL
        check_everything(path, known)
        with warnings.catch_warnings():
            warnings.simplefilter("error")  # nothing is corrupt, nothing fails
            store = KVStore(path, SPACE, max_bytes)
            assert list((path / "beside").iterdir()) == []
            for tokens in known:
                prefix = store.read(tokens)
                assert prefix.payloads == payloads(tokens)[: len(prefix.payloads)]


def test_kill_at_random_points(quick_path):
    kill_at_random(quick_path, 15, seed=0)


@pytest.mark.long
def test_kill_at_200_random_points(quick_path):
    kill_at_random(quick_path, 200, seed=1)


def test_kill_at_every_operation_in_turn(quick_path):
    known = prompts(1)
    finished = False
    for number in range(1, 400):

        def body(number=number):
            store = KVStore(quick_path / str(number), SPACE, max_bytes=5 * BLOCK_FILE)
            die_at_operation(number)
            for tokens in known[:2]:
                store.write(tokens, payloads(tokens))

        status = os.waitpid(in_child(body), 0)[1]
        finished = os.WIFEXITED(status)
        check_everything(quick_path / str(number), known)
        store = KVStore(quick_path / str(number), SPACE, max_bytes=5 * BLOCK_FILE)
        store.write(known[5], payloads(known[5]))
        assert store.used_bytes() <= 5 * BLOCK_FILE
        assert store.lookup(known[5]) > 0
        if finished:
            break
    assert finished
    assert number > 20


def test_bad_arguments(tmp_path):
    with pytest.raises(ValueError, match="max_bytes = 0"):
        KVStore(tmp_path, SPACE, max_bytes=0)
    with pytest.raises(ValueError, match="read_ahead = -1"):
        KVStore(tmp_path, SPACE, read_ahead=-1)
    (tmp_path / "file").write_text("")
    with pytest.raises(OSError, match="file"):
        KVStore(tmp_path / "file", SPACE)
